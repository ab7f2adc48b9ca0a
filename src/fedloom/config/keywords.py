"""The settings of a run as documented keyword arguments of the functions that take them."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from fedloom.config.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


class _Default:
    """The default of a setting: that of the data set or, if it has none, that of `Settings`."""

    def __repr__(self) -> str:
        return "..."


def setting_parameters(without: tuple[str, ...] = ()) -> dict[str, tuple[str, str]]:
    """Name -> (annotation, description) of all settings of a run."""
    hints = typing.get_type_hints(Settings)
    found = {}
    for field in dataclasses.fields(Settings):
        if field.name not in without:
            default = "/".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            found[field.name] = _annotation(hints[field.name]), f"{field.metadata['about']} [{default}]"
    return found


def _annotation(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def takes_settings(*without: str) -> Callable[[F], F]:
    """Let `help()` and signatures show the settings of a run as keyword arguments of a function with `**settings`."""

    def decorate(function: F) -> F:
        named = setting_parameters(without)
        signature = inspect.signature(function)
        *first, rest = signature.parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        more = [
            inspect.Parameter(name, keyword, default=_Default(), annotation=hint) for name, (hint, _) in named.items()
        ]
        function.__signature__ = signature.replace(parameters=[*first, *more, rest])  # type: ignore[attr-defined]
        about, _, example = inspect.cleandoc(function.__doc__ or "").partition("\n>>>")
        lines = [textwrap.indent(textwrap.fill(f"{name}: {text}", 112), "    ") for name, (_, text) in named.items()]
        settings = "\n".join(["Settings of the run [and their defaults, which a data set may change]:", *lines])
        function.__doc__ = f"{about.rstrip()}\n\n{settings}\n" + (f"\n>>>{example}\n" if example else "")
        return function

    return decorate
