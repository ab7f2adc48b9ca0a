"""`fedloom`: the commands, their options, and one sentence for every mistake."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from fedloom.cli import show
from fedloom.core.errors import UserError, unknown

app = typer.Typer(
    help="Personalized federated learning: many clients train together, each ends up with a model that is good for it.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out, err = Console(), Console(stderr=True)
UsageError: Any = typer.BadParameter.__base__  # typer exports the leaves of its exceptions only


def _option(about: str, *names: str) -> Any:
    return typer.Option(*names, help=about, show_default=False, metavar="VALUE")


@app.command()
def run(
    algorithm: Annotated[str, typer.Argument(help="method, see 'fedloom list algorithms'")] = "ditto",
    dataset: Annotated[str, _option("data set, see 'fedloom list datasets' [digits]")] = "digits",
    partition: Annotated[str | None, _option("how samples are divided [the data set's]")] = None,
    model: Annotated[str | None, _option("architecture [the data set's]")] = None,
    clients: Annotated[str | None, _option("number of clients [20]")] = None,
    rounds: Annotated[str | None, _option("communication rounds [the data set's]")] = None,
    participation: Annotated[str | None, _option("share of clients in a round, or their number [1]")] = None,
    lr: Annotated[str | None, _option("local learning rate [the data set's]")] = None,
    momentum: Annotated[str | None, _option("momentum of local SGD [0]")] = None,
    weight_decay: Annotated[str | None, _option("weight decay of local SGD [0]")] = None,
    batch_size: Annotated[str | None, _option("samples in a batch [10]")] = None,
    local_epochs: Annotated[str | None, _option("passes over a client's data in a round [1]")] = None,
    seed: Annotated[str | None, _option("random seed [0]")] = None,
    device: Annotated[str | None, _option("auto, cpu, cuda or cuda:N [auto]")] = None,
    dtype: Annotated[str | None, _option("float32 or float64 [float32]")] = None,
    engine: Annotated[str | None, _option("vectorized or reference [vectorized]")] = None,
    plan: Annotated[str | None, _option("auto, stacked or per-client [auto]")] = None,
    data_dir: Annotated[Path | None, _option("folder with the data set's files")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="any other setting, also the method's own: --set lam=0.5", metavar="KEY=VALUE"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="say what the engine decides")] = False,
) -> None:
    """Train and evaluate one method. Without arguments: Ditto on digits, 20 clients, Dirichlet 0.1."""
    given = {
        "clients": clients, "rounds": rounds, "participation": participation, "lr": lr, "momentum": momentum,
        "weight_decay": weight_decay, "batch_size": batch_size, "local_epochs": local_epochs, "seed": seed,
        "device": device, "dtype": dtype, "engine": engine, "plan": plan,
    }  # fmt: skip
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    pairs = _pairs(set_ or [])
    if twice := sorted(values.keys() & pairs.keys()):
        raise UserError(f"'{twice[0]}' is given twice, as an option and with --set.")
    values |= pairs
    _log(verbose)
    from fedloom.experiment import configure, execute  # torch takes seconds to import; help should not

    config = configure(algorithm, dataset, partition, model, data_dir=data_dir, values=values)
    with show.progress(err, config) as on_round:
        result = execute(config, on_round=on_round)
    show.result(out, result)


def _pairs(items: list[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, not '{item}'.")
        if key.strip() in pairs:
            raise UserError(f"--set gives '{key.strip()}' twice.")
        pairs[key.strip()] = value.strip()
    return pairs


KINDS = ("algorithms", "datasets", "models", "partitions")


@app.command(name="list")
def list_(
    kind: Annotated[str, typer.Argument(help=", ".join(KINDS), metavar="KIND")],
    name: Annotated[str | None, typer.Argument(help="one of them, with its settings", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """What there is to choose from, and the settings of each."""
    if kind not in KINDS:
        raise unknown("list", kind, KINDS)
    from fedloom.cli.catalog import catalog

    show.catalog(out, kind, catalog(kind, name), json, details=name is not None)


@app.callback()
def _top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if version:
        from importlib.metadata import version as installed

        out.print(f"fedloom {installed('fedloom')}", highlight=False)
    elif context.invoked_subcommand is None:
        out.print(context.get_help(), highlight=False, markup=False)


def _log(verbose: bool) -> None:
    handler = RichHandler(console=err, show_time=False, show_path=False, show_level=False)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", handlers=[handler])


def main() -> None:
    """Every mistake of the user ends here: one sentence, exit code 2."""
    try:
        status = app(standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except UserError as error:
        _complain(str(error))
    except UsageError as error:
        _complain(error.format_message())
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        err.print("Stopped.")
        sys.exit(130)


def _complain(sentence: str) -> None:
    err.print(f"fedloom: {sentence}", style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(2)
