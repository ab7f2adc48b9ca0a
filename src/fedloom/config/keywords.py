"""The keyword arguments that `fedloom.run`, `fedloom.compare` and `fedloom.sweep` all take, documented once."""

import dataclasses
import functools
import inspect
import os
import textwrap
import typing
from collections.abc import Callable
from typing import Any, TypeVar, cast

from fedloom.config.resolve import AlgorithmLike, Config, DatasetLike, configure
from fedloom.config.settings import Settings
from fedloom.core.federation import Federation
from fedloom.data.dataset import Dataset
from fedloom.data.sets.own import Given
from fedloom.metrics.registry import add_metric

F = TypeVar("F", bound=Callable[..., Any])
TASK = {  # keyword -> annotation, description
    "partition": ("str | Partition", "how samples are divided among clients [the data set's]"),
    "model": (
        "str | Model | nn.Module | Callable[[], nn.Module]",
        "a name, a module (its parameters are everybody's initial ones) or a function that builds one (every seed has "
        "its own initial parameters) [the data set's]",
    ),
    "head": ("str", "name of the last layer of a module of your own [head]"),
    "data_dir": ("str | Path", "folder with the data set's files [$FEDLOOM_DATA, or a cache]"),
}
HEADING = "More keyword arguments [and their defaults, which a data set may change]:"


class _Default:
    """Shown as the default of a keyword that is left to the data set."""

    def __repr__(self) -> str:
        return "..."


def keywords(without: tuple[str, ...] = ()) -> dict[str, tuple[str, str]]:
    """Name -> (annotation, description) of all keyword arguments that describe a task and the settings of a run."""
    hints, found = typing.get_type_hints(Settings), dict(TASK)
    for field in dataclasses.fields(Settings):
        default = "/".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        hint = hints[field.name]
        text = hint.__name__ if hint in (bool, float, int, str) else str(hint).replace("typing.", "")
        found[field.name] = text, f"{field.metadata['about']} [{default}]"
    return {name: about for name, about in found.items() if name not in without}


def takes_settings(*without: str) -> Callable[[F], F]:
    """Let `help()` and signatures show these keywords for a function with `**settings`. If its second argument,
    `dataset`, is an object with data, it is read once for all runs."""

    def decorate(original: F) -> F:
        @functools.wraps(original)
        def function(*given: Any, **named: Any) -> Any:
            given = tuple(_given(value) if i == 1 else value for i, value in enumerate(given))
            named = {name: _given(value) if name == "dataset" else value for name, value in named.items()}
            return original(*given, **named)

        named, signature = keywords(without), inspect.signature(original)
        *first, rest = signature.parameters.values()
        keyword, default = inspect.Parameter.KEYWORD_ONLY, _Default()
        more = [inspect.Parameter(k, keyword, default=default, annotation=hint) for k, (hint, _) in named.items()]
        function.__signature__ = signature.replace(parameters=[*first, *more, rest])  # type: ignore[attr-defined]
        about, _, example = inspect.cleandoc(function.__doc__ or "").partition("\n>>>")
        lines = [textwrap.fill(f"{k}: {text}", 116, subsequent_indent="    ") for k, (_, text) in named.items()]
        listed = textwrap.indent("\n".join(lines), "    ")
        function.__doc__ = f"{about.rstrip()}\n\n{HEADING}\n{listed}\n" + (f"\n>>>{example}\n" if example else "")
        return cast(F, function)

    return decorate


def _given(dataset: DatasetLike) -> DatasetLike:
    return dataset if isinstance(dataset, str | os.PathLike | Dataset | Federation) else Given(dataset)


def from_keywords(algorithm: AlgorithmLike, dataset: DatasetLike, settings: dict[str, Any]) -> Config:
    """The configuration that keyword arguments ask for; `partition__k` is the setting k of the partition."""
    task = {name: settings[name] for name in TASK if name in settings}
    values = {name.replace("__", "."): value for name, value in settings.items() if name not in TASK}
    if callable(values.get("metric")):
        values["metric"] = add_metric(values["metric"])
    return configure(algorithm, dataset, **task, values=values)
