"""Options that `run`, `compare`, `sweep` and `data` share, and the config dict that they make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.core.errors import UserError

SETTINGS = {
    "dataset": "data set, see 'fedloom list datasets' [digits]",
    "partition": "how samples are divided [the data set's]",
    "model": "architecture [the data set's]",
    "clients": "number of clients [20]",
    "rounds": "communication rounds [the data set's]",
    "participation": "share of clients in a round, or their number [1]",
    "lr": "local learning rate [the data set's]",
    "momentum": "momentum of local SGD [0]",
    "weight_decay": "weight decay of local SGD [0]",
    "batch_size": "samples in a batch [10]",
    "local_epochs": "passes over a client's data in a round [1]",
    "seed": "random seed [0]",
    "eval_clients": "evaluate a fixed sample of so many clients [all]",
    "holdout_clients": "keep a share of the clients (or their number) out of training [0]",
    "device": "auto, cpu, cuda or cuda:N [auto]",
    "dtype": "float32, float64, tf32 or bf16 [float32]",
    "engine": "vectorized or reference [vectorized]",
    "plan": "auto, stacked, stacked-eager or per-client [auto]",
    "store": "private state of clients: auto, memory or disk [auto]",
    "data_dir": "folder with the data set's files",
}


def with_settings(*only: str, without: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds (some of) the options to a command; its first argument is the config dict that they make."""
    names = [name for name in only or SETTINGS if name != without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            values = {name: given.pop(name) for name in names}
            sources = given.pop("config"), given.pop("preset"), given.pop("set_")
            command(_config(values, *sources), **given)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        shared = [_parameter(name, str | None, _option(name, SETTINGS[name])) for name in names]
        shared += [
            _parameter("config", Path | None, _option("config", FILE)),
            _parameter("preset", str | None, _option("preset", PRESET)),
            _parameter("set_", list[str] | None, typer.Option("--set", help=SET, metavar="KEY=VALUE")),
        ]
        first = [p for p in own if isinstance(p.annotation.__metadata__[0], typer.models.ArgumentInfo)]
        rest = [p for p in own if p not in first]
        wrapped.__signature__ = inspect.Signature([*first, *shared, *rest])  # type: ignore[attr-defined]
        return wrapped

    return decorate


FILE = "YAML file with settings, such as a run's config.yaml"
PRESET = "settings that belong together, see 'fedloom list presets'"
SET = "any other setting, also the method's own: --set lam=0.5"


def _option(name: str, about: str) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", help=about, show_default=False, metavar="VALUE")


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Annotated[kind, option]
    )


def _config(values: dict[str, Any], config: Path | None, preset: str | None, set_: list[str] | None) -> dict[str, Any]:
    """A preset, then a file, then options; later ones take precedence."""
    options = {key: value for key, value in values.items() if value is not None}
    settings = pairs(set_ or [])
    if twice := sorted(options.keys() & settings.keys()):
        raise UserError(f"'{twice[0]}' is given twice, as an option and with --set.")
    from fedloom.config import files, resolve  # imports torch, which takes seconds that `--help` should not

    configs = [] if preset is None else [files.preset(preset)]
    configs += [] if config is None else [files.read_config(config)]
    return resolve.combine(*configs, options, settings)


def pairs(items: list[str]) -> dict[str, str]:
    """The settings of options `--set key=value`."""
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, not '{item}'.")
        if key.strip() in found:
            raise UserError(f"--set gives '{key.strip()}' twice.")
        found[key.strip()] = value.strip()
    return found
