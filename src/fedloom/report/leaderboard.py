"""A leaderboard as text: CSV with all columns, Markdown and LaTeX with those that a paper shows.

`board` is the list of rows that `fedloom.metrics.leaderboard.leaderboard` returns.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.metrics.registry import column_name, in_percent, sign

Row = dict[str, Any]

VIEWS = {"pre": "personal", "post": "personal, trained", "global": "global"}
COLUMNS = {  # column -> its title, whether its standard deviation over seeds is shown
    "acc_mean": ("mean", True),
    "acc_low5": ("lowest 5 %", True),
    "acc_top5": ("top 5 %", True),
    "acc_worst": ("worst", True),
    "client_acc_std": ("std", False),
    "client_acc_cv_x1e-2": ("CV %", False),
    "gain": ("gain", True),
    "harmed": ("harmed %", False),
    "last": ("last", True),
    "trend": ("trend", False),
}
FLAT = 0.3  # percentage points: a run whose trend is larger was too short
FLAT_SHARE = 0.01  # the same for a metric that is not in percent, as a share of its mean


def ranking_metric(board: Sequence[Row]) -> str:
    """The metric that the board is ranked by."""
    return board[0].get("metric", "accuracy") if board else "accuracy"


def columns(board: Sequence[Row]) -> dict[str, tuple[str, bool]]:
    """The columns of a table: column -> its title, whether its standard deviation over seeds is shown."""
    name = column_name(ranking_metric(board))
    if name == "acc":
        further = {"balanced_accuracy_mean": ("balanced", True), "auprc_mean": ("AUPRC", True)}
        return {**COLUMNS, **{column: about for column, about in further.items() if any(column in r for r in board)}}
    low, top = tails(ranking_metric(board))
    of_metric = {"mean": ("mean", True), "low5": (low, True), "top5": (top, True)}
    of_metric |= {"worst": ("worst", True), "std": ("std", False)}
    others = {column: COLUMNS[column] for column in ("gain", "harmed", "last", "trend")}
    further = {"acc_mean": ("accuracy", True), "r2_mean": ("R2", True)}
    further = {column: about for column, about in further.items() if any(column in r for r in board)}
    return {**{f"{name}_{key}": about for key, about in of_metric.items()}, **others, **further}


def tails(metric: str) -> tuple[str, str]:
    """What the means of the worst and of the best 5 % of clients are called."""
    return ("lowest 5 %", "top 5 %") if sign(metric) > 0 else ("worst 5 %", "best 5 %")


def unseen_columns(board: Sequence[Row]) -> dict[str, tuple[str, bool]]:
    """The columns of a table of clients that were held out."""
    name, found = column_name(ranking_metric(board)), {}
    for view, title in (("", "participating"), ("new_", "on arrival"), ("joined_", "joined")):
        found[f"{view}{name}_mean"] = (title, True)
        if view:
            low, _ = tails(ranking_metric(board))
            found |= {f"{view}{name}_low5": (low, True), f"{view}gap": ("gap", False)}
    return found


def unseen_caption(board: Sequence[Row]) -> str:
    """The caption of a table of clients that were held out."""
    return (
        f"Held-out clients, in the same rounds, test {_with_unit(ranking_metric(board))}: 'on arrival' with the model "
        "that the method gives a client that never trained, 'joined' after the client has trained as the method "
        "prescribes. Gaps are to participating clients, before and after their local training."
    )


def _with_unit(metric: str) -> str:
    return f"{metric}{' in percent' * in_percent(metric)}"


def shown_selection(board: Sequence[Row]) -> str:
    """How the rounds of a table are chosen: "validation" (the best on validation data) if there is any, else "last"."""
    return "validation" if any(row["selection"] == "validation" for row in board) else "last"


def caption(board: Sequence[Row]) -> str:
    """The caption of a table: what its numbers are."""
    metric = ranking_metric(board)
    rounds = {
        "validation": f"in the round with the best validation {metric}; 'last' is the mean in the last one",
        "last": "in the last round (there is no validation data to choose one)",
    }[shown_selection(board)]
    text = (
        f"Test {metric} over clients{' in percent' * in_percent(metric)}, {rounds}. Gain and share of clients harmed "
        "are relative to the same client training alone (local)."
    )
    if any("rank" in row for row in board):
        text += (
            " Methods with the same rank (#) differ by what may be chance: the 95 % confidence interval of the paired "
            "difference to the first of them, over clients and seeds, contains 0."
        )
    if any("trend" in row for row in board):
        limit = f"{FLAT:g}" if in_percent(metric) else f"{100 * FLAT_SHARE:g} percent"
        text += (
            " A * marks a run that was too short: the mean of its last 20 rounds (trend; or of its second half) is "
            f"more than {limit} off that of the rounds before."
        )
    return text


def main_rows(board: Sequence[Row], model: str = "pre") -> list[Row]:
    """The rows of one model view (pre, post or global), each with the mean of the last round as `last`."""
    last = {row["method"]: row for row in board if row["model"] == model and row["selection"] == "last"}
    rows = [row for row in board if row["model"] == model and row["selection"] == shown_selection(board)]
    mean = f"{column_name(ranking_metric(board))}_mean"
    return [{**r, "last": last[r["method"]][mean], "last_std": last[r["method"]][f"{mean}_std"]} for r in rows]


def format_cell(
    row: Row,
    column: str,
    with_std: bool = True,
    separator: str = " ± ",
    digits: int = 2,
    metric: str | None = None,
) -> str:
    """A value with `digits` decimals, and its standard deviation after `separator`; "" if there is no value. What is
    not in percent has two digits more, wherever the point is.

    Differences have a sign, and a `trend` that is too large ends in a star.
    """
    value = row.get(column)
    if value is None:
        return ""
    ranking = metric or row.get("metric", "accuracy")
    of_ranking = column in RELATIVE or f"{column_name(ranking)}_" in column
    percent = in_percent(ranking) if of_ranking else column != "r2_mean"
    sign = "+" if column in ("gain", "trend", "new_gap", "joined_gap") and value > 0 else ""
    limit = FLAT if percent else FLAT_SHARE * abs(row.get(f"{column_name(ranking)}_mean") or 0.0)
    star = "*" if column == "trend" and abs(value) > limit else ""
    text = f"{sign}{format_value(value, percent, digits)}{star}"
    std = row.get(f"{column}_std")
    return text + (
        f"{separator}{format_value(std, percent, 2 if percent else 0)}" if with_std and std is not None else ""
    )


RELATIVE = ("gain", "last", "trend", "new_gap", "joined_gap")  # columns in the unit of the metric that ranks


def format_value(value: float, percent: bool = True, digits: int = 2) -> str:
    """A metric in percent with so many decimals; another number with two significant digits more."""
    if percent:
        return f"{value:.{digits}f}"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits + 1) else f"{value:#.{digits + 2}g}"


def unseen_rows(board: Sequence[Row]) -> list[Row]:
    """The rows of the table of held-out clients; none if no clients were held out."""
    return [row for row in main_rows(board) if "new_gap" in row]


def format_number(value: float) -> str:
    """A number with three significant digits, or all digits before the decimal point."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def format_bytes(count: float) -> str:
    """A number of bytes with a decimal unit, such as "1.23 MB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    unit = 0
    while count >= 999.5 and unit < len(units) - 1:
        count, unit = count / 1000, unit + 1
    return f"{format_number(count)} {units[unit]}"


def to_csv(board: Sequence[Row]) -> str:
    """CSV with all columns of all rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in board for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(board)
    return text.getvalue()


COSTS = {"bytes_down": "down", "bytes_up": "up", "train_seconds": "s/round"}


class Table(NamedTuple):
    """A table of a report: its rows, and which columns and costs are shown."""

    title: str
    about: str
    rows: list[Row]
    columns: Mapping[str, tuple[str, bool]]
    costs: Mapping[str, str] = COSTS

    @property
    def titles(self) -> list[str]:
        """The header."""
        first = ["#", "method"] if self.ranked else ["method"]
        return [*first, *(title for title, _ in self.columns.values()), *self.costs.values()]

    @property
    def ranked(self) -> bool:
        """True if methods have ranks."""
        return any("rank" in row for row in self.rows)

    def first_cells(self, row: Row) -> list[str]:
        """Rank and name of the method."""
        return [str(row["rank"]), row["method"]] if self.ranked else [row["method"]]

    def cost_cells(self, row: Row) -> list[str]:
        """The cells of the costs, which come after the columns."""
        return [format_number(row[c]) if c == "train_seconds" else format_bytes(row[c]) for c in self.costs]


def _tables(board: Sequence[Row]) -> Iterator[Table]:
    """A table for each model view, and one for held-out clients if there are any."""
    for model in _models(board):
        rows = main_rows(board, model)
        yield Table(f"{VIEWS[model].capitalize()} model", caption(board), rows, columns(rows))
    if rows := unseen_rows(board):
        yield Table("Unseen clients", unseen_caption(board), rows, unseen_columns(rows), {})


def to_markdown(board: Sequence[Row]) -> str:
    """Markdown tables with captions, one for each model view."""
    lines = []
    for table in _tables(board):
        lines += [f"**{table.title}.** {table.about}", ""]
        lines += ["| " + " | ".join(table.titles) + " |", _alignment(table) + "|"]
        for row in table.rows:
            cells = [format_cell(row, column, with_std) for column, (_, with_std) in table.columns.items()]
            lines.append("| " + " | ".join([*table.first_cells(row), *cells, *table.cost_cells(row)]) + " |")
        lines.append("")
    return "\n".join(lines)


def _alignment(table: Table) -> str:
    return "|--:" * table.ranked + "|---" + "|--:" * (len(table.titles) - 1 - table.ranked)


def to_latex(board: Sequence[Row]) -> str:
    """LaTeX tables that need `\\usepackage{booktabs}`; the best means and the best lowest 5 % are bold."""
    tables = []
    for table in _tables(board):
        spec = "r" * table.ranked + "l" + "r" * (len(table.titles) - 1 - table.ranked)
        lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{spec}}}", r"\toprule"]
        lines += [" & ".join(map(_escape_latex, table.titles)) + r" \\", r"\midrule"]
        for row in table.rows:
            cells = []
            for column, (_, with_std) in table.columns.items():
                text = format_cell(row, column, with_std, r" $\pm$ ")
                best = column in _bold(table.rows) and row.get(column) == _best(column, table.rows)
                cells.append(rf"\textbf{{{text}}}" if best else text)
            first = [_escape_latex(cell) for cell in table.first_cells(row)]
            lines.append(" & ".join([*first, *cells, *table.cost_cells(row)]) + r" \\")
        about = _escape_latex(f"{table.title}. {table.about}")
        lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{about}}}", r"\end{table}", ""]
        tables.append("\n".join(lines))
    return "\n".join(tables)


def _bold(rows: Sequence[Row]) -> tuple[str, ...]:
    """Columns whose best value is bold."""
    name = column_name(ranking_metric(rows))
    return tuple(f"{view}{name}_{column}" for view in ("", "new_", "joined_") for column in ("mean", "low5"))


def _best(column: str, rows: Sequence[Row]) -> float:
    direction = sign(ranking_metric(rows))
    return max((row[column] for row in rows if row.get(column) is not None), key=lambda value: direction * value)


def _models(board: Sequence[Row]) -> list[str]:
    """The model views that are on the board."""
    return [model for model in VIEWS if any(row["model"] == model for row in board)]


def _escape_latex(text: str) -> str:
    for char in "%_&#":
        text = text.replace(char, f"\\{char}")
    return text
