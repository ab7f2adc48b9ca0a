"""One description of samples for data that lie in several places, from the descriptions of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from fedloom.core.errors import UserError
from fedloom.core.preprocessing import Column, Preprocessing
from fedloom.data.user_data.cells import MAX_CATEGORIES
from fedloom.data.user_data.issues import join_names

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
KINDS = {"table": "rows of a table", "image": "pictures", "text": "texts", "array": "arrays of numbers"}
TARGETS = {"classes": "classes", "labels": "labels", "number": "a number"}
SAME = {  # what all places must have alike -> what it is called
    "shape": "samples of the shape",
    "dtype": "samples of the type",
    "mean": "pixels with the mean",
    "std": "pixels with the standard deviation",
    "missing": "the setting missing=",
}


def merge(each: Mapping[str, Preprocessing]) -> Preprocessing:
    """The description that fits the samples of all places: words and classes that any of them has. Raises a UserError
    that names two places which do not fit together.

    Args:
        each: the description of every place by its name, in the order that decides about columns.
    """
    (first, one), *others = each.items()
    for name, other in others:
        _check_alike(first, one, name, other)
    merged = one
    if one.target != "number":
        merged = replace(merged, classes=_ordered({c for other in each.values() for c in other.classes}))
    if one.kind == "table":
        columns = tuple(_column(column.name, each) for column in one.columns)
        width = sum(1 if column.words is None else len(column.words) for column in columns)
        merged = replace(merged, columns=columns, shape=(width,))
    if one.token_ids is not None:
        merged = replace(merged, token_ids=max(other.token_ids or 0 for other in each.values()))
    return replace(merged, label=None, client=None, split=None)


def _check_alike(first: str, one: Preprocessing, name: str, other: Preprocessing) -> None:
    if one.kind == "text" or other.kind == "text":
        raise UserError("Texts need a common vocabulary, which cannot be made without sending words; use token ids.")
    if one.kind != other.kind:
        raise UserError(f"{first} has {KINDS[one.kind]}, but {name} has {KINDS[other.kind]}; give all the same.")
    if one.target != other.target:
        raise UserError(
            f"The target of {first} is {TARGETS[one.target]}, but that of {name} is {TARGETS[other.target]}; set the "
            "setting target."
        )
    for field, what in SAME.items():
        a, b = getattr(one, field), getattr(other, field)
        if a != b and not (field == "shape" and one.kind == "table"):
            remedy = "set resize" if field == "shape" and one.kind == "image" else "give all the same"
            raise UserError(f"{first} has {what} {_shown(a)}, but {name} has {_shown(b)}; {remedy}.")
    names, found = [c.name for c in one.columns], [c.name for c in other.columns]
    if missing := [column for column in names if column not in found]:
        raise UserError(f"{name} has no column '{missing[0]}', which {first} has; it has {join_names(found)}.")
    if extra := [column for column in found if column not in names]:
        raise UserError(
            f"{name} has a column '{extra[0]}', which {first} has not; leave it out with ignore={extra[0]}."
        )


def _column(name: str, each: Mapping[str, Preprocessing]) -> Column:
    found = {place: next(c for c in other.columns if c.name == name) for place, other in each.items()}
    numbers = [place for place, column in found.items() if column.words is None]
    words = [place for place, column in found.items() if column.words is not None]
    if numbers and words:
        raise UserError(f"Column '{name}' has numbers at {numbers[0]} and words at {words[0]}; correct one of them.")
    if not words:
        return Column(name)
    union = tuple(sorted({word for column in found.values() for word in column.words or ()}))
    if len(union) > MAX_CATEGORIES:
        raise UserError(
            f"Column '{name}' has {len(union)} different words in all places, too many for a category; leave it out "
            f"with ignore={name}."
        )
    return Column(name, union)


def _ordered(classes: set[str]) -> tuple[str, ...]:
    """Names of classes: numbers by value, others by the alphabet."""
    if all(NUMBER.fullmatch(name) for name in classes):
        return tuple(sorted(classes, key=lambda name: (float(name), name)))
    return tuple(sorted(classes))


def _shown(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
