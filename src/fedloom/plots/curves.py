"""Figures of scores over rounds and over settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow.compute as pc

from fedloom.algorithms.pfedkt import PFedKT
from fedloom.core.errors import UserError, shown, unknown
from fedloom.metrics.registry import column_name, in_percent
from fedloom.metrics.scores import trailing_mean
from fedloom.plots.drawing import COLOURS, GREY, looks, name_lines
from fedloom.plots.sources import Runs, metric_label, metric_of, results, with_view
from fedloom.studies.cost_metrics import hypernetwork
from fedloom.studies.result import Result
from fedloom.studies.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH = 10  # evaluated rounds over which curves are averaged
LOG = 30  # values that span more than this factor are drawn on a logarithmic axis
MOST_LINES = 8  # of a sweep of two settings
OUTPUTS = (100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600)  # of pFedKT's hypernetwork, the paper's are 400


def convergence(axes: Axes, runs: Runs | Any, *, view: str = "pre", smooth: int = SMOOTH) -> Axes:
    """Draw the mean score over clients by round: a line per method, which is the mean over its seeds, and a band of one
    standard deviation over them. Methods without the model of this view are left out.

    Args:
        axes: where to draw.
        runs: as `results` takes or returns them.
        view: pre, post or global.
        smooth: a trailing mean over so many evaluated rounds; 1 draws the scores as they are.
    """
    from matplotlib.ticker import MaxNLocator

    if smooth < 1:
        raise UserError(f"smooth must be at least 1, not {smooth}.")
    found = with_view(results(runs), view)
    for (label, of_seeds), look in zip(found.items(), looks(len(found)), strict=True):
        rounds, curves = _curves(label, of_seeds, view, smooth)
        mean = curves.mean(0)
        axes.plot(rounds, mean, color=look.colour, linestyle=look.dash, label=label)
        if len(curves) > 1:
            std = curves.std(0, ddof=1)
            axes.fill_between(rounds, mean - std, mean + std, color=look.colour, alpha=0.2, linewidth=0)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylabel(metric_label(metric_of(found), view))
    name_lines(axes, list(found))
    return axes


def _curves(label: str, of_seeds: Sequence[Result], view: str, smooth: int) -> tuple[list[int], np.ndarray]:
    """The rounds that were evaluated with all seeds, and the smoothed scores, one row per seed."""
    column = f"{view}_{column_name(of_seeds[0].metric)}_mean"
    scores = [{row["round"]: row[column] for row in r.rounds if row.get(column) is not None} for r in of_seeds]
    rounds = sorted(set.intersection(*map(set, scores)))
    if not rounds:
        raise UserError(f"The runs of {label} have no evaluated round in common; give finished runs.")
    return rounds, np.array([trailing_mean([one[t] for t in rounds], smooth) for one in scores])


def sweep(axes: Axes, found: Sweep, *, setting: str | None = None) -> Axes:
    """Draw the score by the value of a setting, from a sweep: validation, by which combinations are ranked, and test,
    as means over seeds with bars of one standard deviation. If the sweep has a second setting, there is a line for each
    of its values, of test scores only.

    Args:
        axes: where to draw.
        found: see `fedloom.sweep` and `fedloom.load`.
        setting: what the horizontal axis is, by default the setting with the most values.
    """
    searched = {str(item).partition("=")[0]: str(item).count(",") + 1 for item in found.config["grid"]}
    if setting is None:
        setting = max(searched, key=lambda name: searched[name])
    if setting not in searched:
        raise unknown("setting of this sweep", setting, list(searched))
    others = [name for name in searched if name != setting]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in found.table:
        groups.setdefault(tuple(row[name] for name in others), []).append(row)
    if len(groups) > MOST_LINES:
        raise UserError(
            f"{len(groups)} lines, for all combinations of {', '.join(others)}, are more than can be read; sweep fewer."
        )
    metric = found.config.get("metric", "accuracy")
    name = column_name(metric)
    values = sorted({row[setting] for row in found.table}, key=_order)
    at = _positions(axes, values)
    lines = {"validation": f"val_{name}_mean", "test": f"{name}_mean"} if not others else {"test": f"{name}_mean"}
    drawn = [
        (" ".join([*map("{}={}".format, others, group), *([which] if not others else [])]), column, rows)
        for group, rows in sorted(groups.items(), key=lambda item: str(item[0]))
        for which, column in lines.items()
    ]
    for (label, column, rows), look in zip(drawn, looks(len(drawn)), strict=True):
        rows = sorted(rows, key=lambda row: values.index(row[setting]))
        y, std = (np.array([row.get(c, math.nan) for row in rows], float) for c in (column, f"{column}_std"))
        bars = std if np.isfinite(std).any() else None
        axes.errorbar(
            [at[values.index(row[setting])] for row in rows], y, yerr=bars, label=label, capsize=2, elinewidth=0.7,
            color=look.colour, linestyle=look.dash, marker=look.marker,
        )  # fmt: skip
    axes.set_xlabel(setting)
    axes.set_ylabel(f"{metric.replace('_', ' ')} of personal models{' (%)' if in_percent(metric) else ''}")
    name_lines(axes, [label for label, *_ in drawn])
    return axes


def _order(value: Any) -> tuple[bool, Any]:
    """Numbers by size, before all else by name."""
    return (False, value) if _is_number(value) else (True, str(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positions(axes: Axes, values: Sequence[Any]) -> list[float]:
    """Where the values of a setting are drawn. Numbers that span a wide range need a logarithmic axis; where it cannot
    have them all (0, say), and for all that is no number, values stand side by side."""
    numbers = [float(value) for value in values if _is_number(value)]
    if len(numbers) == len(values):
        sizes = [abs(number) for number in numbers if number]
        wide = len(numbers) > 2 and max(sizes) > LOG * min(sizes)
        if wide and min(numbers) > 0:
            axes.set_xscale("log")
        if not wide or min(numbers) > 0:
            return numbers
    axes.set_xticks(range(len(values)), labels=[str(value) for value in values])
    return [float(i) for i in range(len(values))]


def rewards(axes: Axes, result: Result, *, side: Literal["server", "clients"] = "server") -> Axes:
    """Draw how PAGE's rewards go with accuracy: on the left axis the accuracy of the global model on the server's
    samples (or the mean one of the clients' models after training), on the right axis, dotted, the reward of the server
    (or the mean reward of the clients).

    Args:
        axes: where to draw; its twin has the rewards.
        result: a run of PAGE.
        side: server or clients.
    """
    if side not in ("server", "clients"):
        raise UserError(f"side is server or clients, not '{shown(side)}'.")
    table, server = result.reports, side == "server"
    if not {"reward", "reward_CS"} <= set(table.column_names):
        raise UserError(f"{result.config['algorithm']['name']} has no rewards; give a run of page.")
    reward, colour = ("reward_CS", COLOURS[0]) if server else ("reward", COLOURS[1])
    metric, view = result.basic_metric, "global" if server else "post"
    column = f"{column_name(metric)}_global" if server else f"post_{column_name(metric)}_mean"
    rows = [(row["round"], row[column]) for row in result.rounds if row.get(column) is not None]
    axes.plot(*np.array(rows).T, color=colour)
    part = table.filter((pc.field("client") < 0) == server).filter(pc.field(reward).is_valid())
    rounds, values = part["round"].to_numpy(), part[reward].to_numpy()
    at = np.unique(rounds)
    other = axes.twinx()
    other.grid(False)
    other.spines["right"].set_visible(True)
    other.plot(at, [float(values[rounds == t].mean()) for t in at], color=colour, linestyle=":")
    axes.set_xlabel("round")
    axes.set_ylabel(metric_label(metric, view))
    other.set_ylabel("reward of the server (dotted)" if server else "mean reward of clients (dotted)")
    return axes


def hypernetwork_costs(
    axes: Axes, parameters: int, *, algorithm: PFedKT | None = None, outputs: Sequence[int] = OUTPUTS
) -> Axes:
    """Draw what it costs to generate a model chunk by chunk: floating-point operations of pFedKT's small hypernetwork,
    called as often as the model needs, over those of a large one that makes all of the model in one call, by the number
    of outputs of the small one.

    Args:
        axes: where to draw.
        parameters: of the model that is generated.
        algorithm: pFedKT with the length of embeddings and the hidden layers; by default the paper's.
        outputs: of the small hypernetwork.
    """
    if parameters < 1 or not outputs or min(outputs) < 1:
        raise UserError("parameters and outputs must be at least 1.")
    alg = algorithm or PFedKT()
    large = hypernetwork(alg, parameters, parameters).size.flops
    ratios = [math.ceil(parameters / n) * hypernetwork(alg, parameters, n).size.flops / large for n in outputs]
    axes.plot(outputs, ratios, color=COLOURS[0], marker="o")
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlabel("outputs of the small hypernetwork")
    axes.set_ylabel("FLOPs, small over large")
    return axes
