"""Figures of how well each client is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from fedloom.core.errors import UserError
from fedloom.metrics.registry import column_name, in_percent, sign
from fedloom.plots.drawing import COLOURS
from fedloom.plots.sources import Runs, metric_label, metric_of, results, with_view
from fedloom.studies.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BELOW = (64.0, 69.0, 72.0, 75.0)  # the thresholds of PLGU's Fig. 1 and 6
BINS = 30  # of scores that are not in percent; those have bins of one point


def client_scores(result: Result, view: str = "pre") -> tuple[np.ndarray, np.ndarray]:
    """Ids of the evaluated clients, and their test scores in the round that is best on validation data."""
    column = f"{view}_{column_name(result.metric)}"
    table = result.clients.filter(pc.field("round") == result.best_on_validation(view)["round"])
    if column not in table.column_names:
        raise UserError(f"There are no scores of clients in {result.metric} for this view of the model ({view}).")
    table = table.filter(pc.field(column).is_valid())
    return table["client"].to_numpy(), table[column].to_numpy().astype(float)


def shares_below(scores: np.ndarray, below: Sequence[float]) -> dict[float, float]:
    """The share of scores below each threshold, in percent."""
    return {threshold: 100 * float(np.mean(scores < threshold)) for threshold in below}


def distribution(
    axes: Axes,
    scores: Any,
    *,
    below: Sequence[float] = BELOW,
    percent: bool = True,
    seeds: int = 1,
    colour: str = COLOURS[0],
) -> Axes:
    """Draw a histogram of the clients' scores, in bins of one point, with the shares of clients below thresholds.

    Args:
        axes: where to draw.
        scores: one per client, or per client and seed.
        below: thresholds.
        percent: whether scores are in percent, so that bins are one point wide; else there are 30 bins.
        seeds: number of seeds of which scores are given; heights are numbers of clients, as means over them.
        colour: of the bars.
    """
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(scores, float)
    values = values[np.isfinite(values)]
    if not len(values):
        raise UserError("There are no scores of clients to draw.")
    weights = np.full(len(values), 1 / max(seeds, 1))
    bins = BINS if not percent else [float(edge) for edge in one_point_bins(values)]
    axes.hist(values, bins=bins, weights=weights, color=colour, edgecolor="white", linewidth=0.3)
    lines = []
    for threshold, share in shares_below(values, below).items():
        axes.axvline(threshold, color="black", linewidth=0.7, linestyle=":")
        lines.append(f"below {threshold:g}: {share:.1f} %")
    if lines:
        axes.text(0.02, 0.97, "\n".join(lines), transform=axes.transAxes, va="top", fontsize="small")
    axes.set_ylabel("clients")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return axes


def one_point_bins(values: np.ndarray) -> np.ndarray:
    """The edges of bins that are one point wide; the last one includes 100, as 99 to 100 is its bin."""
    low, high = int(np.floor(values.min())), int(np.floor(values.max())) + 1
    return np.arange(min(low, 99), min(high, 100) + 1) if high <= 101 else np.arange(low, high + 1)


def scores_of(of_seeds: Sequence[Result], view: str) -> np.ndarray:
    """The scores of the clients with all seeds, one after another."""
    return np.concatenate([client_scores(result, view)[1] for result in of_seeds])


def clients(axes: Axes, runs: Runs | Any, *, view: str = "pre") -> Axes:
    """Draw a strip per method with the score of every client as a colour: means over seeds, in the round that is best
    on validation data. Clients are sorted by the mean of their scores over methods, the best served one first.

    Args:
        axes: where to draw.
        runs: as `results` takes or returns them.
        view: pre, post or global.
    """
    found = with_view(results(runs), view)
    ids = sorted({int(i) for of_seeds in found.values() for r in of_seeds for i in client_scores(r, view)[0]})
    strips = np.array([_mean_scores(of_seeds, view, ids) for of_seeds in found.values()])
    direction = sign(metric_of(found))
    order = np.argsort(-direction * np.nanmean(strips, axis=0), kind="stable")
    image = axes.imshow(
        strips[:, order], aspect="auto", interpolation="nearest", cmap="cividis" if direction > 0 else "cividis_r"
    )
    axes.grid(False)
    axes.set_yticks(range(len(found)), labels=list(found))
    axes.tick_params(length=0)
    axes.set_xlabel(f"{len(ids)} clients, the best served first")
    if len(ids) <= 25:
        axes.set_xticks(range(len(ids)), labels=[str(ids[i]) for i in order], fontsize="x-small")
        axes.set_xlabel("client, the best served first")
    figure = axes.get_figure()
    assert figure is not None
    label = metric_label(next(iter(found.values()))[0], view)
    figure.colorbar(image, ax=axes, label=label, location="top", aspect=40, shrink=0.7)
    return axes


def _mean_scores(of_seeds: Sequence[Result], view: str, ids: Sequence[int]) -> np.ndarray:
    """The mean over seeds of the score of each client; NaN for one that was not evaluated."""
    rows = np.full((len(of_seeds), len(ids)), np.nan)
    for row, result in zip(rows, of_seeds, strict=True):
        found, values = client_scores(result, view)
        row[np.searchsorted(ids, found)] = values
    known = np.isfinite(rows)
    return np.where(known, rows, 0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)


def is_percent(runs: Runs) -> bool:
    """True if the scores of the runs are in percent."""
    return in_percent(metric_of(runs))
