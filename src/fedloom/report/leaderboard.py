"""A leaderboard as text: CSV with everything, Markdown and LaTeX with what a paper shows."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

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
}
CAPTION = (
    "Test accuracy over clients in percent, in the round with the best validation accuracy; 'last' is the mean "
    "in the last one. Gain and share of clients harmed are relative to the same client training alone (local)."
)


def main_rows(board: Sequence[Row], model: str = "pre") -> list[Row]:
    """Rows selected on validation, with the mean of the last round beside them."""
    last = {row["method"]: row for row in board if row["model"] == model and row["selection"] == "last"}
    rows = [row for row in board if row["model"] == model and row["selection"] == "validation"]
    return [{**r, "last": last[r["method"]]["acc_mean"], "last_std": last[r["method"]]["acc_mean_std"]} for r in rows]


def cell(row: Row, column: str, spread: bool = True, between: str = " ± ", digits: int = 2) -> str:
    value = row.get(column)
    if value is None:
        return ""
    sign = "+" if column == "gain" and value > 0 else ""
    text = f"{sign}{value:.{digits}f}"
    around = row.get(f"{column}_std")
    return text + (f"{between}{around:.2f}" if spread and around is not None else "")


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def to_csv(board: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in board for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(board)
    return text.getvalue()


COSTS = {"bytes_down": "down", "bytes_up": "up", "train_seconds": "s/round"}


def _costs(row: Row) -> list[str]:
    return [size(row["bytes_down"]), size(row["bytes_up"]), f"{row['train_seconds']:.3g}"]


def to_markdown(board: Sequence[Row]) -> str:
    titles = ["method", *(title for title, _ in COLUMNS.values()), *COSTS.values()]
    lines = []
    for model in _models(board):
        lines += [f"**{VIEWS[model].capitalize()} model.** {CAPTION}", ""]
        lines += ["| " + " | ".join(titles) + " |", "|---" + "|--:" * (len(titles) - 1) + "|"]
        for row in main_rows(board, model):
            cells = [cell(row, column, spread) for column, (_, spread) in COLUMNS.items()]
            lines.append("| " + " | ".join([row["method"], *cells, *_costs(row)]) + " |")
        lines.append("")
    return "\n".join(lines)


def to_latex(board: Sequence[Row]) -> str:
    """Tables for `\\usepackage{booktabs}`; the best mean and the best lowest 5 % are bold."""
    titles = ["method", *(title for title, _ in COLUMNS.values()), *COSTS.values()]
    tables = []
    for model in _models(board):
        rows = main_rows(board, model)
        lines = [r"\begin{table}", r"\centering", r"\begin{tabular}{l" + "r" * (len(titles) - 1) + "}", r"\toprule"]
        lines += [" & ".join(map(_tex, titles)) + r" \\", r"\midrule"]
        for row in rows:
            cells = []
            for column, (_, spread) in COLUMNS.items():
                text = cell(row, column, spread, r" $\pm$ ")
                best = column in ("acc_mean", "acc_low5") and row[column] == max(r[column] for r in rows)
                cells.append(rf"\textbf{{{text}}}" if best else text)
            lines.append(" & ".join([_tex(row["method"]), *cells, *_costs(row)]) + r" \\")
        caption = _tex(f"{VIEWS[model].capitalize()} model. {CAPTION}")
        lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", r"\end{table}", ""]
        tables.append("\n".join(lines))
    return "\n".join(tables)


def _models(board: Sequence[Row]) -> list[str]:
    return [model for model in VIEWS if any(row["model"] == model for row in board)]


def _tex(text: str) -> str:
    for char in "%_&#":
        text = text.replace(char, f"\\{char}")
    return text
