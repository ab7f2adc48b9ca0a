"""Figures of trained models: features in two dimensions, and the loss around a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedloom.analysis.features import Features
from fedloom.analysis.landscape import RADIUS, Landscape
from fedloom.plots.drawing import looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

MOST_NAMED = 20  # groups whose names are written
LINES = 8  # contour lines, at least
DIGITS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8))  # of round numbers


def tsne(axes: Axes, features: Features, *, by: str = "class", points: np.ndarray | None = None) -> Axes:
    """Draw features of test samples in two dimensions, by t-SNE. Each class (or client) has a colour and a marker, and
    its name stands in the middle of its samples; the title has the silhouette of the features, before t-SNE.

    Args:
        axes: where to draw.
        features: see `fedloom.plots.features`.
        by: class or client.
        points: `features.embed()`, if it is drawn more than once.
    """
    at = features.embed() if points is None else points
    groups, names = features.groups(by)
    present = np.unique(groups)
    for group, look in zip(present, looks(len(present)), strict=True):
        x, y = at[groups == group].T
        axes.scatter(x, y, s=5, color=look.colour, marker=look.marker, linewidths=0, alpha=0.7, label=names[group])
    if len(present) <= MOST_NAMED:
        for group in present:
            x, y = _middle(at[groups == group])
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
            axes.text(x, y, names[group], ha="center", va="center", fontsize="small", bbox=box)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    silhouette = features.silhouette(by)
    value = "one group only" if math.isnan(silhouette) else f"silhouette {silhouette:z.2f}"
    axes.set_title(f"by {by}: {value}")
    return axes


def _middle(points: np.ndarray) -> np.ndarray:
    """The point that is nearest to the median: the median itself may lie between clusters."""
    found: np.ndarray = points[np.linalg.norm(points - np.median(points, axis=0), axis=1).argmin()]
    return found


def landscape(axes: Axes, found: Landscape, *, levels: Sequence[float] | None = None) -> Axes:
    """Draw the loss around a model as contour lines on a plane of two random directions: the cross is the model, the
    dashed circle is where sharpness is measured, which the title has.

    Args:
        axes: where to draw.
        found: see `fedloom.plots.loss_landscape`.
        levels: losses at which there is a line; `loss_levels` has the same for several landscapes.
    """
    levels = loss_levels([found]) if levels is None else list(levels)
    losses = np.where(np.isfinite(found.losses), found.losses, max(levels))
    if levels[0] > 0:  # a loss of 0 has no place on a logarithmic scale
        losses = np.maximum(losses, levels[0] / 10)
    if len(levels) > 1:
        axes.contourf(
            found.steps, found.steps, losses, levels=levels, cmap=_light(), extend="both", norm=_logarithmic(levels)
        )
    lines = axes.contour(found.steps, found.steps, losses, levels=levels, colors="black", linewidths=0.5)
    axes.clabel(lines, fontsize="x-small", fmt=lambda level: f"{level:.3g}")
    angle = np.linspace(0, 2 * np.pi, 200)
    axes.plot(RADIUS * np.cos(angle), RADIUS * np.sin(angle), color="black", linewidth=0.8, linestyle="--")
    axes.plot(0, 0, marker="x", color="black")
    axes.set(aspect="equal", xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    axes.grid(False)
    axes.set_title(f"{found.model}\nloss {found.centre:#.3g}, sharpness {found.sharpness:#.3g}")
    return axes


def loss_levels(landscapes: Sequence[Landscape]) -> list[float]:
    """Losses for contour lines that are the same for all of these landscapes: round numbers, as dense as is needed for
    eight lines, or evenly spaced losses where even that is too few.

    Args:
        landscapes: see `fedloom.plots.loss_landscape`.
    """
    losses = np.concatenate([each.losses.ravel() for each in landscapes])
    losses = losses[np.isfinite(losses)]
    low, high = (float(losses.min()), float(losses.max())) if len(losses) else (0.0, 1.0)
    if not high > low:
        return [low - 0.5, low + 0.5]
    for digits in DIGITS if low > 0 else ():
        found = [m * 10.0**e for e in range(-9, 10) for m in digits if low < m * 10.0**e < high]
        if len(found) >= LINES:
            return found
    return np.linspace(low, high, LINES + 2)[1:-1].tolist()


def _light() -> Colormap:
    """Colours on which black lines can be seen."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps["cividis"](np.linspace(0.35, 1, 256)))


def _logarithmic(levels: Sequence[float]) -> Normalize:
    """Colours by the logarithm of the loss, if all levels have one."""
    from matplotlib.colors import LogNorm, Normalize

    return (LogNorm if levels[0] > 0 else Normalize)(levels[0], levels[-1])
