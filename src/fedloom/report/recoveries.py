"""Pictures of what attacks recover, and of how much they find at some epsilon."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedloom.storage.files import write_file

COLUMNS = 8  # pictures in a row
ATTACKS = {"round": "a round of training", "step": "one step"}


class Recovery(NamedTuple):
    """A batch of pictures in 0..1, (samples, height, width, channels), and what an attack has recovered of it."""

    method: str
    attack: str  # round or step
    client: int
    round: int
    x: np.ndarray
    found: np.ndarray
    psnr: list[float]  # of every sample


def draw_recoveries(recoveries: Sequence[Recovery], path: Path) -> None:
    """Write a PNG file: for every method and attack, a row of originals and one of what was recovered of them."""
    from matplotlib.figure import Figure  # imported here, because it takes time that other commands should not

    groups: dict[tuple[str, str], list[Recovery]] = {}
    for one in recoveries:
        groups.setdefault((one.method, one.attack), []).append(one)
    figure = Figure(figsize=(1.1 * COLUMNS + 1.6, 2.5 * len(groups) + 0.2), dpi=120, layout="constrained")
    parts = np.ravel(figure.subfigures(len(groups), 1, squeeze=False))
    for part, ((method, attack), some) in zip(parts, groups.items(), strict=True):
        part.suptitle(f"{method}: from the upload of {ATTACKS[attack]}", fontsize=9, x=0.01, ha="left")
        each = [(one, j) for one in some for j in range(len(one.x))]
        each = each[:: max(1, len(each) // COLUMNS)][:COLUMNS]  # of several batches, some of each
        axes = part.subplots(2, COLUMNS, squeeze=False)
        for axis in axes.flat:
            axis.axis("off")
        for column, (one, j) in enumerate(each):
            for axis, pictures in zip(axes[:, column], (one.x, one.found), strict=True):
                _show(axis, pictures[j])
            axes[0, column].set_title(f"client {one.client}\nround {one.round}", fontsize=6)
            axes[1, column].set_title(f"{one.psnr[j]:.1f} dB", fontsize=6)
        for axis, name in zip(axes[:, 0], ("original", "recovered"), strict=True):
            axis.text(-0.1, 0.5, name, fontsize=7, ha="right", va="center", rotation=90, transform=axis.transAxes)
    write_file(path, lambda file: figure.savefig(file, format="png"))


def _show(axis: Any, picture: np.ndarray) -> None:
    """Draw a picture, of which the first channel is shown if there are not three."""
    if picture.shape[-1] == 3:
        axis.imshow(picture, interpolation="nearest")
    else:
        axis.imshow(picture[..., 0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def draw_curve(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG file: score, recovery after one step and membership over epsilon, one line per method. What is found
    without noise is a dotted line."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    metric = summary[0]["metric"]
    panels = {
        "score": metric,
        "step_psnr": "PSNR after one step (dB)",
        "membership_auc": "AUC of membership inference",
    }
    shown = [name for name in panels if any(_known(row[name]) for row in summary)]
    figure = Figure(figsize=(4 * len(shown), 3.4), dpi=120, layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    lines = {}
    for number, line in enumerate(dict.fromkeys((row["method"], row["part"]) for row in summary)):
        rows = [row for row in summary if (row["method"], row["part"]) == line]
        colour = f"C{number % 10}"
        lines[" ".join(filter(None, line)) if line[1] != "model" else line[0]] = colour
        for axis, name in zip(axes, shown, strict=True):
            noisy = sorted((row["epsilon"], row[name]) for row in rows if row["epsilon"] and _known(row[name]))
            axis.plot([e for e, _ in noisy], [v for _, v in noisy], "o-", color=colour, markersize=4)
            for row in rows:
                if not row["epsilon"] and _known(row[name]):
                    axis.axhline(row[name], color=colour, linestyle=":", linewidth=1)
    for axis, name in zip(axes, shown, strict=True):
        axis.set_xscale("log")
        axis.set_xlabel("epsilon (less is more private)")
        axis.set_ylabel(panels[name])
        axis.grid(alpha=0.3)
    handles = [Line2D([], [], color=colour, marker="o", markersize=4, label=name) for name, colour in lines.items()]
    handles.append(Line2D([], [], color="gray", linestyle=":", label="without noise"))
    axes[0].legend(handles=handles, fontsize=7)
    write_file(path, lambda file: figure.savefig(file, format="png"))


def _known(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))
