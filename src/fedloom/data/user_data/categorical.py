"""Classes, clients and splits as integer codes: from whatever values stand for them in the user's data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fedloom.core.errors import UserError, nearest, plural
from fedloom.data.user_data.issues import MAX_NAME, Issues, join_names, name_problem, printable, shorten
from fedloom.data.user_data.layout import SPLITS

WHOLE = re.compile(r"[+-]?\d+")
FRACTION = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
PLAUSIBLE_CLASSES = 20  # up to this many, classes are not taken for ids or measurements
Where = Callable[[int], str]  # the origin of a sample, as text


class Categorical:
    """Distinct values (`categories`), and for every sample the index of its value (`codes`, -1 for none)."""

    def __init__(self, categories: list[Any], codes: np.ndarray) -> None:
        self.categories, self.codes = categories, codes

    @staticmethod
    def from_column(column: pa.ChunkedArray) -> Categorical:
        """Encode a column of an Arrow table; nulls get the code -1. Categories that no row has are left out."""
        coded = column.combine_chunks()
        if not pa.types.is_dictionary(coded.type):
            coded = coded.dictionary_encode()
        codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        used = np.unique(codes[codes >= 0])
        try:
            categories = coded.dictionary.to_pylist()
        except (ValueError, OverflowError):  # times that Python does not have
            categories = coded.dictionary.cast(pa.string()).to_pylist()
        return Categorical([categories[i] for i in used], np.where(codes < 0, -1, np.searchsorted(used, codes)))

    @staticmethod
    def from_array(values: np.ndarray) -> Categorical:
        """Encode a NumPy array."""
        categories, codes = np.unique(values, return_inverse=True)
        return Categorical(categories.tolist(), codes.reshape(-1).astype(np.int64))

    def first_row(self, code: int) -> int:
        """The first sample that has a code."""
        return int(np.flatnonzero(self.codes == code)[0])

    def map_categories(self, numbers: list[int]) -> np.ndarray:
        """A number for every sample, given one for every category; -1 for samples without a value."""
        return np.append(np.array(numbers, dtype=np.int64), -1)[self.codes]


def encode_classes(
    coded: Categorical,
    where: Where,
    what: str,
    issues: Issues,
    names: list[str] | None = None,
    noun: str = "classes",
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class index of every sample (-1 for none), and the names of the classes, sorted (numbers by value).

    Args:
        coded: the label of every sample.
        where: origin of the samples.
        what: what a label is called in messages, such as "the label 'y'".
        issues: where missing and ambiguous labels are reported.
        names: names of the classes if labels are their indices already.
        noun: what classes are called in messages.
    """
    if names is not None:
        numbers = [v if isinstance(v, int) and 0 <= v < len(names) else -1 for v in coded.categories]
        ids = coded.map_categories(numbers)
        report_missing(ids < 0, where, f"{what} names no class (0 to {len(names) - 1})", issues)
        return ids, tuple(names)
    texts = _names(coded, where, what, issues)
    _report_similar(coded, texts, [text.strip() for text in texts], where, noun, issues)
    texts = [text.strip() for text in texts]
    _warn_of_capitals(texts, noun, issues)
    values: dict[str, Any] = {text: text for text in texts if text}
    if values and all(FRACTION.fullmatch(text) for text in values):
        for code, text in enumerate(texts):
            if text and _whole_number(text) is None:
                raise UserError(
                    f"{where(coded.first_row(code))}: {what} is {shorten(text)}, a number with a fraction, but "
                    f"there must be {noun}; turn it into a few, such as low and high."
                )
        values = {text: _whole_number(text) for text in values}
    ordered = sorted(set(values.values()))
    index = {name: i for i, name in enumerate(ordered)}
    ids = coded.map_categories([index[values[text]] if text else -1 for text in texts])
    report_missing(ids < 0, where, f"{what} is empty", issues)
    return ids, tuple(str(name) for name in ordered)


def match_classes(
    coded: Categorical, names: tuple[str, ...], where: Where, what: str, issues: Issues, noun: str = "classes"
) -> np.ndarray:
    """The class index of every new sample among the classes that a model knows; -1 for none, and for others, of which a
    warning says so."""
    texts = [as_text(value).strip() for value in coded.categories]
    indices = class_indices(texts, names)
    if unknown := [code for code, i in enumerate(indices) if i < 0 and texts[code]]:
        first = where(min(coded.first_row(code) for code in unknown))
        found = join_names([texts[code] for code in unknown])
        issues.warn("class", f"{first}: {what} is none of the model's {noun}, {join_names(names)}, but {found}.")
    return coded.map_categories(indices)


def class_indices(texts: Sequence[str], names: tuple[str, ...]) -> list[int]:
    """The index of every text among the names of classes, -1 if it is none; 3.0 is the class 3."""
    index = {name: i for i, name in enumerate(names)}
    if all(WHOLE.fullmatch(name) for name in names):
        texts = [text if (number := _whole_number(text)) is None else str(number) for text in texts]
    return [index.get(text, -1) for text in texts]


def client_names(coded: Categorical) -> np.ndarray:
    """The name of the client of every new sample, "" for none."""
    return np.array([*(as_text(value).strip() for value in coded.categories), ""])[coded.codes]


def check_classes(ids: np.ndarray, names: tuple[str, ...], what: str) -> None:
    """Raise a UserError if there is only one class, or so many that `what` cannot be the label."""
    n, used = len(ids), np.unique(ids)
    if len(used) < 2:
        raise UserError(f"All samples are of one class, '{shorten(names[used[0]])}'; there is nothing to learn.")
    if len(used) > max(PLAUSIBLE_CLASSES, n // 2) or (len(used) == n and n > 2):
        numbers = sum(FRACTION.fullmatch(names[c]) is not None for c in used)
        remedy = "set target=number to predict a number, or " if 2 * numbers >= len(used) else ""
        raise UserError(
            f"There are {len(used)} classes for {n} samples, as if {what} were an id or a measurement; {remedy}say "
            "which is the class with label=NAME."
        )


def encode_clients(coded: Categorical, where: Where, what: str, issues: Issues) -> tuple[np.ndarray, tuple[str, ...]]:
    """The client index of every sample (-1 for none), and the names of the clients, sorted (numbers first)."""
    texts = _names(coded, where, what, issues)
    _report_similar(coded, texts, [text.strip().casefold() for text in texts], where, "clients", issues)
    texts = [text.strip() for text in texts]
    ordered = sorted(
        {text for text in texts if text},
        key=lambda name: (0, int(name), name) if WHOLE.fullmatch(name) else (1, 0, name),
    )
    index = {text: i for i, text in enumerate(ordered)}
    ids = coded.map_categories([index.get(text, -1) for text in texts])
    report_missing(ids < 0, where, f"{what} is empty", issues)
    return ids, tuple(ordered)


def encode_splits(coded: Categorical, where: Where, what: str, issues: Issues) -> np.ndarray:
    """The split of every sample: "train", "val", "test", or "" if it is unknown."""
    words = [SPLITS.get(as_text(value).strip().lower(), "") for value in coded.categories]
    for code, word in enumerate(words):
        if not word:
            text = shorten(as_text(coded.categories[code]))
            issues.problem(
                "split", f"{where(coded.first_row(code))}: {what} is '{text}', not train, val or test; "
                f"{nearest(text, ('train', 'val', 'test'))}"
            )  # fmt: skip
    if (coded.codes < 0).any():
        issues.problem("split", f"{where(int((coded.codes < 0).argmax()))}: {what} is empty, not train, val or test.")
    return np.array([*words, ""])[coded.codes]


def _whole_number(text: str) -> int | None:
    """A text as a whole number, such as 3 or 3.0; None if it is none."""
    if WHOLE.fullmatch(text):
        return int(text)
    return int(float(text)) if FRACTION.fullmatch(text) and float(text).is_integer() else None


def _names(coded: Categorical, where: Where, what: str, issues: Issues) -> list[str]:
    """The categories as texts; those that cannot be names are reported and cut."""
    texts = [as_text(value) for value in coded.categories]
    for code, text in enumerate(texts):
        if problem := name_problem(text.strip()):
            first = where(coded.first_row(code))
            issues.problem("name", f"{first}: {what} is '{shorten(text)}', a name {problem}; correct it.")
            texts[code] = printable(text)[:MAX_NAME]
    return texts


def _warn_of_capitals(names: list[str], noun: str, issues: Issues) -> None:
    """Warn of classes that differ in capitals only: they may be one or, like a and A in handwriting, two."""
    spellings: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        spellings.setdefault(name.casefold(), []).append(name)
    alike = [" and ".join(f"'{shorten(name)}'" for name in group) for group in spellings.values() if len(group) > 1]
    if alike:
        issues.warn(
            "capitals",
            f"{noun.capitalize()} that differ in capitals only count as different ones: "
            f"{join_names(alike, limit=4, width=80)}; write them alike if they are the same.",
        )


def as_text(value: Any) -> str:
    """A value as text, "" if it is missing."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return str(value)


def _report_similar(
    coded: Categorical, texts: list[str], normalised: list[str], where: Where, noun: str, issues: Issues
) -> None:
    """Report names that differ, but are equal after normalisation, such as "Berlin" and "berlin "."""
    first_code: dict[str, int] = {}
    for code, name in enumerate(normalised):
        same = first_code.setdefault(name, code)
        if name and same != code:
            issues.problem(
                "alike",
                f"The {noun} '{shorten(texts[same])}' ({where(coded.first_row(same))}) and '{shorten(texts[code])}' "
                f"({where(coded.first_row(code))}) differ in spaces or capitals only; write them alike.",
            )


def report_missing(missing: np.ndarray, where: Where, what: str, issues: Issues) -> None:
    """Report samples without a value; the mask says which."""
    if missing.any():
        first = where(int(missing.argmax()))
        issues.problem("no value", f"{first}: {what}{such_rows(missing)}; fill it in, or leave the row out.")


def such_rows(mask: np.ndarray) -> str:
    """How many rows there are, for a message about the first; "" if it is the only one."""
    count = int(mask.sum())
    return f" ({plural(count, 'such row')})" if count > 1 else ""
