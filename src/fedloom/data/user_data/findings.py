"""What is found in data before they are used: the first problem stops a run, a check collects them all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedloom.core.errors import UserError


@dataclass
class Findings:
    strict: bool = True
    problems: list[tuple[str, str]] = field(default_factory=list)  # what kind, a sentence
    remarks: list[tuple[str, str]] = field(default_factory=list)

    def problem(self, kind: str, sentence: str) -> None:
        if self.strict:
            raise UserError(sentence)
        self.problems.append((kind, sentence))

    def remark(self, kind: str, sentence: str) -> None:
        self.remarks.append((kind, sentence))


class Origin:
    """Where every sample was read: the file, and the row in it."""

    def __init__(self) -> None:
        self._files: list[str] = []
        self._rows: list[Sequence[int] | np.ndarray | None] = []
        self._ends = [0]

    def add(self, file: str, rows: Sequence[int] | np.ndarray | None, count: int) -> None:
        """`rows` are the numbers by which a reader finds them; None: the file is the sample."""
        self._files.append(file)
        self._rows.append(rows)
        self._ends.append(self._ends[-1] + count)

    def __len__(self) -> int:
        return self._ends[-1]

    def __call__(self, i: int) -> str:
        at = int(np.searchsorted(self._ends, i, side="right")) - 1
        rows = self._rows[at]
        return self._files[at] if rows is None else f"{self._files[at]}, row {rows[i - self._ends[at]]}"

    def kept(self, mask: np.ndarray) -> Origin:
        """Of the samples in the mask."""
        made = Origin()
        for file, rows, start, end in zip(self._files, self._rows, self._ends[:-1], self._ends[1:], strict=True):
            mine = mask[start:end]
            made.add(file, None if rows is None else np.asarray(rows)[mine], int(mine.sum()))
        return made


def short(value: Any, limit: int = 30) -> str:
    """A value as a sentence can carry it."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(words: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(short(word) for word in words[:limit])
    return shown if len(words) <= limit else f"{shown} and {len(words) - limit} more"


def many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def reason(error: BaseException) -> str:
    """Why something failed, as a part of a sentence."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return short(re.split(r"\.\s|\n", text.strip())[0].rstrip("."), 100)
