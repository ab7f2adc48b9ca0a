"""Problems and remarks about a user's data, where they were found, and helpers for their texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedloom.core.errors import UserError


@dataclass
class Issues:
    """Problems and remarks about a user's data.

    With `strict`, as in a run, the first problem is raised as a UserError; `fedloom data check` collects all of them.
    """

    strict: bool = True
    problems: list[tuple[str, str]] = field(default_factory=list)  # kind, sentence
    remarks: list[tuple[str, str]] = field(default_factory=list)

    def problem(self, kind: str, sentence: str) -> None:
        """Report something that has to be corrected before the data can be used."""
        if self.strict:
            raise UserError(sentence)
        self.problems.append((kind, sentence))

    def remark(self, kind: str, sentence: str) -> None:
        """Report something that is worth knowing, but not wrong."""
        self.remarks.append((kind, sentence))


class Origin:
    """The file and row that every sample was read from; `origin(i)` returns those of sample i as text."""

    def __init__(self) -> None:
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
        k = int(np.searchsorted(self._ends, i, side="right")) - 1
        rows = self._rows[k]
        return self._files[k] if rows is None else f"{self._files[k]}, row {rows[i - self._ends[k]]}"

    def select(self, mask: np.ndarray) -> Origin:
        """The origin of the samples where the mask is True."""
        selected = Origin()
        for file, rows, start, end in zip(self._files, self._rows, self._ends[:-1], self._ends[1:], strict=True):
            part = mask[start:end]
            selected.add(file, None if rows is None else np.asarray(rows)[part], int(part.sum()))
        return selected


def shorten(value: Any, limit: int = 30) -> str:
    """A value as text on one line, at most `limit` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def join_names(words: Sequence[str], limit: int = 8) -> str:
    """Names with commas between them: the first `limit`, and how many more there are."""
    shown = ", ".join(shorten(word) for word in words[:limit])
    return shown if len(words) <= limit else f"{shown} and {len(words) - limit} more"


def error_text(error: BaseException) -> str:
    """The first sentence of an exception's message, for use inside another sentence."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return shorten(re.split(r"\.\s|\n", text.strip())[0].rstrip("."), 100)
