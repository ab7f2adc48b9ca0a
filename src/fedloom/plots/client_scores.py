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
    """Ids of the clients with a finite test score in the round that is best on validation data, and these scores."""
    column = f"{view}_{column_name(result.metric)}"
    table = result.clients.filter(pc.field("round") == result.best_on_validation(view)["round"])
    if column not in table.column_names:
        raise UserError(f"There are no scores of clients in {result.metric} for this view of the model ({view}).")
    table = table.filter(pc.is_finite(pc.field(column)))
    return table["client"].to_numpy(), table[column].to_numpy().astype(float)


def shares_below(scores: np.ndarray, below: Sequence[float]) -> dict[float, float]:
    """The share of scores below each threshold, in percent."""
    return {threshold: 100 * float(np.mean(scores < threshold)) for threshold in below}


def distribution(axes: Axes, runs: Runs | Any, *, view: str = "pre", below: Sequence[float] | None = None) -> Axes:
    """Draw a histogram of the clients' test scores with one method, in the round that is best on validation data, and
    the shares of clients below thresholds. Bins of scores in percent are one point wide; heights are means over seeds.

    Args:
        axes: where to draw.
        runs: as `results` takes or returns them, of one method.
        view: pre, post or global.
        below: thresholds; by default 64, 69, 72 and 75 for scores in percent.
    """
    from matplotlib.ticker import MaxNLocator

    found = with_view(results(runs), view)
    if len(found) > 1:
        raise UserError(f"A histogram is of one method, not of {', '.join(found)}; give the results of one of them.")
    metric, of_seeds = metric_of(found), next(iter(found.values()))
    values = scores_of(of_seeds, view)
    if not len(values):
        raise UserError("There are no scores of clients to draw.")
    bins = [float(edge) for edge in one_point_bins(values)] if in_percent(metric) else BINS
    weights = np.full(len(values), 1 / len(of_seeds))
    axes.hist(values, bins=bins, weights=weights, color=COLOURS[0], edgecolor="white", linewidth=0.3)
    lines = []
    below = below if below is not None else BELOW if in_percent(metric) else ()
    for threshold, share in shares_below(values, below).items():
        axes.axvline(threshold, color="black", linewidth=0.7, linestyle=":")
        lines.append(f"below {threshold:g}: {share:.1f} %")
    if lines:
        axes.text(0.02, 0.97, "\n".join(lines), transform=axes.transAxes, va="top", fontsize="small")
    axes.set_xlabel(metric_label(metric, view))
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
    label = metric_label(metric_of(found), view)
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
