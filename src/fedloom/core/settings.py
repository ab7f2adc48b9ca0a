"""Typed settings: dataclasses whose fields have a meaning and a range, built from names and values of a user.

A run, a method, a data set, a partition and a model are all such dataclasses, so names, types and values are checked in
one place, and a mistake has the same message everywhere.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from fedloom.core.errors import UserError, is_plain_text, nearest, shown

T = TypeVar("T")
LARGEST_INT = 2**63 - 1  # that an int64 tensor holds
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # float32, in which a run computes
SMALLEST_FLOAT = 2.0**-149


def setting(
    default: Any, about: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A field of a settings dataclass.

    Args:
        default: its default value.
        about: its meaning, as `fedloom list` prints it.
        low: smallest value allowed.
        high: largest value allowed.
        above: values must be greater than this.
    """
    return dataclasses.field(default=default, metadata={"about": about, "low": low, "high": high, "above": above})


def fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a settings class by name."""
    return {f.name: f for f in dataclasses.fields(cls)}


def build(cls: type[T], values: Mapping[str, Any], owner: str) -> T:
    """Build a settings class from names and values, converting and checking each.

    `owner` names whose settings they are in messages, such as "model 'cnn4'".
    """
    known = fields(cls)
    for name in values:
        if name not in known:
            raise UserError(f"{owner} has no setting '{name}'; {nearest(name, known)}")
    hints = typing.get_type_hints(cls)
    return cls(**{name: convert(name, value, hints[name], known[name].metadata) for name, value in values.items()})


def convert(name: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    """Convert a value, perhaps text from a command line, to the type of its hint, and check its range.

    Args:
        name: name of the setting, for messages.
        value: the value to convert.
        hint: type hint of the field.
        limits: metadata of the field, see `setting`.
    """
    result = _typed(name, value, hint)
    for number in result if isinstance(result, tuple) else (result,):
        if isinstance(number, int | float) and not isinstance(number, bool):
            _in_range(name, number, limits)
    return result


def _in_range(name: str, number: float, limits: Mapping[str, Any]) -> None:
    low, high, above = limits.get("low"), limits.get("high"), limits.get("above")
    if isinstance(number, int) and abs(number) > LARGEST_INT:
        raise UserError(f"{name} must be a whole number below 2^63, not {shown(number)}.")
    if not math.isfinite(number):
        raise UserError(f"{name} must be a finite number, not {number}.")
    if abs(number) > LARGEST_FLOAT:
        raise UserError(f"{name} must be at most {LARGEST_FLOAT:.3g}, the largest number of float32, not {number:g}.")
    if 0 < abs(number) < SMALLEST_FLOAT:
        raise UserError(f"{name} must be 0 or at least {SMALLEST_FLOAT:.2g}, as float32 has nothing between.")
    if low is not None and number < low:
        raise UserError(f"{name} must be at least {low:g}, not {number:g}.")
    if above is not None and number <= above:
        raise UserError(f"{name} must be greater than {above:g}, not {number:g}.")
    if high is not None and number > high:
        raise UserError(f"{name} must be at most {high:g}, not {number:g}.")


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value converted to a type hint; a UserError if that is impossible."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if value is None and type(None) not in options:
        raise UserError(f"{name} has no value; give it one, or leave it out.")
    if origin is Literal:
        if value not in options:
            word = shown(value)
            raise UserError(f"{name} cannot be '{word}'; {nearest(word, [str(o) for o in options])}")
        return value
    if origin in (typing.Union, types.UnionType):
        if type(None) in options and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
            return None
        return _typed(name, value, next(o for o in options if o is not type(None)))
    if origin is tuple:
        if isinstance(value, str) and options[0] is str:
            value = [part.strip() for part in value.split(",") if part.strip()]
        parts = value.replace("/", ",").split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or (options[-1] is not Ellipsis and len(parts) != len(options)):
            count = "numbers" if options[-1] is Ellipsis else f"{len(options)} numbers"
            example = "0.7/0.1/0.2" if len(options) == 3 else "0.7/0.1"
            raise UserError(f"{name} takes {count} such as {example}, not '{shown(value)}'.")
        kinds = [options[0]] * len(parts) if options[-1] is Ellipsis else options
        return tuple(_typed(name, p, kind) for p, kind in zip(parts, kinds, strict=True))
    return _scalar(name, value, hint)


def _scalar(name: str, value: Any, kind: type) -> Any:
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}.get(kind, str(kind))
    error = UserError(f"{name} must be {expected}, not '{shown(value)}'.")
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
            return value.lower() in ("true", "yes", "on", "1")
        raise error
    if isinstance(value, bool):
        raise error
    if kind in (int, float):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise error from None
        if kind is float:
            return number
        if not math.isfinite(number) or number != int(number):
            raise error
        try:
            return int(value)  # exact, where a float has 53 bits
        except ValueError:  # such as "1e3"
            return int(number)
    if kind is str and isinstance(value, str):
        if not is_plain_text(value):
            raise UserError(f"{name} has a character that is not text: {shown(value)!a}.")
        return value
    raise error
