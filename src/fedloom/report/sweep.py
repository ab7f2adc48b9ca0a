"""The table of a sweep as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedloom.report.leaderboard import cell, number

Row = dict[str, Any]
COLUMNS = {"val_acc_mean": "validation", "acc_mean": "test", "acc_low5": "lowest 5 %", "acc_worst": "worst"}
CAPTION = (
    "Accuracy of personal models over clients in percent, in each run's round that is best on validation data, mean "
    "over seeds. Combinations are ranked by validation accuracy; the test columns stand beside it and select nothing."
)


def titles(keys: Sequence[str]) -> list[str]:
    return [*keys, *COLUMNS.values(), "round", "s/round"]


def cells(row: Row, keys: Sequence[str], between: str = " ± ") -> list[str]:
    scores = [cell(row, column, column in ("val_acc_mean", "acc_mean"), between) for column in COLUMNS]
    return [*(str(row[key]) for key in keys), *scores, number(row["round"]), number(row["train_seconds"])]


def to_markdown(table: Sequence[Row], keys: Sequence[str]) -> str:
    head = titles(keys)
    lines = [CAPTION, "", "| " + " | ".join(head) + " |", "|---" * len(keys) + "|--:" * (len(head) - len(keys)) + "|"]
    lines += ["| " + " | ".join(cells(row, keys)) + " |" for row in table]
    return "\n".join([*lines, ""])
