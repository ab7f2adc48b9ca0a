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
UNSEEN = {  # the same for clients that were held out
    "acc_mean": ("participating", True),
    "new_acc_mean": ("on arrival", True),
    "new_acc_low5": ("lowest 5 %", True),
    "new_gap": ("gap", False),
    "joined_acc_mean": ("joined", True),
    "joined_acc_low5": ("lowest 5 %", True),
    "joined_gap": ("gap", False),
}
UNSEEN_CAPTION = (
    "Held-out clients, in the same rounds, test accuracy in percent: 'on arrival' with the model that the method gives "
    "a client that never trained, 'joined' after the client has trained as the method prescribes. Gaps are to "
    "participating clients, before and after their local training."
)
FLAT = 0.3  # percentage points: a run whose trend is larger was too short


def ranking_metric(board: Sequence[Row]) -> str:
    """The metric that the board is ranked by."""
    return board[0].get("metric", "accuracy") if board else "accuracy"


def columns(board: Sequence[Row]) -> dict[str, tuple[str, bool]]:
    """The columns of a table: column -> its title, whether its standard deviation over seeds is shown."""
    name = column_name(ranking_metric(board))
    if name == "acc":
        further = {"balanced_accuracy_mean": ("balanced", True), "auprc_mean": ("AUPRC", True)}
        return {**COLUMNS, **{column: about for column, about in further.items() if any(column in r for r in board)}}
    of_metric = {"mean": ("mean", True), "low5": ("lowest 5 %", True), "top5": ("top 5 %", True)}
    of_metric |= {"worst": ("worst", True), "std": ("std", False)}
    others = {column: COLUMNS[column] for column in ("gain", "harmed", "last", "trend")}
    return {**{f"{name}_{key}": about for key, about in of_metric.items()}, **others, "acc_mean": ("accuracy", True)}


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
    unit = " in percent" if in_percent(metric) else ""
    text = (
        f"Test {metric} over clients{unit}, {rounds}. Gain and share of clients harmed are relative to the same "
        "client training alone (local)."
    )
    if any("trend" in row for row in board):
        text += (
            f" A * marks a run that was too short: the mean of its last 20 rounds (trend) is more than {FLAT:g} "
            "off that of the 20 before."
        )
    return text


def main_rows(board: Sequence[Row], model: str = "pre") -> list[Row]:
    """The rows of one model view (pre, post or global), each with the mean accuracy of the last round as `last`."""
    last = {row["method"]: row for row in board if row["model"] == model and row["selection"] == "last"}
    rows = [row for row in board if row["model"] == model and row["selection"] == shown_selection(board)]
    mean = f"{column_name(ranking_metric(board))}_mean"
    return [{**r, "last": last[r["method"]][mean], "last_std": last[r["method"]][f"{mean}_std"]} for r in rows]


def format_cell(row: Row, column: str, with_std: bool = True, separator: str = " ± ", digits: int = 2) -> str:
    """A value with `digits` decimals, and its standard deviation after `separator`; "" if there is no value.

    Differences have a sign, and a `trend` that is too large ends in a star.
    """
    value = row.get(column)
    if value is None:
        return ""
    sign = "+" if column in ("gain", "trend", "new_gap", "joined_gap") and value > 0 else ""
    text = f"{sign}{value:.{digits}f}" + ("*" if column == "trend" and abs(value) > FLAT else "")
    std = row.get(f"{column}_std")
    return text + (f"{separator}{std:.2f}" if with_std and std is not None else "")


def unseen_rows(board: Sequence[Row]) -> list[Row]:
    """The rows of the table of held-out clients; none if no clients were held out."""
    return [row for row in main_rows(board) if "new_acc_mean" in row]


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
        return ["method", *(title for title, _ in self.columns.values()), *self.costs.values()]

    def cost_cells(self, row: Row) -> list[str]:
        """The cells of the costs, which come after the columns."""
        return [format_number(row[c]) if c == "train_seconds" else format_bytes(row[c]) for c in self.costs]


def _tables(board: Sequence[Row]) -> Iterator[Table]:
    """A table for each model view, and one for held-out clients if there are any."""
    for model in _models(board):
        rows = main_rows(board, model)
        yield Table(f"{VIEWS[model].capitalize()} model", caption(board), rows, columns(rows))
    if rows := unseen_rows(board):
        yield Table("Unseen clients", UNSEEN_CAPTION, rows, UNSEEN, {})


def to_markdown(board: Sequence[Row]) -> str:
    """Markdown tables with captions, one for each model view."""
    lines = []
    for table in _tables(board):
        lines += [f"**{table.title}.** {table.about}", ""]
        lines += ["| " + " | ".join(table.titles) + " |", "|---" + "|--:" * (len(table.titles) - 1) + "|"]
        for row in table.rows:
            cells = [format_cell(row, column, with_std) for column, (_, with_std) in table.columns.items()]
            lines.append("| " + " | ".join([row["method"], *cells, *table.cost_cells(row)]) + " |")
        lines.append("")
    return "\n".join(lines)


def to_latex(board: Sequence[Row]) -> str:
    """LaTeX tables that need `\\usepackage{booktabs}`; the best means and the best lowest 5 % are bold."""
    tables = []
    for table in _tables(board):
        width = len(table.titles) - 1
        lines = [r"\begin{table}", r"\centering", r"\begin{tabular}{l" + "r" * width + "}", r"\toprule"]
        lines += [" & ".join(map(_escape_latex, table.titles)) + r" \\", r"\midrule"]
        for row in table.rows:
            cells = []
            for column, (_, with_std) in table.columns.items():
                text = format_cell(row, column, with_std, r" $\pm$ ")
                best = column in _bold(table.rows) and row.get(column) == _best(column, table.rows)
                cells.append(rf"\textbf{{{text}}}" if best else text)
            lines.append(" & ".join([_escape_latex(row["method"]), *cells, *table.cost_cells(row)]) + r" \\")
        about = _escape_latex(f"{table.title}. {table.about}")
        lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{about}}}", r"\end{table}", ""]
        tables.append("\n".join(lines))
    return "\n".join(tables)


def _bold(rows: Sequence[Row]) -> tuple[str, ...]:
    """Columns whose best value is bold."""
    name = column_name(ranking_metric(rows))
    return f"{name}_mean", f"{name}_low5", "new_acc_mean", "new_acc_low5", "joined_acc_mean", "joined_acc_low5"


def _best(column: str, rows: Sequence[Row]) -> float:
    direction = sign(ranking_metric(rows)) if column in _bold(rows)[:2] else 1.0
    return max((row[column] for row in rows if row.get(column) is not None), key=lambda value: direction * value)


def _models(board: Sequence[Row]) -> list[str]:
    """The model views that are on the board."""
    return [model for model in VIEWS if any(row["model"] == model for row in board)]


def _escape_latex(text: str) -> str:
    for char in "%_&#":
        text = text.replace(char, f"\\{char}")
    return text
