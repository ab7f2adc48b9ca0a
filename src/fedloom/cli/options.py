"""Options that commands share, and the config dict that `run`, `compare`, `sweep` and `data show` make of them."""

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedloom.cli import completion
from fedloom.config.settings import Settings
from fedloom.core.errors import UserError

OPTIONS = {  # name -> its group in the help, and its meaning
    "dataset": ("Task", "data set, see 'fedloom list datasets', or a path to your own data [digits]"),
    "partition": ("Task", "how samples are divided, see 'fedloom list partitions' [the data set's]"),
    "model": ("Task", "architecture, see 'fedloom list models' [the data set's]"),
    "clients": ("Task", "number of clients [the data set's, or 20]"),
    "holdout_clients": ("Task", "share of the clients (or their number) that never train [0]"),
    "data_dir": ("Task", "folder with the data set's files"),
    "rounds": ("Training", "communication rounds [the data set's]"),
    "participation": ("Training", "share of clients in a round, or their number [1]"),
    "local_epochs": ("Training", "passes over a client's data in a round [1]"),
    "batch_size": ("Training", "samples in a batch [10]"),
    "lr": ("Training", "local learning rate [the data set's]"),
    "lr_schedule": ("Training", "learning rate over rounds [constant]"),
    "optimizer": ("Training", "optimizer of local training [sgd]"),
    "momentum": ("Training", "momentum of local SGD [0]"),
    "weight_decay": ("Training", "weight decay of local training [0]"),
    "class_weight": ("Training", "balanced: rare classes count as much as frequent ones [none]"),
    "server_optimizer": ("Training", "optimizer of the server, where it averages [none]"),
    "early_stopping": ("Training", "end after so many rounds without a better metric on validation data [never]"),
    "seed": ("Training", "random seed [0]"),
    "metric": ("Evaluation", "selects the best round and ranks methods, see docs/metrics.md [accuracy]"),
    "eval_clients": ("Evaluation", "evaluate a fixed sample of so many clients [all]"),
    "device": ("Execution", "where to compute [auto]"),
    "dtype": ("Execution", "precision; the last two are for GPUs [float32]"),
    "engine": ("Execution", "ray: several GPUs; reference: one client after another, as a check [vectorized]"),
    "actors": ("Execution", "with --engine ray: processes that train clients [one per GPU or core]"),
    "plan": ("Execution", "how the clients of a round are computed; auto takes the fastest [auto]"),
    "memory": ("Execution", "memory of the device that the run may use [half of what is free]"),
    "store": ("Execution", "where the clients' private state is kept [auto]"),
    "keep": ("Results", "models to keep: best on validation data and last, last only, or none [best]"),
}
METAVARS = {"dataset": "NAME|PATH", "data_dir": "FOLDER", "device": "auto|cpu|cuda|cuda:N", "memory": "3GB|800MB"}
KINDS = {"dataset": "datasets", "partition": "partitions", "model": "models", "metric": "metrics"}  # for completion
ConfigDict = dict[str, Any]


def option(
    *flags: str, about: str, metavar: str | None = None, group: str | None = None, kind: str | None = None
) -> Any:
    """An option of a command.

    Args:
        *flags: how it is written, such as `--out`.
        about: its meaning.
        metavar: what stands for its value in the help, such as INT or best|last; None for a flag.
        group: its group in the help, one of `fedloom.cli.command.GROUPS`.
        kind: whose names complete its value, see `fedloom.cli.completion.names`; by default, the words in `metavar`.
    """
    choices = [word for word in metavar.split("|") if word.islower()] if metavar and "|" in metavar else []
    return typer.Option(
        *flags, help=about, metavar=metavar, show_default=False, rich_help_panel=group,
        autocompletion=lambda: completion.names(kind) if kind else choices,
    )  # fmt: skip


def setting_option(name: str) -> Any:
    """The option for a setting of OPTIONS."""
    group, about = OPTIONS[name]
    metavar = METAVARS.get(name) or _metavar(typing.get_type_hints(Settings).get(name))
    return option(f"--{name.replace('_', '-')}", about=about, metavar=metavar, group=group, kind=KINDS.get(name))


def _metavar(hint: Any) -> str:
    """What stands for a value of a type in the help: its choices, INT, FLOAT or NAME."""
    if typing.get_origin(hint) is Literal:
        return "|".join(typing.get_args(hint))
    words = {int: "INT", float: "FLOAT"}
    return next((words[kind] for kind in (hint, *typing.get_args(hint)) if kind in words), "NAME")


Set = Annotated[
    list[str] | None,
    option(
        "--set",
        about="any other setting (see 'fedloom list settings'), also the method's: --set lam=0.5",
        metavar="KEY=VALUE",
        group="Settings",
    ),
]
File = Annotated[
    Path | None,
    option("--config", about="YAML file with settings, such as a run's config.yaml", metavar="FILE", group="Settings"),
]
Preset = Annotated[
    str | None,
    option("--preset", about="settings that belong together, see 'fedloom list presets'", metavar="NAME",
           group="Settings", kind="presets"),
]  # fmt: skip
Json = Annotated[bool, option("--json", about="machine-readable")]


def with_settings(*only: str, without: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds options for settings to a command, which is given a config dict as its first argument.

    Args:
        *only: names of the options of OPTIONS to add; by default all.
        without: name of an option to leave out.
    """
    names = [name for name in only or OPTIONS if name != without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in names}
            sources = arguments.pop("config"), arguments.pop("preset"), arguments.pop("set_")
            command(_config(values, *sources), **arguments)

        parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        shared = [_parameter(name, Annotated[str | None, setting_option(name)]) for name in names]
        shared += [_parameter(name, kind) for name, kind in (("config", File), ("preset", Preset), ("set_", Set))]
        arguments = [p for p in parameters if isinstance(p.annotation.__metadata__[0], typer.models.ArgumentInfo)]
        options = [p for p in parameters if p not in arguments]
        wrapped.__signature__ = inspect.Signature([*arguments, *shared, *options])  # type: ignore[attr-defined]
        return wrapped

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def _config(values: ConfigDict, config: Path | None, preset: str | None, set_: list[str] | None) -> ConfigDict:
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
