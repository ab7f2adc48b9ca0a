"""Problems and remarks about a user's data, where they were found, and helpers for their texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedloom.core.errors import UserError

MAX_NAME = 1000  # characters
MAX_NOTES = 3  # warnings of one kind that a run prints
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # also bytes of a name that are not UTF-8


@dataclass
class Issues:
    """Problems and remarks about a user's data.

    With `strict`, as in a run, the first problem is raised as a UserError; `fedloom data check` collects all of them.
    """

    strict: bool = True
    part: bool = False  # of data that lie in several places: other classes and clients are elsewhere
    problems: list[tuple[str, str]] = field(default_factory=list)  # kind, sentence
    remarks: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)  # remarks that a run prints, too

    def problem(self, kind: str, sentence: str) -> None:
        """Report something that has to be corrected before the data can be used."""
        if self.strict:
            raise UserError(sentence)
        self.problems.append((kind, sentence))

    def remark(self, kind: str, sentence: str) -> None:
        """Report something that is worth knowing, but not wrong."""
        self.remarks.append((kind, sentence))

    def warn(self, kind: str, sentence: str) -> None:
        """Report something that is probably a mistake; a run prints it, too."""
        self.remarks.append((kind, sentence))
        self.warnings.append((kind, sentence))

    def notes(self) -> tuple[str, ...]:
        """The warnings as notes of a data set, without a full stop: the first few of each kind."""
        kinds: dict[str, list[str]] = {}
        for kind, sentence in self.warnings:
            kinds.setdefault(kind, []).append(sentence.removesuffix("."))
        notes = []
        for sentences in kinds.values():
            notes += sentences[:MAX_NOTES]
            if (more := len(sentences) - MAX_NOTES) > 0:
                notes.append(f"There are {more} more warnings like this one; 'fedloom data check' prints them")
        return tuple(notes)


class Origin:
    """The file and row that every sample was read from; `origin(i)` returns those of sample i as text. `noun` is what a
    row is called."""

    def __init__(self, noun: str = "row") -> None:
        self.noun = noun
        self._files: list[str] = []
        self._rows: list[Sequence[int] | np.ndarray | None] = []
        self._ends = [0]

    def add(self, file: str, rows: Sequence[int] | np.ndarray | None, count: int) -> None:
        """Append `count` samples of a file; `rows` are their row numbers, None if the file is a single sample."""
        self._files.append(file)
        self._rows.append(rows)
        self._ends.append(self._ends[-1] + count)

    def __len__(self) -> int:
        return self._ends[-1]

    def __call__(self, i: int) -> str:
        k = self._index(i)
        rows = self._rows[k]
        return self._files[k] if rows is None else f"{self._files[k]}, {self.noun} {rows[i - self._ends[k]]}"

    def file(self, i: int) -> str:
        """The file of sample i."""
        return self._files[self._index(i)]

    def _index(self, i: int) -> int:
        return int(np.searchsorted(self._ends, i, side="right")) - 1

    def select(self, mask: np.ndarray) -> Origin:
        """The origin of the samples where the mask is True."""
        selected = Origin(self.noun)
        for file, rows, start, end in zip(self._files, self._rows, self._ends[:-1], self._ends[1:], strict=True):
            part = mask[start:end]
            selected.add(file, None if rows is None else np.asarray(rows)[part], int(part.sum()))
        return selected


class SampleOrigin(Origin):
    """The origin of samples that were given in Python: their number."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.add("The table", np.arange(n), n)

    def __call__(self, i: int) -> str:
        return f"Sample {i}"


def printable(text: str) -> str:
    """The text on one line, with escape sequences for what cannot be printed."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def name_problem(name: str) -> str:
    """What is wrong with the name of a column, a class or a client, as a part of a sentence; "" if nothing is."""
    if len(name) > MAX_NAME:
        return f"of {len(name)} characters ({MAX_NAME} are the most)"
    return "with a line break or a control character" if UNPRINTABLE.search(name) else ""


def shorten(value: Any, limit: int = 30) -> str:
    """A value as text on one line, at most `limit` characters."""
    text = printable(" ".join(str(value)[: 10 * limit].split()))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def join_names(words: Sequence[str], limit: int = 8, width: int = 30) -> str:
    """Names, at most `width` characters each, with commas between them: the first `limit`, and how many more."""
    shown = ", ".join(shorten(word, width) for word in words[:limit])
    return shown if len(words) <= limit else f"{shown} and {len(words) - limit} more"


def error_text(error: BaseException) -> str:
    """The first sentence of an exception's message, for use inside another sentence."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return shorten(re.split(r"\.\s|\n", text.strip())[0].rstrip("."), 100)
