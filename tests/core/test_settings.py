"""Settings from what a user wrote: every type, its range, and the sentence for each mistake."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from sentences import user_error

from fedloom.core.settings import build, fields, setting


@dataclass(frozen=True)
class Example:
    count: int = setting(3, "a whole number", low=1, high=10)
    rate: float = setting(0.5, "a number", above=0)
    share: float = setting(0.5, "a share", low=0, high=1)
    fast: bool = setting(False, "a switch")
    word: str = setting("abc", "a word")
    kind: Literal["round", "square"] = setting("round", "one of two")
    clip: float | None = setting(None, "a number or none", above=0)
    split: tuple[float, float, float] = setting((0.7, 0.1, 0.2), "three numbers", low=0)
    widths: tuple[int, ...] = setting((64,), "some numbers", low=1)
    free: Any = setting(None, "anything")  # noqa: RUF009 - a field, as the others are
    seed: int = setting(0, "a large number", low=0)


def made(**values):
    """An example with these settings, as a user wrote them."""
    return build(Example, values, "an example")


def test_what_is_not_given_has_its_default():
    assert made() == Example()
    assert made(count=4) == Example(count=4)


def test_fields_know_their_meaning_and_range():
    assert fields(Example)["count"].metadata == {"about": "a whole number", "low": 1, "high": 10, "above": None}
    assert fields(Example)["rate"].metadata["above"] == 0


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", 7, 7),
        ("count", "7", 7),
        ("count", 7.0, 7),
        ("count", "7.0", 7),
        ("count", "1e1", 10),
        ("seed", "9007199254740993", 2**53 + 1),  # not a float
        ("seed", 2**63 - 1, 2**63 - 1),
        ("rate", 2, 2.0),
        ("rate", "1e-3", 0.001),
        ("word", "x", "x"),
        ("kind", "square", "square"),
        ("clip", "2", 2.0),
        ("clip", None, None),
        ("clip", "none", None),
        ("clip", "None", None),
        ("clip", "null", None),
        ("split", "0.6/0.2/0.2", (0.6, 0.2, 0.2)),
        ("split", "0.6,0.2,0.2", (0.6, 0.2, 0.2)),
        ("split", "0.6, 0.2, 0.2", (0.6, 0.2, 0.2)),
        ("split", [0.6, "0.2", 0.2], (0.6, 0.2, 0.2)),
        ("split", (1, 0, 0), (1.0, 0.0, 0.0)),
        ("widths", "32/16", (32, 16)),
        ("widths", "32", (32,)),
        ("widths", [], ()),
        ("free", {"x": 1}, {"x": 1}),
    ],
)
def test_a_value_becomes_the_type_of_its_setting(name, value, expected):
    found = getattr(made(**{name: value}), name)
    assert found == expected
    assert type(found) is type(expected)
    if isinstance(expected, tuple):
        assert [type(v) for v in found] == [type(v) for v in expected]


@pytest.mark.parametrize("value", [True, "true", "True", "TRUE", "yes", "on", "1"])
def test_words_for_true_are_true(value):
    assert made(fast=value).fast is True


@pytest.mark.parametrize("value", [False, "false", "False", "FALSE", "no", "off", "0"])
def test_words_for_false_are_false(value):
    assert made(fast=value).fast is False


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("count", "many", ["count", "whole number", "'many'"]),
        ("count", "2.5", ["count", "whole number", "'2.5'"]),
        ("count", 2.5, ["count", "whole number", "'2.5'"]),
        ("count", True, ["count", "whole number", "'True'"]),
        ("count", None, ["count", "has no value"]),
        ("fast", None, ["fast", "has no value"]),
        ("kind", None, ["kind", "has no value"]),
        ("split", None, ["split", "has no value"]),
        ("word", "a\0", ["word", "not text", r"'a\x00'"]),
        ("word", "\ud800", ["word", "not text", r"'\ud800'"]),
        ("seed", "x" * 100, ["seed", f"'{'x' * 57}...'"]),
        ("count", "nan", ["count", "whole number"]),
        ("count", "inf", ["count", "whole number"]),
        ("count", [1], ["count", "whole number"]),
        ("count", "", ["count", "whole number", "''"]),
        ("rate", "fast", ["rate", "a number", "'fast'"]),
        ("rate", True, ["rate", "a number"]),
        ("rate", "nan", ["rate", "finite", "nan"]),
        ("rate", "inf", ["rate", "finite", "inf"]),
        ("rate", [0.1], ["rate", "a number"]),
        ("fast", "maybe", ["fast", "true or false", "'maybe'"]),
        ("fast", 2, ["fast", "true or false", "'2'"]),
        ("word", 3, ["word", "a word", "'3'"]),
        ("kind", "oval", ["kind", "'oval'", "round, square"]),
        ("kind", "sqare", ["kind", "'sqare'", "did you mean 'square'?"]),
        ("clip", "long", ["clip", "a number", "'long'"]),
        ("split", "0.5/0.5", ["split", "3 numbers", "0.7/0.1/0.2", "'0.5/0.5'"]),
        ("split", 0.5, ["split", "3 numbers", "'0.5'"]),
        ("split", "a/b/c", ["split", "a number", "'a'"]),
        ("split", "0.5/0.5/", ["split", "a number", "''"]),
        ("widths", 5, ["widths", "numbers", "'5'"]),
        ("widths", "5/x", ["widths", "whole number", "'x'"]),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name, value, words):
    with user_error(*words):
        made(**{name: value})


def test_a_list_of_any_length_is_not_said_to_take_two_numbers():
    with user_error("widths takes numbers such as"):
        made(widths=5)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("count", 0, ["count", "at least 1", "not 0"]),
        ("count", 11, ["count", "at most 10", "not 11"]),
        ("seed", 2**63, ["seed", "below 2^63", "not 9223372036854775808"]),
        ("rate", 3.5e38, ["rate", "at most 3.4e+38", "float32", "not 3.5e+38"]),
        ("rate", "1e-46", ["rate", "at least 1.4e-45", "float32"]),
        ("split", "1e39/0/0", ["split", "float32"]),
        ("rate", 0, ["rate", "greater than 0", "not 0"]),
        ("rate", "-0.1", ["rate", "greater than 0", "not -0.1"]),
        ("share", -0.01, ["share", "at least 0", "not -0.01"]),
        ("share", 1.5, ["share", "at most 1", "not 1.5"]),
        ("clip", 0, ["clip", "greater than 0"]),
        ("split", "1.2/-0.4/0.2", ["split", "at least 0", "not -0.4"]),
        ("widths", "3/0", ["widths", "at least 1", "not 0"]),
        pytest.param("count", 10**400, ["count"], id="count-beyond floats"),
        pytest.param("rate", 10**400, ["rate"], id="rate-beyond floats"),
    ],
)
def test_a_value_out_of_range_is_refused(name, value, words):
    with user_error(*words):
        made(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("count", 1), ("count", 10), ("share", 0), ("share", 1), ("rate", 1e-12)])
def test_the_ends_of_a_range_belong_to_it(name, value):
    assert getattr(made(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuont", ["an example", "'cuont'", "did you mean 'count'?"]),
        ("Rate", ["an example", "'Rate'", "did you mean 'rate'?"]),
        ("zzz", ["an example", "'zzz'", "clip, count, fast"]),  # nothing is near: all there is
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, words):
    with user_error(*words):
        made(**{name: 1})
