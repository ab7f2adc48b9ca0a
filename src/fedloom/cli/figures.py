"""The commands that look at finished runs: `fedloom plot` and `fedloom diagnose`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.command import examples
from fedloom.cli.console import begin, err, no_warnings, out
from fedloom.cli.options import Json, option
from fedloom.core.errors import UserError, nearest, plural

if TYPE_CHECKING:
    from fedloom.analysis.diagnosis import Diagnosis, Row
    from fedloom.studies.result import Result

FIGURES = ("convergence", "distribution", "clients", "tsne", "landscape", "sweep", "rewards", "hypernetwork")
Sources = Annotated[
    list[Path],
    typer.Argument(help="folders of runs, comparisons or sweeps", show_default=False, metavar="RUN..."),
]
Method = Annotated[
    list[str] | None,
    option("--method", about="only this one, as legends name it; may be given several times", metavar="NAME"),
]
When = Annotated[
    str | None, option("--when", about="round: best on validation data, or last [best]", metavar="best|last")
]
Samples = Annotated[
    int | None, option("--samples", about="at most so many samples of a model, drawn at random [all]", metavar="INT")
]


def plot(
    figure: Annotated[
        str,
        typer.Argument(
            help=", ".join(FIGURES), show_default=False, metavar="FIGURE", autocompletion=lambda: list(FIGURES)
        ),
    ],
    runs: Sources,
    out_: Annotated[
        Path | None, option("--out", about="file: .svg, .pdf or .png [RUN-FIGURE.svg]", metavar="FILE")
    ] = None,
    view: Annotated[
        str | None, option("--view", about="model whose scores are drawn [pre]", metavar="pre|post|global")
    ] = None,
    smooth: Annotated[
        int | None, option("--smooth", about="convergence: mean over so many rounds [10]", metavar="INT")
    ] = None,
    below: Annotated[
        str | None, option("--below", about="distribution: thresholds [64,69,72,75]", metavar="LIST")
    ] = None,
    client: Annotated[
        str | None, option("--client", about="landscape: whose personal model [0]", metavar="NAME")
    ] = None,
    setting: Annotated[
        str | None, option("--setting", about="sweep: the setting to draw [that with most values]", metavar="NAME")
    ] = None,
    when: When = None,
    samples: Samples = None,
    method: Method = None,
) -> None:
    """Draw a figure of finished runs, as vector graphics."""
    from fedloom import plots
    from fedloom.plots.drawing import check_file, check_matplotlib

    begin()
    if figure not in FIGURES:
        raise UserError(f"Unknown figure '{figure}'; {nearest(figure, FIGURES)}")
    check_matplotlib()
    path = out_ or Path(f"{runs[0].resolve().name}-{figure}.svg")
    check_file(path)
    options = {
        "view": view, "smooth": smooth, "below": None if below is None else _numbers(below), "client": client,
        "setting": setting, "when": _checked(when), "samples": samples, "method": method or None,
    }  # fmt: skip
    with no_warnings():  # runs have shown them
        plots.save(plots.figure(figure, *runs, **options), path)
    out.print(str(path), highlight=False, markup=False, soft_wrap=True)


def diagnose(
    runs: Sources,
    clients: Annotated[
        int, option("--clients", about="personal models to measure, of evenly spaced clients [20]", metavar="INT")
    ] = 20,
    planes: Annotated[
        int, option("--planes", about="planes of random directions to average over [1]", metavar="INT")
    ] = 1,
    when: When = None,
    samples: Samples = None,
    method: Method = None,
    layers: Annotated[bool, option("--layers", about="also the spectral norm of each layer")] = False,
    out_: Annotated[
        Path | None, option("--out", about="CSV file: one row per method, seed and kind of model", metavar="FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Measure sharpness, margins and the terms of bounds."""
    from fedloom.analysis.diagnosis import diagnose as measure
    from fedloom.plots.sources import results
    from fedloom.report.leaderboard import to_csv
    from fedloom.storage.files import text_writer, write_file

    begin()
    if out_ is not None:
        _check_csv(out_)
    with no_warnings():  # runs have shown them
        found = measure(
            _chosen(results(*runs), method), clients=clients, when=_checked(when) or "best", planes=planes,
            samples=samples,
        )  # fmt: skip
    if json:
        _print_json(found)
    else:
        _print_tables(found, layers)
    if out_ is not None:
        write_file(out_, text_writer(to_csv(found.rows)))
        (err if json else out).print(f"Each seed: {out_}", highlight=False, markup=False, soft_wrap=True)


DOCS = "docs/plots.md"
COMMANDS: dict[Callable[..., None], str] = {  # the commands, and the ends of their help
    plot: examples(
        "fedloom plot convergence runs/compare-digits-1",
        "fedloom plot distribution runs/compare-digits-1 --below 80,90 --out a.pdf",
        "fedloom plot landscape runs/compare-digits-1 --method plgu-lf --client 3",
        "fedloom plot sweep runs/sweep-ditto-digits-1",
        docs=DOCS,
    ),
    diagnose: examples(
        "fedloom diagnose runs/compare-digits-1",
        "fedloom diagnose runs/compare-digits-1 --layers --out sharpness.csv",
        docs=DOCS,
    ),
}


def _numbers(text: str) -> list[float]:
    """The numbers of an option such as `--below 64,69`."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise UserError(f"--below takes numbers with commas between them, such as 64,69,72,75, not '{text}'.")
    return found


def _checked(when: str | None) -> Any:
    if when not in (None, "best", "last"):
        raise UserError(f"when cannot be '{when}'; {nearest(str(when), ('best', 'last'))}")
    return when


def _chosen(runs: dict[str, list[Result]], methods: Sequence[str] | None) -> dict[str, list[Result]]:
    for name in methods or ():
        if name not in runs:
            raise UserError(f"Unknown method of these runs '{name}'; {nearest(name, runs)}")
    return {label: of for label, of in runs.items() if not methods or label in methods}


def _check_csv(path: Path) -> None:
    if path.suffix.lower() != ".csv":
        raise UserError(f"The table is written as a .csv file, not as '{path.name}'.")
    if not path.parent.is_dir():
        raise UserError(f"There is no folder {path.parent} for {path.name}; make it first.")


# -- what `diagnose` prints

TITLES = {  # column -> its title
    "loss": "loss",
    "sharpness": "sharpness",
    "margin": "margin",
    "product": "norms",
    "wrong": "wrong, %",
    "margin_term": "margin term",
    "perturbation_term": "perturb. term",
}
GENERATORS = {
    "hypernetworks": "networks",
    "embedding": "embedding",
    "parameters": "parameters",
    "radius": "r",
    "depth": "depth",
    "width": "width",
    "product": "norms",
    "largest_embedding": "R",
    "margin": "margin term",
    "perturbation": "perturb. term",
}
CAPTION = (
    "On the training samples of each model, means ± standard deviations over seeds. Sharpness: mean increase of the "
    "loss at radius 0.5 in random directions with filter normalisation. Margin: median of the right output minus the "
    "largest other one. Norms: product of the spectral norms of all weight matrices. Terms: of the bounds in PLGU's "
    "Theorems 1 to 3, without the constants that cannot be measured; they compare models and are no bounds themselves."
)


def _print_tables(found: Diagnosis, layers: bool) -> None:
    left_out = _print_table("Trained models", found.summary(), ("method", "model"), TITLES)
    if layers:
        keys = ("method", "model", "layer", "shape")
        _print_table("Layers", found.layer_summary(), keys, {"spectral_norm": "spectral norm"})
    if found.generators:
        _print_table("Hypernetworks after the last round", found.generator_summary(), ("method",), GENERATORS)
    whose = f"Personal models: means over {plural(len(found.clients), 'client')}."
    rest = " The terminal is too narrow for all columns; --out FILE keeps all." if left_out else ""
    out.print(f"{CAPTION} {whose}{rest}", highlight=False, markup=False)


def _print_table(title: str, rows: Sequence[Row], keys: Sequence[str], titles: dict[str, str]) -> int:
    """Print means over seeds and their standard deviations; returns the number of columns that were left out."""
    from fedloom.cli.tables import Column, number_column, print_table

    shown = [name for name in titles if any(not math.isnan(row[name]) for row in rows)]
    columns = [Column(key, wrap=key == "method") for key in keys]
    columns += [number_column(titles[name], optional=name not in ("loss", "sharpness", "margin")) for name in shown]
    cells = [[*(str(row[key]) for key in keys), *(_cell(row, name) for name in shown)] for row in rows]
    return print_table(out, columns, cells, title)


def _cell(row: Row, name: str) -> str:
    """A mean with three significant digits, and its standard deviation with as many decimals."""
    mean, std = row[name], row[f"{name}_std"]
    if not math.isfinite(mean):
        return "-" if math.isnan(mean) else str(mean)
    if mean == int(mean) and not std > 0:
        return f"{mean:.0f}"
    if not 1e-4 <= abs(mean) < 1e6:
        return f"{mean:.2e}"
    decimals = max(0, 2 - math.floor(math.log10(abs(mean))))
    return f"{mean:.{decimals}f}" + (f" ± {std:.{decimals}f}" if std > 0 else "")


def _print_json(found: Diagnosis) -> None:
    def plain(rows: Sequence[Row]) -> list[Row]:
        return [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows
        ]

    tables = {"models": plain(found.rows), "layers": plain(found.layers), "hypernetworks": plain(found.generators)}
    out.print_json(json.dumps({**tables, "clients": found.clients}))
