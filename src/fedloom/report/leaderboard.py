"""A leaderboard as text: CSV with everything, Markdown and LaTeX with what a paper shows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]

VIEWS = {"pre": "personal", "post": "personal, trained", "global": "global"}
COLUMNS = {  # how a column is called, and whether its spread over seeds is shown
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
UNSEEN = {  # the same of clients that were held out
    "acc_mean": ("participating", True),
    "new_acc_mean": ("on arrival", True),
    "new_acc_low5": ("lowest 5 %", True),
    "new_gap": ("gap", False),
    "joined_acc_mean": ("joined", True),
    "joined_acc_low5": ("lowest 5 %", True),
    "joined_gap": ("gap", False),
}
UNSEEN_CAPTION = (
    "Clients that were held out, in the same rounds: test accuracy in percent on arrival, with what the method gives a "
    "client that never trained, and joined, after it has trained as the method does. The gaps are to participating "
    "clients, before and after their local training."
)
FLAT = 0.3  # points


def selected(board: Sequence[Row]) -> str:
    """Which rounds a table shows: those best on validation data, where there is any."""
    return "validation" if any(row["selection"] == "validation" for row in board) else "last"


def caption(board: Sequence[Row]) -> str:
    rounds = {
        "validation": "in the round with the best validation accuracy; 'last' is the mean in the last one",
        "last": "in the last round (there is no validation data to choose one)",
    }[selected(board)]
    text = (
        f"Test accuracy over clients in percent, {rounds}. Gain and share of clients harmed are relative to the same "
        "client training alone (local)."
    )
    if any("trend" in row for row in board):
        text += (
            f" A * marks a run that was too short: the mean of its last 20 rounds (trend) is more than {FLAT:g} "
            "off that of the 20 before."
        )
    return text


def main_rows(board: Sequence[Row], model: str = "pre") -> list[Row]:
    """The rows of a table, with the mean of the last round beside them."""
    last = {row["method"]: row for row in board if row["model"] == model and row["selection"] == "last"}
    rows = [row for row in board if row["model"] == model and row["selection"] == selected(board)]
    return [{**r, "last": last[r["method"]]["acc_mean"], "last_std": last[r["method"]]["acc_mean_std"]} for r in rows]


def cell(row: Row, column: str, spread: bool = True, between: str = " ± ", digits: int = 2) -> str:
    value = row.get(column)
    if value is None:
        return ""
    sign = "+" if column in ("gain", "trend", "new_gap", "joined_gap") and value > 0 else ""
    text = f"{sign}{value:.{digits}f}" + ("*" if column == "trend" and abs(value) > FLAT else "")
    around = row.get(f"{column}_std")
    return text + (f"{between}{around:.2f}" if spread and around is not None else "")


def unseen_rows(board: Sequence[Row]) -> list[Row]:
    """The rows of a table of clients that were held out, if there were any."""
    return [row for row in main_rows(board) if "new_acc_mean" in row]


def number(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def size(count: float) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    at = 0
    while count >= 999.5 and at < len(units) - 1:
        count, at = count / 1000, at + 1
    return f"{number(count)} {units[at]}"


def to_csv(board: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in board for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(board)
    return text.getvalue()


COSTS = {"bytes_down": "down", "bytes_up": "up", "train_seconds": "s/round"}


class Table(NamedTuple):
    title: str
    about: str
    rows: list[Row]
    columns: Mapping[str, tuple[str, bool]]
    costs: Mapping[str, str] = COSTS

    @property
    def titles(self) -> list[str]:
        return ["method", *(title for title, _ in self.columns.values()), *self.costs.values()]

    def rest(self, row: Row) -> list[str]:
        """What stands behind the columns."""
        return [size(row["bytes_down"]), size(row["bytes_up"]), number(row["train_seconds"])] if self.costs else []


def _tables(board: Sequence[Row]) -> Iterator[Table]:
    for model in _models(board):
        yield Table(f"{VIEWS[model].capitalize()} model", caption(board), main_rows(board, model), COLUMNS)
    if rows := unseen_rows(board):
        yield Table("Unseen clients", UNSEEN_CAPTION, rows, UNSEEN, {})


def to_markdown(board: Sequence[Row]) -> str:
    lines = []
    for table in _tables(board):
        lines += [f"**{table.title}.** {table.about}", ""]
        lines += ["| " + " | ".join(table.titles) + " |", "|---" + "|--:" * (len(table.titles) - 1) + "|"]
        for row in table.rows:
            cells = [cell(row, column, spread) for column, (_, spread) in table.columns.items()]
            lines.append("| " + " | ".join([row["method"], *cells, *table.rest(row)]) + " |")
        lines.append("")
    return "\n".join(lines)


def to_latex(board: Sequence[Row]) -> str:
    """Tables for `\\usepackage{booktabs}`; the best means and the best lowest 5 % are bold."""
    tables = []
    for table in _tables(board):
        width = len(table.titles) - 1
        lines = [r"\begin{table}", r"\centering", r"\begin{tabular}{l" + "r" * width + "}", r"\toprule"]
        lines += [" & ".join(map(_tex, table.titles)) + r" \\", r"\midrule"]
        for row in table.rows:
            cells = []
            for column, (_, spread) in table.columns.items():
                text = cell(row, column, spread, r" $\pm$ ")
                best = column.endswith(("acc_mean", "acc_low5")) and row[column] == max(r[column] for r in table.rows)
                cells.append(rf"\textbf{{{text}}}" if best else text)
            lines.append(" & ".join([_tex(row["method"]), *cells, *table.rest(row)]) + r" \\")
        about = _tex(f"{table.title}. {table.about}")
        lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{about}}}", r"\end{table}", ""]
        tables.append("\n".join(lines))
    return "\n".join(tables)


def _models(board: Sequence[Row]) -> list[str]:
    return [model for model in VIEWS if any(row["model"] == model for row in board)]


def _tex(text: str) -> str:
    for char in "%_&#":
        text = text.replace(char, f"\\{char}")
    return text
