"""What is predicted of a sample: a class, a number or labels, from whatever stands for them in the user's data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedloom.core.errors import UserError
from fedloom.core.kinds import Kind
from fedloom.core.preprocessing import Preprocessing
from fedloom.data.divide import LARGEST_TARGET
from fedloom.data.limits import memory_limit
from fedloom.data.user_data.categorical import (
    PLAUSIBLE_CLASSES,
    Categorical,
    as_text,
    check_classes,
    encode_classes,
    match_classes,
    report_missing,
    such_rows,
)
from fedloom.data.user_data.cells import DECIMAL_COMMA, MISSING, check_scalar, is_list_type, is_text_type, parse_number
from fedloom.data.user_data.issues import Issues, Origin, shorten
from fedloom.data.user_data.tables import class_names

Wanted = Literal["auto", "class", "number", "labels"]
FLAGS = {"false": 0.0, "true": 1.0, "no": 0.0, "yes": 1.0}  # beside 0 and 1
WORD_BYTES = 32  # of a label of a sample, while labels are read
NO_LABELS = ("", "none")  # cells of samples that have none of the labels
UNKNOWN_LABELS = tuple(word for word in MISSING if word not in NO_LABELS)


class Target(NamedTuple):
    """What is predicted of every sample."""

    kind: Kind
    y: np.ndarray  # index of the class, -1 if unknown; a number; or 0 or 1 by label; both are NaN if unknown
    names: tuple[str, ...]  # of classes or labels; for a number, what it is


def known_targets(y: np.ndarray) -> np.ndarray:
    """Whether the target of a sample is known, for every sample."""
    if y.dtype.kind == "i":
        return y >= 0
    return ~np.isnan(y if y.ndim == 1 else y.sum(1))


def check_target(target: Target, what: str) -> None:
    """Raise a UserError if there is nothing to learn, or if `what` cannot be what is predicted."""
    kind, y, names = target
    if kind == "classes":
        check_classes(y, names, what)
    elif (y == y[0]).all():
        same = f"{what} is {y[0]:g} in all samples" if kind == "number" else "all samples have the same labels"
        raise UserError(f"There is nothing to learn, because {same}.")
    elif kind == "number" and (largest := np.abs(y).max()) > LARGEST_TARGET:
        raise UserError(f"Numbers are as large as {largest:g} in {what}; give them in a larger unit.")


# -- training data


def read_target(
    columns: Mapping[str, pa.ChunkedArray], about: Mapping[str, Any], where: Origin, wanted: Wanted, issues: Issues
) -> Target:
    """The target from a column of a table, or from several, one for each label.

    Args:
        columns: the columns by name.
        about: Hugging Face's description of columns.
        where: origin of the rows.
        wanted: what the user says that it is.
        issues: where targets that are missing or cannot be read are reported.
    """
    if len(columns) > 1:
        if wanted in ("class", "number"):
            raise UserError(f"label names {len(columns)} columns, but target={wanted} needs one; name one.")
        return Target("labels", _read_flag_columns(columns, where, issues, required=True), tuple(columns))
    ((name, column),) = columns.items()
    what, names = f"the label '{name}'", class_names(about.get(name))
    if wanted == "labels" or (wanted == "auto" and is_list_type(column.type)):
        return _read_labels(column, names, where, what, issues)
    check_scalar(column, f"{where.file(0)}: the label column '{name}'")
    return _read_values(Categorical.from_column(column), where, what, name, wanted, issues, names)


def read_target_array(y: np.ndarray, where: Origin, what: str, wanted: Wanted, issues: Issues) -> Target:
    """The target from an array with a value per sample, or with a row of labels, 0 or 1, per sample."""
    if y.ndim == 1 and wanted != "labels":
        return _read_values(Categorical.from_array(y), where, what, "y", wanted, issues)
    if wanted in ("class", "number"):
        raise UserError(f"y has the shape {y.shape}, but target={wanted} needs one value per sample.")
    if y.ndim == 1 or y.shape[1] < 2:
        raise UserError(
            f"y has the shape {y.shape}, but labels are 0 or 1 in two columns or more, (samples, labels); give y one "
            "axis if it is a class or a number."
        )
    return Target("labels", _read_flag_array(y, where, issues, required=True), tuple(map(str, range(y.shape[1]))))


def _read_values(
    coded: Categorical,
    where: Origin,
    what: str,
    name: str,
    wanted: Wanted,
    issues: Issues,
    names: list[str] | None = None,
) -> Target:
    """A class per sample, or a number: if that is wanted, or if all values are numbers and some have a fraction."""
    if wanted == "auto" and names is None:
        numbers = [_number(value) for value in coded.categories]
        fractions = [code for code, number in enumerate(numbers) if number % 1 > 0]
        if fractions and not any(map(math.isinf, numbers)):
            wanted, row = "number", coded.first_row(fractions[0])
            note = issues.remark if len(numbers) > PLAUSIBLE_CLASSES else issues.warn  # it may be a mistake
            note(
                "target",
                f"{where(row)}: {what} is {numbers[fractions[0]]:g}, so it is predicted as a number; to predict "
                "classes, turn it into a few, such as low and high.",
            )
    if wanted == "number":
        return Target("number", _read_numbers(coded, where, what, issues, required=True), (name,))
    return Target("classes", *encode_classes(coded, where, what, issues, names))


def _read_labels(column: pa.ChunkedArray, names: list[str] | None, where: Origin, what: str, issues: Issues) -> Target:
    """The labels in a column of lists, or of texts that have several words."""
    words = _split_words(column, f"{where.file(0)}: {what}")
    n, owner = len(column), words.owner
    report_missing(words.unknown, where, f"{what} is missing (an empty one would mean none of the labels)", issues)
    ids, found = encode_classes(words.coded, lambda word: where(int(owner[word])), what, issues, names, noun="labels")
    if len(found) < 2:
        have = f"only '{shorten(found[0])}'" if found else "none"
        raise UserError(f"There must be two labels or more, but {what} has {have}; if it is a class, set target=class.")
    if not is_list_type(column.type) and np.array_equal(owner, np.arange(n)):
        raise UserError(f"Every sample has exactly one word as {what}, so it is a class; set target=class.")
    if len(found) > max(PLAUSIBLE_CLASSES, n // 2) or 4 * n * len(found) > memory_limit():
        raise UserError(f"There are {len(found)} labels for {n} samples, as if {what} were a text; use fewer.")
    if set(found) == {"0", "1"} and len(np.unique(owner * 2 + ids)) < len(ids):
        raise UserError(f"{where.file(0)}: {what} has a 0 or 1 for each label; give the names of labels, or columns.")
    y = _label_matrix(words, ids, n, len(found))
    y[owner[ids < 0]] = np.nan  # which were reported
    return Target("labels", y, found)


# -- new samples


def match_target(
    training: Preprocessing,
    columns: Mapping[str, pa.ChunkedArray],
    about: Mapping[str, Any],
    where: Origin,
    issues: Issues,
) -> np.ndarray:
    """The target of new samples for a trained model, from the same kind of columns as `read_target` takes. What cannot
    be read, and classes and labels that the model does not know, are warned of."""
    if len(columns) > 1:
        return _read_flag_columns(columns, where, issues, required=False)
    ((name, column),) = columns.items()
    what, names = f"the label '{name}'", class_names(about.get(name))
    if training.target == "labels":
        words = _split_words(column, f"{where.file(0)}: {what}")
        coded_words = _named(words.coded, names)
        ids = match_classes(
            coded_words, training.classes, lambda word: where(int(words.owner[word])), what, issues, noun="labels"
        )
        return _label_matrix(words, ids, len(column), len(training.classes))
    check_scalar(column, f"{where.file(0)}: the label column '{name}'")
    if training.target == "number":
        return _read_numbers(Categorical.from_column(column), where, what, issues, required=False)
    return match_classes(_named(Categorical.from_column(column), names), training.classes, where, what, issues)


def match_target_array(training: Preprocessing, y: np.ndarray, where: Origin, issues: Issues) -> np.ndarray:
    """The target of new samples for a trained model, from an array as `read_target_array` takes it."""
    if training.target == "labels":
        return _read_flag_array(y, where, issues, required=False)
    coded = Categorical.from_array(y)
    if training.target == "number":
        return _read_numbers(coded, where, "the label in 'y'", issues, required=False)
    return match_classes(coded, training.classes, where, "the label in 'y'", issues)


def check_target_shape(training: Preprocessing, y: np.ndarray, path: Path) -> None:
    """Raise a UserError unless an array of a file has as many values per sample as the model predicts."""
    wanted = (len(training.classes),) if training.target == "labels" else ()
    if y.shape[1:] != wanted:
        need = f"{wanted[0]} labels, each 0 or 1," if wanted else "one value"
        raise UserError(f"{path}: y has the shape {y.shape}, but the model was trained with {need} per sample.")


def _named(coded: Categorical, names: list[str] | None) -> Categorical:
    """Classes by name, if they are indices of names."""
    known = dict(enumerate(names or ()))
    return Categorical([known.get(value, value) for value in coded.categories], coded.codes)


# -- both


def _read_numbers(coded: Categorical, where: Origin, what: str, issues: Issues, required: bool) -> np.ndarray:
    return _read(coded, _number, "a finite number", where, what, issues, required)


def _read_flags(
    columns: Iterable[tuple[str, Categorical]], where: Origin, issues: Issues, required: bool
) -> np.ndarray:
    """The labels of samples from the values of every label, each with what it is called."""
    must = "0 or 1, true or false, yes or no"
    flags = [_read(coded, _flag, must, where, what, issues, required).astype(np.float32) for what, coded in columns]
    y = np.stack(flags, axis=1)
    y[np.isnan(y).any(1)] = np.nan
    return y


def _read_flag_columns(
    columns: Mapping[str, pa.ChunkedArray], where: Origin, issues: Issues, required: bool
) -> np.ndarray:
    for name, column in columns.items():
        check_scalar(column, f"{where.file(0)}: the label column '{name}'")
    coded = ((f"the label '{name}'", Categorical.from_column(column)) for name, column in columns.items())
    return _read_flags(coded, where, issues, required)


def _read_flag_array(y: np.ndarray, where: Origin, issues: Issues, required: bool) -> np.ndarray:
    coded = ((f"label {c} in 'y'", Categorical.from_array(y[:, c])) for c in range(y.shape[1]))
    return _read_flags(coded, where, issues, required)


def _read(
    coded: Categorical,
    read: Callable[[Any], float],
    must: str,
    where: Origin,
    what: str,
    issues: Issues,
    required: bool,
) -> np.ndarray:
    """A number for every sample, NaN if it has none or one that cannot be read, which is reported.

    Args:
        coded: the value of every sample.
        read: makes a number of a value: NaN if it is missing, infinite if it cannot be read.
        must: what a value must be, for messages.
        where: origin of the samples.
        what: what a value is called in messages.
        issues: where it is reported.
        required: what cannot be read is a problem, and so is a missing value; otherwise there is a warning.
    """
    values = np.array([*map(read, coded.categories), math.nan])[coded.codes]
    wrong = np.isinf(values)
    if required:
        report_missing(np.isnan(values), where, f"{what} is empty", issues)
    if wrong.any():
        row = int(wrong.argmax())
        value = coded.categories[coded.codes[row]]
        text = as_text(value).strip() or str(value)
        sentence = f"{where(row)}: {what} is '{shorten(text)}', not {must}{such_rows(wrong)}"
        if required:
            correction = "write a point instead of the comma" if DECIMAL_COMMA.fullmatch(text) else "correct it"
            issues.problem("target", f"{sentence}; {correction}, or leave the row out.")
        else:
            issues.warn("target", f"{sentence}; it counts as unknown.")
    return np.where(wrong, np.nan, values)


def _number(value: Any) -> float:
    """A value as a number: NaN if it is missing, infinite if it is none."""
    if isinstance(value, float):
        return value
    text = as_text(value).strip()
    number = math.nan if text.lower() in MISSING else parse_number(text)
    return math.inf if number is None else number


def _flag(value: Any) -> float:
    """A value as 0 or 1: NaN if it is missing, infinite if it is neither."""
    number = _number(value)
    return number if number in (0, 1) or math.isnan(number) else FLAGS.get(as_text(value).strip().lower(), math.inf)


class Words(NamedTuple):
    """The labels of samples as words."""

    coded: Categorical  # of all samples, one after another
    owner: np.ndarray  # the sample of each
    unknown: np.ndarray  # whether the labels of a sample are unknown, for every sample


def _split_words(column: pa.ChunkedArray, what: str) -> Words:
    """The words of a column of lists, or of texts with ; or | or, if there are none of these, commas between words."""
    if not is_list_type(column.type):
        check_scalar(column, what)
        try:
            texts = pc.utf8_trim_whitespace(column.cast(pa.string()))
        except pa.ArrowException:
            raise UserError(f"{what} holds {column.type}, not words.") from None
        small = pc.utf8_lower(texts)
        texts = pc.if_else(pc.is_in(small, pa.array(NO_LABELS)), "", texts)
        texts = pc.if_else(pc.is_in(small, pa.array(UNKNOWN_LABELS)), None, texts)
        several = pc.any(pc.match_substring_regex(texts, "[;|]")).as_py()
        column = pc.split_pattern_regex(texts, "[;|]" if several else ",")
    elif not (pa.types.is_integer(column.type.value_type) or is_text_type(column.type.value_type)):
        raise UserError(f"{what} holds {column.type}, not lists of words or of whole numbers.")
    if (pc.sum(pc.list_value_length(column)).as_py() or 0) * WORD_BYTES > memory_limit():
        raise UserError(f"{what} has more labels than fit into memory; give fewer samples.")
    words, owner = pc.list_flatten(column), pc.list_parent_indices(column).to_numpy()
    if not pa.types.is_integer(words.type):
        words = pc.utf8_trim_whitespace(words.cast(pa.string()))
        there = pc.fill_null(pc.not_equal(words, ""), True)
        words, owner = words.filter(there), owner[there.to_numpy()]
    return Words(Categorical.from_column(words), owner, column.is_null().to_numpy())


def _label_matrix(words: Words, ids: np.ndarray, samples: int, labels: int) -> np.ndarray:
    """1 for every label of a sample, given the label of every word (-1 for none), else 0; NaN for unknown samples."""
    y = np.zeros((samples, labels), dtype=np.float32)
    y[words.owner[ids >= 0], ids[ids >= 0]] = 1
    y[words.unknown] = np.nan
    return y
