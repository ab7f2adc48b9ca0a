"""The table of a sweep as text.

`keys` are the names of the settings that were searched.
"""

from collections.abc import Sequence
from typing import Any

from fedloom.report.leaderboard import format_cell, format_number

Row = dict[str, Any]
COLUMNS = {"val_acc_mean": "validation", "acc_mean": "test", "acc_low5": "lowest 5 %", "acc_worst": "worst"}
CAPTION = (
    "Accuracy of personal models over clients in percent, in each run's round that is best on validation data, mean "
    "over seeds. Combinations are ranked by validation accuracy; the test columns stand beside it and select nothing."
)


def titles(keys: Sequence[str]) -> list[str]:
    """The header of the table."""
    return [*keys, *COLUMNS.values(), "round", "s/round"]


def cells(row: Row, keys: Sequence[str], separator: str = " ± ") -> list[str]:
    """The cells of one row; `separator` separates a mean from its standard deviation."""
    scores = [format_cell(row, column, column in ("val_acc_mean", "acc_mean"), separator) for column in COLUMNS]
    return [*(str(row[key]) for key in keys), *scores, format_number(row["round"]), format_number(row["train_seconds"])]


def to_markdown(table: Sequence[Row], keys: Sequence[str]) -> str:
    """The table in Markdown, with its caption."""
    head = titles(keys)
    lines = [CAPTION, "", "| " + " | ".join(head) + " |", "|---" * len(keys) + "|--:" * (len(head) - len(keys)) + "|"]
    lines += ["| " + " | ".join(cells(row, keys)) + " |" for row in table]
    return "\n".join([*lines, ""])
