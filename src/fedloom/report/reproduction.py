"""A paper's table beside measured numbers, as CSV, Markdown and LaTeX."""

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from fedloom.report.latex import escape

Row = dict[str, Any]
COLUMNS = {
    "method": "method",
    "metric": "metric",
    "paper": "paper",
    "ours": "ours",
    "difference": "difference",
    "se": "s.e.",
    "validation": "validation",
    "last": "last round",
    "remark": "remark",
}
NOT_RUN = "not run"
TEXT = ("method", "metric", "remark")
CAPTION = (
    "ours: the mean over seeds, measured as the paper does; s.e.: its standard error; validation and last round: the "
    "same metric in the round that is best on validation data, and in the last one. A number in brackets contradicts "
    "others of the paper, or is damaged, so it is no target."
)
COSTS_CAPTION = "ours: counted, or timed on this machine, without training. A number in brackets is no target."
FORMATS = {  # of numbers that are not in percent
    "convergence_round": ".0f", "params": ",.0f", "flops_forward": ",.0f", "clients": ",.0f", "storage_MB": ".4f",
    "generation_cost_GB": ".4f", "ms_per_byte": ".2e",
}  # fmt: skip


def caption(rows: Sequence[Row]) -> str:
    """What the columns of a table are."""
    return CAPTION if any(row["seeds"] for row in rows) else COSTS_CAPTION


def remark(row: Row) -> str:
    """What a reader must know of a row: whether it was run, how it was reduced, why the paper's number is no target."""
    state = "" if row["state"] == NOT_RUN else row["state"]
    return "; ".join(filter(None, (state, row["unusable"])))


def cells(row: Row) -> dict[str, str]:
    """The columns of a row as text."""
    form = FORMATS.get(row["metric"], ".2f")
    paper = _number(row["paper"], form)
    if row["paper_std"] is not None:
        paper += f" ± {row['paper_std']:.2f}"
    return {
        "method": row["method"],
        "metric": row["metric"],
        "paper": f"[{paper}]" if row["unusable"] and paper else paper,
        "ours": NOT_RUN if row["state"] == NOT_RUN else _number(row["ours"], form),
        "difference": "" if row["difference"] is None else f"{row['difference']:+{form}}",
        "se": _number(row["se"], form),
        "validation": _number(row["validation"], form),
        "last": _number(row["last"], form),
        "remark": remark(row),
    }


def common_remark(rows: Sequence[Row]) -> str:
    """The remark of all rows that were run, if they have the same, so that it is said once."""
    found = {row["state"] for row in rows if row["ours"] is not None}
    return found.pop() if len(found) == 1 else ""


def by_task(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row], str]]:
    """(task, rows, common remark); the common remark is taken out of the rows."""
    for task, some in groupby(rows, key=lambda row: row["task"]):
        found = list(some)
        common = common_remark(found)
        yield task, [row | {"state": "" if row["state"] == common else row["state"]} for row in found], common


def shown_columns(rows: Sequence[Row]) -> list[str]:
    """Columns that have something to show."""
    texts = [cells(row) for row in rows]
    metrics = {row["metric"] for row in rows}
    return [
        name for name in COLUMNS if any(text[name] for text in texts) and not (name == "metric" and len(metrics) == 1)
    ]


def to_csv(rows: Sequence[Row]) -> str:
    """All columns of all rows; numbers are not rounded."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return text.getvalue()


def to_markdown(rows: Sequence[Row]) -> str:
    """A table per task."""
    parts = []
    for task, some, common in by_task(rows):
        columns = shown_columns(some)
        lines = [f"**{task}**: {_measured(some)}.{f' Runs: {common}.' if common else ''}", ""]
        lines.append("| " + " | ".join(COLUMNS[name] for name in columns) + " |")
        lines.append("|" + "|".join("---" if name in TEXT else "--:" for name in columns) + "|")
        for row in some:
            text = cells(row)
            lines.append("| " + " | ".join(text[name].replace("|", "\\|") for name in columns) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, caption(rows)]) + "\n"


def to_latex(rows: Sequence[Row]) -> str:
    """A table per task, with booktabs."""
    parts = []
    for task, some, common in by_task(rows):
        columns = [name for name in shown_columns(some) if name != "remark"]
        runs = f" Runs: {common}." if common else ""
        about = f"{some[0]['experiment']}, {task}: {_measured(some)}.{runs} {caption(rows)}"
        layout = "".join("l" if name in TEXT else "r" for name in columns)
        lines = ["\\begin{table}", "\\centering", f"\\caption{{{escape(about)}}}", f"\\begin{{tabular}}{{{layout}}}"]
        lines += ["\\toprule", " & ".join(escape(COLUMNS[name]) for name in columns) + " \\\\", "\\midrule"]
        for row in some:
            text = cells(row)
            lines.append(" & ".join(escape(text[name]).replace("±", "$\\pm$") for name in columns) + " \\\\")
        parts.append("\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"]))
    return "\n\n".join(parts) + "\n"


def _measured(rows: Sequence[Row]) -> str:
    return "; ".join(dict.fromkeys(f"{row['metric']}: {row['measured']}" for row in rows))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
