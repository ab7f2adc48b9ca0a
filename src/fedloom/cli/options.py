"""Options that `run`, `compare`, `sweep` and `data show` share, and the config dict that they are turned into."""

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
    "clients": "number of clients [the data set's, or 20]",
    "rounds": "communication rounds [the data set's]",
    "participation": "share of clients in a round, or their number [1]",
    "lr": "local learning rate [the data set's]",
    "momentum": "momentum of local SGD [0]",
    "weight_decay": "weight decay of local SGD [0]",
    "class_weight": "none, or balanced: rare classes count as much as frequent ones [none]",
    "metric": "selects the best round and ranks methods: accuracy, auprc, macro_f1, ... [accuracy]",
    "batch_size": "samples in a batch [10]",
    "local_epochs": "passes over a client's data in a round [1]",
    "seed": "random seed [0]",
    "eval_clients": "evaluate a fixed sample of so many clients [all]",
    "holdout_clients": "keep a share of the clients (or their number) out of training [0]",
    "device": "auto, cpu, cuda or cuda:N [auto]",
    "dtype": "float32, float64, tf32 or bf16 [float32]",
    "engine": "vectorized or reference [vectorized]",
    "plan": "auto, stacked, stacked-eager or per-client [auto]",
    "keep": "models to keep: best (on validation data, and last), last or none [best]",
    "store": "private state of clients: auto, memory or disk [auto]",
    "data_dir": "folder with the data set's files",
}


def with_settings(*only: str, without: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds the options of SETTINGS to a command, which is given a config dict as its first argument.

    Args:
        *only: names of the options to add; by default all.
        without: name of an option to leave out.
    """
    names = [name for name in only or SETTINGS if name != without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in names}
            sources = arguments.pop("config"), arguments.pop("preset"), arguments.pop("set_")
            command(_config(values, *sources), **arguments)

        parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        shared = [_parameter(name, str | None, _option(name, SETTINGS[name])) for name in names]
        shared += [
            _parameter("config", Path | None, _option("config", FILE)),
            _parameter("preset", str | None, _option("preset", PRESET)),
            _parameter("set_", list[str] | None, typer.Option("--set", help=SET, metavar="KEY=VALUE")),
        ]
        arguments = [p for p in parameters if isinstance(p.annotation.__metadata__[0], typer.models.ArgumentInfo)]
        options = [p for p in parameters if p not in arguments]
        wrapped.__signature__ = inspect.Signature([*arguments, *shared, *options])  # type: ignore[attr-defined]
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
    """The config dict of a preset, a file and options; later ones take precedence."""
    options = {key: value for key, value in values.items() if value is not None}
    settings = pairs(set_ or [])
    if repeated := sorted(options.keys() & settings.keys()):
        raise UserError(f"'{repeated[0]}' is given twice, as an option and with --set.")
    if method := settings.get("algorithm"):
        raise UserError(f"The method is an argument of the command, not a setting; write 'fedloom run {method}'.")
    from fedloom.config import files, resolve  # imports torch, which takes seconds that `--help` should not

    configs = [] if preset is None else [files.preset(preset)]
    configs += [] if config is None else [files.read_config(config)]
    return resolve.combine(*configs, options, settings)


def pairs(items: list[str]) -> dict[str, str]:
    """The settings given by options `--set key=value`, by name."""
    settings = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, not '{item}'.")
        if key.strip() in settings:
            raise UserError(f"--set gives '{key.strip()}' twice.")
        settings[key.strip()] = value.strip()
    return settings
