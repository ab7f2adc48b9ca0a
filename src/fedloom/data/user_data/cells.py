"""A column of a table as numbers: `fit_column` decides how it is encoded, `encode_column` encodes it."""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedloom.core.errors import UserError
from fedloom.core.preprocessing import Column
from fedloom.data.user_data.categorical import Categorical, such_rows
from fedloom.data.user_data.issues import Issues, Origin, shorten

MISSING = ("", "na", "n/a", "#n/a", "nan", "-nan", "null", "none", "?")  # cells without a value
MAX_CATEGORIES = 50  # a column with more different words is not categorical
DECIMAL_COMMA = re.compile(r"[+-]?\d+(\.\d{3})*,\d+")  # 3,14 or 1.234,5


def is_number_type(kind: pa.DataType) -> bool:
    """Whether a column of this type holds numbers; true and false are 1 and 0."""
    t = pa.types
    return t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind)


def is_text_type(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts."""
    if pa.types.is_dictionary(kind):
        return is_text_type(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list_type(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def check_scalar(column: pa.ChunkedArray, what: str) -> None:
    """Raise a UserError if a column, called `what`, holds several values per row."""
    if pa.types.is_nested(column.type):
        raise UserError(f"{what} holds {column.type}, not one value per row.")


class Cells:
    """The cells of a column: as numbers and as words.

    Args:
        name: name of the column.
        column: the cells, numbers or texts.
        where: origin of the rows.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, where: Origin) -> None:
        self.name, self.where = name, where
        self.column = column.cast(pa.float64()) if pa.types.is_null(column.type) else column
        self.is_text = is_text_type(self.column.type)

    def readable(self, issues: Issues, remedy: str) -> bool:
        """Whether the column holds numbers or texts; if not, this is reported, with what to do about it."""
        kind = self.column.type
        if self.is_text or is_number_type(kind):
            return True
        what = "is nested" if pa.types.is_nested(kind) else "holds neither numbers nor words"
        issues.problem("column", f"{self.where.file(0)}: column '{self.name}' {what} ({kind}); {remedy}.")
        return False

    @cached_property
    def numbers(self) -> np.ndarray | None:
        """The cells as numbers, NaN for missing ones; None unless all others are numbers."""
        if self.is_text:
            return _parse_numbers(self.column)
        return self.column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)

    @cached_property
    def coded(self) -> Categorical:
        """The cells as words without spaces around them, "" for missing ones."""
        found = Categorical.from_column(self.column)
        words = ["" if value is None else _word(value) for value in found.categories]
        return Categorical(["" if word.lower() in MISSING else word for word in words], found.codes)

    @cached_property
    def numbers_of_words(self) -> list[float | None]:
        """The categories of `coded` as numbers."""
        return [parse_number(word) for word in self.coded.categories]

    @property
    def whole(self) -> bool:
        """Whether all numbers are whole ones."""
        if not self.is_text:
            return pa.types.is_integer(self.column.type)
        if self.numbers is not None:
            return bool((self.numbers[np.isfinite(self.numbers)] % 1 == 0).all())
        return all(word.lstrip("+-").isdigit() for word in self.coded.categories if word)


def fit_column(cells: Cells, issues: Issues, remedy: str) -> Column | None:
    """How a column of training data is encoded: as numbers if at least half of its values are, otherwise as words; None
    if it cannot be used. `remedy` says what to do about it."""
    if cells.numbers is not None:
        return Column(cells.name)
    coded = cells.coded
    counts = np.bincount(coded.codes[coded.codes >= 0], minlength=len(coded.categories))
    is_number = np.array([number is not None for number in cells.numbers_of_words], dtype=bool)
    present = np.array([bool(word) for word in coded.categories], dtype=bool)
    if not present.any() or counts[is_number].sum() * 2 >= counts[present].sum():
        return Column(cells.name)
    words = sorted({word for word in coded.categories if word})
    with_comma = [word for word in words if DECIMAL_COMMA.fullmatch(word)]
    if len(with_comma) * 2 > len(words):
        report = issues.problem if len(words) > MAX_CATEGORIES else issues.warn
        report(
            "comma",
            f"Column '{cells.name}' is read as words, but '{shorten(with_comma[0])}' and others look like numbers with "
            "a decimal comma; write them with a point (3.14).",
        )
    elif len(words) > MAX_CATEGORIES:
        issues.problem(
            "words",
            f"Column '{cells.name}' has {len(words)} different words, such as '{shorten(words[0])}', too many for a "
            f"category; {remedy}, or set text={cells.name} if it is what should be classified.",
        )
    return None if len(words) > MAX_CATEGORIES else Column(cells.name, tuple(words))


def encode_column(cells: Cells, column: Column, issues: Issues, remedy: str = "") -> np.ndarray:
    """A number for every row: NaN for a missing number; of words their index, -1 for a missing or an unknown one.

    Cells that should be numbers and are not are reported, with what to do about it besides correcting them.
    """
    if column.words is not None:
        fold = str.lower if pa.types.is_boolean(cells.column.type) else str  # True is written as true, too
        index = {fold(word): i for i, word in enumerate(column.words)}
        return cells.coded.map_categories([index.get(word, -1) for word in cells.coded.categories]).astype(np.float64)
    values = cells.numbers if cells.numbers is not None else _numbers_among_words(cells, issues, remedy)
    with np.errstate(over="ignore"):
        infinite = np.isinf(values.astype(np.float32))
    if infinite.any():
        issues.problem(
            "infinite",
            f"{cells.where(int(infinite.argmax()))}: column '{cells.name}' has {values[infinite][0]:g}, which is too "
            "large or not finite; correct it.",
        )
        values = np.where(infinite, 0.0, values)
    return values


def one_hot(values: np.ndarray, column: Column) -> np.ndarray:
    """The result of `encode_column` as a matrix [rows, 1], or [rows, words] of 0 and 1."""
    if column.words is None:
        return values[:, None]
    return (values[:, None] == np.arange(len(column.words))).astype(np.float64)


def _numbers_among_words(cells: Cells, issues: Issues, remedy: str) -> np.ndarray:
    """The numbers of a column, NaN for missing ones and 0 for words, which are reported."""
    coded, numbers = cells.coded, cells.numbers_of_words
    values = np.array([np.nan if number is None else number for number in numbers] + [np.nan])[coded.codes]
    words = [i for i, number in enumerate(numbers) if number is None and coded.categories[i]]
    if words:
        wrong = np.isin(coded.codes, words)
        first = int(wrong.argmax())
        value = shorten(coded.categories[coded.codes[first]])
        correction = "write a point instead of the comma" if DECIMAL_COMMA.fullmatch(value) else "correct it"
        issues.problem(
            "no number",
            f"{cells.where(first)}: column '{cells.name}' has '{value}' where others have numbers{such_rows(wrong)}; "
            f"{correction}{f', or {remedy}' if remedy else ''}.",
        )
        values[wrong] = 0.0
    return values


def _parse_numbers(column: pa.ChunkedArray) -> np.ndarray | None:
    """A column of text as numbers, NaN for missing values; None unless all other values are numbers."""
    try:  # fast, and enough for most columns
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    except pa.ArrowException:
        pass
    plain = pc.utf8_trim_whitespace(column.cast(pa.string()))
    plain = pc.if_else(pc.is_in(pc.utf8_lower(plain), pa.array(MISSING)), None, plain)
    try:
        return plain.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    except pa.ArrowInvalid:
        return None


def _word(value: object) -> str:
    """The value of a cell as a word; a whole number is written without a fraction."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def parse_number(word: str) -> float | None:
    """A word as a number; None if it is none."""
    if not word or "_" in word:  # Python reads 1_000 as a number
        return None
    try:
        return float(word)
    except ValueError:
        return None


def mostly_numbers(column: pa.ChunkedArray) -> bool:
    """Whether at least half of the different values of a column of text are numbers, with a point or a comma."""
    found = [value.strip() for value in Categorical.from_column(column).categories if value is not None]
    words = [word for word in found if word.lower() not in MISSING]
    numbers = [word for word in words if parse_number(word) is not None or DECIMAL_COMMA.fullmatch(word)]
    return len(numbers) * 2 >= len(words)
