"""The papers' numbers, from results.csv."""

import csv
import functools
import io
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Number:
    """A number of a paper's table."""

    value: float | None  # None where it cannot be read, or the paper has none
    std: float | None  # as printed beside it
    notes: str  # remarks about the printed page
    unusable: str  # why it is no target, such as a contradiction within the paper


Key = tuple[str, str, str, frozenset[str], str, str]


def tokens(text: str) -> frozenset[str]:
    """`N=20; backbone=CNN4` as a set of words, whose order does not matter."""
    return frozenset(word.strip() for word in text.split(";") if word.strip())


@functools.cache
def _numbers() -> dict[Key, Number]:
    text = (resources.files("fedloom.papers") / "results.csv").read_text(encoding="utf-8")
    found: dict[Key, Number] = {}
    for row in csv.DictReader(io.StringIO(text)):
        key = row["paper"], row["table"], row["dataset"], tokens(row["setting"]), row["algorithm"], row["metric"]
        value, std = (float(row[name]) if row[name] else None for name in ("value", "std"))
        found[key] = Number(value, std, row["notes"], row["unusable"])
    return found


def find_number(
    paper: str, table: str, dataset: str, setting: Iterable[str], algorithm: str, metric: str
) -> Number | None:
    """The number of a cell; None if the paper has none."""
    return _numbers().get((paper, table, dataset, frozenset(setting), algorithm, metric))
