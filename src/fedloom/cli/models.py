"""The commands for trained models: `fedloom predict`, `fedloom evaluate` and `fedloom export`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.command import examples
from fedloom.cli.console import begin, out
from fedloom.cli.options import Json, option
from fedloom.core.errors import UserError, nearest, plural

if TYPE_CHECKING:
    from fedloom.studies.personal_models import PersonalModels
    from fedloom.studies.predict import Predicted
    from fedloom.studies.result import Result

MAX_SHOWN_CLASSES = 4  # whose probabilities fit a narrow terminal; files have all
Run = Annotated[
    Path,
    typer.Argument(help="folder of a run, a comparison, or a site", show_default=False, metavar="RUN"),
]
Data = Annotated[Path, typer.Argument(help="file or folder with samples", show_default=False, metavar="DATA")]
Client = Annotated[str | None, option("--client", about="name or number of the client [as DATA says]", metavar="NAME")]
When = Annotated[str, option("--when", about="round: best on validation data, or last [best]", metavar="best|last")]
Method = Annotated[
    str | None, option("--method", about="of a comparison, as its leaderboard names it [the first]", metavar="NAME")
]
Seed = Annotated[int | None, option("--seed", about="of a comparison [the first]", metavar="INT")]
Join = Annotated[
    Path | None, option("--join", about="labelled samples of a new client, which joins with them", metavar="DATA")
]


def predict(
    run: Run,
    data: Data,
    client: Client = None,
    out_: Annotated[Path | None, option("--out", about="file for all: .csv, .json or .parquet", metavar="FILE")] = None,
    when: When = "best",
    join: Join = None,
    method: Method = None,
    seed: Seed = None,
) -> None:
    """Predict new samples by the trained model of a client.

    The table has the class of each sample and the probabilities of all, or the number that is predicted.
    """
    from fedloom.cli import display
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
    json: Json = False,
    when: When = "best",
    join: Join = None,
    method: Method = None,
    seed: Seed = None,
) -> None:
    """Evaluate trained models on labelled samples.

    The table has all metrics, for every client.
    """
    from fedloom.cli import display
    from fedloom.studies.predict import evaluate as evaluate_predictions

    begin()
    found = _predictions(run, data, client, when, join, method, seed)
    display.print_evaluation(out, evaluate_predictions(found), json)


def export(
    run: Run,
    client: Annotated[str | None, option("--client", about="name or number of the client", metavar="NAME")] = None,
    format_: Annotated[
        str, option("--format", about="format of the file [torch]", metavar="torch|onnx|safetensors")
    ] = "torch",
    out_: Annotated[
        Path | None, option("--out", about="folder for the files [models/CLIENT]", metavar="FOLDER")
    ] = None,
    global_: Annotated[bool, option("--global", about="the global model instead of a client's")] = False,
    when: When = "best",
    join: Join = None,
    method: Method = None,
    seed: Seed = None,
) -> None:
    """Write a trained model for other programs.

    Beside the model, preprocessing.json says how samples are prepared for it.
    """
    from fedloom.studies.export import FILES
    from fedloom.studies.export import export as export_model
    from fedloom.studies.joining import join as join_run

    begin()
    if format_ not in FILES:
        raise UserError(f"format cannot be '{format_}'; {nearest(format_, list(FILES))}")
    if global_ and (client is not None or join is not None):
        raise UserError("--global and --client (or --join) exclude each other; give one of them.")
    result = _open(run, method, seed)
    if client is None:
        client = getattr(result, "name", None)  # a site has models of one client
    if client is None and not global_ and join is None:
        raise UserError("Say whose model: --client NAME, or --global.")
    if global_:
        model = result.global_model(_checked(when))
    elif join is not None:
        model = join_run(_of_run(result), join)
    else:
        assert client is not None
        model = result.model(client, _checked(when))
    name = "global" if global_ else client or "new"
    folder = out_ or Path("models") / re.sub(r"[^\w.+-]", "_", name)
    path = export_model(model, folder, format_)  # type: ignore[arg-type]
    out.print(f"{path}\n{folder / 'preprocessing.json'}", highlight=False, soft_wrap=True)


DOCS = "docs/trained-models.md"
COMMANDS: dict[Callable[..., None], str] = {  # the commands, and the ends of their help
    predict: examples(
        "fedloom predict runs/ditto-digits-1 new.npz --client 3",
        "fedloom predict runs/hospitals patients.csv --out predictions.csv",
        "fedloom predict runs/hospitals oslo-new.csv --join oslo.csv --client Oslo",
        docs=DOCS,
    ),
    evaluate: examples(
        "fedloom evaluate runs/hospitals patients.csv",
        "fedloom evaluate runs/compare-hospitals-1 patients.csv --method fedavg --json",
        docs=DOCS,
    ),
    export: examples(
        "fedloom export runs/ditto-digits-1 --client 3",
        "fedloom export runs/hospitals --client Paris --format onnx --out paris",
        "fedloom export runs/hospitals --global",
        docs=DOCS,
    ),
}


def _predictions(
    run: Path, data: Path, client: str | None, when: str, join: Path | None, method: str | None, seed: int | None
) -> Predicted:
    from fedloom.studies.joining import join as join_run
    from fedloom.studies.predict import predict as predict_samples
    from fedloom.studies.predict import predict_with

    result = _open(run, method, seed)
    if join is not None:
        return predict_with(join_run(_of_run(result), join), data, client or "new")
    return predict_samples(result, data, client, _checked(when))


def _open(run: Path, method: str | None, seed: int | None) -> Result | PersonalModels:
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


def _of_run(found: Result | PersonalModels) -> Result:
    from fedloom.studies.result import Result

    if not isinstance(found, Result):
        raise UserError("A new client can join where the run's folder is, which is at the server; leave out --join.")
    return found


def _checked(when: str) -> Any:
    if when not in ("best", "last"):
        raise UserError(f"when cannot be '{when}'; {nearest(when, ('best', 'last'))}")
    return when
