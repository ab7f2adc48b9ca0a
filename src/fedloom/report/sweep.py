"""The table of a sweep as text.

`keys` are the names of the settings that were searched.
"""

from collections.abc import Sequence
from typing import Any

from fedloom.metrics.registry import column_name, in_percent
from fedloom.report.leaderboard import format_cell, format_number, tails

Row = dict[str, Any]


def columns(metric: str) -> dict[str, str]:
    """The columns of the metric that ranks, and their titles."""
    name = column_name(metric)
    titles = {f"val_{name}_mean": "validation", f"{name}_mean": "test"}
    return {**titles, f"{name}_low5": tails(metric)[0], f"{name}_worst": "worst"}


def caption(metric: str) -> str:
    """The caption of the table."""
    unit = " in percent" if in_percent(metric) else ""
    return (
        f"{metric.capitalize()} of personal models over clients{unit}, in each run's round that is best on validation "
        f"data, mean over seeds. Combinations are ranked by validation {metric}; the test columns stand beside it and "
        "select nothing."
    )


def titles(keys: Sequence[str], metric: str = "accuracy") -> list[str]:
    """The header of the table."""
    return [*keys, *columns(metric).values(), "round", "s/round"]


def cells(row: Row, keys: Sequence[str], metric: str = "accuracy", separator: str = " ± ") -> list[str]:
    """The cells of one row; `separator` separates a mean from its standard deviation."""
    scores = [
        format_cell(row, column, column.endswith("_mean"), separator, metric=metric) for column in columns(metric)
    ]
    return [*(str(row[key]) for key in keys), *scores, format_number(row["round"]), format_number(row["train_seconds"])]


def to_markdown(table: Sequence[Row], keys: Sequence[str], metric: str = "accuracy") -> str:
    """The table in Markdown, with its caption."""
    head = titles(keys, metric)
    lines = [
        caption(metric),
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(keys) + "|--:" * (len(head) - len(keys)) + "|",
    ]
    lines += ["| " + " | ".join(cells(row, keys, metric)) + " |" for row in table]
    return "\n".join([*lines, ""])
