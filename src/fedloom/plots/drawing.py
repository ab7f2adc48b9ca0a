"""How figures look, and how they become files: text that can be read in a column of a paper, colours that colour-blind
readers can tell apart, and lines that differ in more than colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.core.errors import UserError, check_path
from fedloom.storage.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "pdf", "png")
# Okabe and Ito's colours without yellow, which is too light for lines on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")
GREY = "#666666"
COLUMN = 3.4  # inches, the width of a column of a paper with two
HEIGHT = 2.4
RC: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,  # fonts that publishers accept and that can be searched
    "svg.hashsalt": "fedloom",  # the same figure gives the same file
    "savefig.dpi": 200,
}


class Look(NamedTuple):
    """How one of several groups is drawn."""

    colour: str
    dash: str
    marker: str


def looks(count: int) -> list[Look]:
    """A look for each of so many groups. No two of the first 28 have both colour and dash in common, so lines can be
    told apart without colours, too."""
    cycles = COLOURS, DASHES, MARKERS
    return [Look(*(cycle[i % len(cycle)] for cycle in cycles)) for i in range(count)]


@contextmanager
def style() -> Iterator[None]:
    """Context in which matplotlib draws as `fedloom plot` does: small text for a column of a paper, few lines."""
    check_matplotlib()
    import matplotlib

    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        yield


def check_matplotlib() -> None:
    """Raise UserError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("Plots need the package 'matplotlib'; install it with: pip install matplotlib.") from None


def panels(
    rows: int, columns: int, *, width: float = COLUMN, height: float = HEIGHT, **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a grid of axes, as rows of columns.

    Args:
        rows: number of rows.
        columns: number of columns.
        width: of one of the axes, in inches.
        height: of one of the axes, in inches.
        **options: of `matplotlib.figure.Figure.subplots`, such as `sharex=True`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [list(row) for row in grid]


def check_file(path: Path) -> None:
    """Raise UserError for a path that no figure can be written to."""
    check_path(path)
    if path.suffix.removeprefix(".").lower() not in FORMATS:
        raise UserError(f"A figure is an {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file, not '{path.name}'.")
    if not path.parent.is_dir():
        raise UserError(f"There is no folder {path.parent} for {path.name}; make it first.")


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as SVG or PDF, which can be enlarged, or as PNG. An existing file is replaced. The same figure
    gives the same file, whenever it is written.

    Args:
        figure: see `fedloom.plots.figure` and `fedloom.plots.panels`.
        path: a file that ends in .svg, .pdf or .png.
    """
    path = Path(path)
    check_file(path)
    kind = path.suffix.removeprefix(".").lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    with style():
        write_file(path, lambda file: figure.savefig(file, format=kind, metadata=undated))
    return path


def name_lines(axes: Axes, names: Sequence[str]) -> None:
    """A legend inside the axes or, for many names, beside them."""
    if len(names) > 6:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif len(names) > 1:
        axes.legend(loc="best")
