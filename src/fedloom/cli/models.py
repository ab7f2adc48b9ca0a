"""The commands for trained models: `fedloom predict`, `fedloom evaluate` and `fedloom export`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli import display
from fedloom.cli.console import begin, out
from fedloom.core.errors import UserError, nearest, plural

if TYPE_CHECKING:
    from fedloom.studies.predict import Predicted
    from fedloom.studies.result import Result

PLAIN: dict[str, Any] = {"show_default": False, "metavar": "VALUE"}
MAX_SHOWN_CLASSES = 4  # whose probabilities fit a narrow terminal; files have all
Run = Annotated[Path, typer.Argument(help="folder of a run or a comparison", show_default=False, metavar="RUN")]
Data = Annotated[Path, typer.Argument(help="file or folder with samples", show_default=False, metavar="DATA")]
Client = Annotated[str | None, typer.Option("--client", help="name or number of the client [as DATA says]", **PLAIN)]
When = Annotated[str, typer.Option("--when", help="best (on validation data) or last [best]", **PLAIN)]
Method = Annotated[
    str | None, typer.Option("--method", help="of a comparison, as its leaderboard names it [the first]", **PLAIN)
]
Seed = Annotated[int | None, typer.Option("--seed", help="of a comparison [the first]", **PLAIN)]
Join = Annotated[
    Path | None, typer.Option("--join", help="labelled samples of a new client, which joins with them", **PLAIN)
]


def predict(
    run: Run,
    data: Data,
    client: Client = None,
    out_: Annotated[Path | None, typer.Option("--out", help="file for all: .csv, .json or .parquet", **PLAIN)] = None,
    when: When = "best",
    join: Join = None,
    method: Method = None,
    seed: Seed = None,
) -> None:
    """Predict by the trained model of a client: the class of each sample, and the probabilities of all."""
    from fedloom.studies.predict import write_table

    begin()
    found = _predictions(run, data, client, when, join, method, seed)
    shown = found.table(MAX_SHOWN_CLASSES)
    if out_ is not None:
        write_table(found.table(), out_)
    display.print_predictions(out, shown, found.samples.warnings, complete=out_ is not None)
    if out_ is not None:
        out.print(f"{plural(shown.num_rows, 'prediction')} in {out_}", highlight=False, soft_wrap=True)


def evaluate(
    run: Run,
    data: Data,
    client: Client = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    when: When = "best",
    join: Join = None,
    method: Method = None,
    seed: Seed = None,
) -> None:
    """Evaluate the trained models of clients on labelled samples: all metrics, for every client."""
    from fedloom.studies.predict import evaluate as evaluate_predictions

    begin()
    found = _predictions(run, data, client, when, join, method, seed)
    display.print_evaluation(out, evaluate_predictions(found), json)


def export(
    run: Run,
    client: Annotated[str | None, typer.Option("--client", help="name or number of the client", **PLAIN)] = None,
    format_: Annotated[str, typer.Option("--format", help="torch, onnx or safetensors [torch]", **PLAIN)] = "torch",
    out_: Annotated[Path | None, typer.Option("--out", help="folder for the files [models/CLIENT]", **PLAIN)] = None,
    global_: Annotated[bool, typer.Option("--global", help="the global model instead of a client's")] = False,
    when: When = "best",
    join: Join = None,
    method: Method = None,
    seed: Seed = None,
) -> None:
    """Write the trained model of a client for other programs, with preprocessing.json, which says how it is fed."""
    from fedloom.studies.export import FILES
    from fedloom.studies.export import export as export_model
    from fedloom.studies.joining import join as join_run

    begin()
    if format_ not in FILES:
        raise UserError(f"format cannot be '{format_}'; {nearest(format_, list(FILES))}")
    if global_ and (client is not None or join is not None):
        raise UserError("--global and --client (or --join) exclude each other; give one of them.")
    if client is None and not global_ and join is None:
        raise UserError("Say whose model: --client NAME, or --global.")
    result = _open(run, method, seed)
    if global_:
        model = result.global_model(_checked(when))
    elif join is not None:
        model = join_run(result, join)
    else:
        assert client is not None
        model = result.model(client, _checked(when))
    name = "global" if global_ else client or "new"
    folder = out_ or Path("models") / re.sub(r"[^\w.+-]", "_", name)
    path = export_model(model, folder, format_)  # type: ignore[arg-type]
    out.print(f"{path}\n{folder / 'preprocessing.json'}", highlight=False, soft_wrap=True)


def _predictions(
    run: Path, data: Path, client: str | None, when: str, join: Path | None, method: str | None, seed: int | None
) -> Predicted:
    from fedloom.studies.joining import join as join_run
    from fedloom.studies.predict import predict as predict_samples
    from fedloom.studies.predict import predict_with

    result = _open(run, method, seed)
    if join is not None:
        return predict_with(join_run(result, join), data, client or "new")
    return predict_samples(result, data, client, _checked(when))


def _open(run: Path, method: str | None, seed: int | None) -> Result:
    from fedloom.studies.compare import Comparison
    from fedloom.studies.load import load
    from fedloom.studies.sweep import Sweep

    found = load(run)
    if isinstance(found, Comparison):
        return found.run(method, seed)
    if isinstance(found, Sweep):
        raise UserError(f"{run} is a sweep; give the folder of one of its runs, or run its best combination.")
    if method is not None or seed is not None:
        raise UserError(f"--method and --seed are for comparisons, but {run} is a single run.")
    return found


def _checked(when: str) -> Any:
    if when not in ("best", "last"):
        raise UserError(f"when cannot be '{when}'; {nearest(when, ('best', 'last'))}")
    return when
