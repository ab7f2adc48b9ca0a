"""Pictures of what attacks recover, and of how much they find at some epsilon."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedloom.storage.files import write_file

COLUMNS = 8  # pictures in a row
MARGIN, HEIGHT = 0.3, 2.8  # left of the pictures, and of a group of them, in inches
LINES: dict[Any, str] = {":": "without noise", "--": "guessing"}
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
    width, height = MARGIN + COLUMNS, HEIGHT * len(groups)  # in inches, as everything here; a picture has one
    figure = Figure(figsize=(width, height), dpi=min(110, 60000 / height))  # matplotlib draws 65536 pixels at most
    for number, ((method, attack), some) in enumerate(groups.items(), 1):
        each = [(one, j) for one in some for j in range(len(one.x))]
        each = each[:: max(1, len(each) // COLUMNS)][:COLUMNS]  # of several batches, some of each
        tall, wide, _ = each[0][0].x[0].shape
        gap = max(1, max(tall, wide) // 16)
        pictures = _mosaic([(one.x[j], one.found[j]) for one, j in each], gap)
        inch = max(tall, wide) + gap  # in pixels of the pictures
        high, broad = (size / inch for size in pictures.shape[:2])
        axis = figure.add_axes(
            (MARGIN / width, (height - HEIGHT * number + 0.25) / height, broad / width, high / height)
        )
        axis.imshow(pictures, interpolation="nearest", aspect="auto")
        axis.axis("off")
        axis.text(-0.5, -0.5 - 0.2 * inch, f"{method}: from the upload of {ATTACKS[attack]}", fontsize=9)
        for column, (one, j) in enumerate(each):
            x = column * (wide + gap) + wide / 2 - 0.5
            axis.text(x, -0.5 - 0.03 * inch, f"client {one.client}, round {one.round}", fontsize=6, ha="center")
            axis.text(x, 2 * tall + gap, f"{one.psnr[j]:.1f} dB", fontsize=6, ha="center", va="top")
        for row, name in enumerate(("original", "recovered")):
            y = row * (tall + gap) + tall / 2
            axis.text(-0.12 * inch, y, name, fontsize=7, ha="right", va="center", rotation=90)
    write_file(path, lambda file: figure.savefig(file, format="png"))


def _mosaic(pairs: Sequence[tuple[np.ndarray, np.ndarray]], gap: int) -> np.ndarray:
    """Pairs of pictures side by side, one above the other, with white gaps; of pictures that are not in colour, the
    first channel is shown."""
    tall, wide, channels = pairs[0][0].shape
    made = np.ones((2 * tall + gap, len(pairs) * (wide + gap) - gap, 3))
    for column, pair in enumerate(pairs):
        for row, picture in enumerate(pair):
            y, x = row * (tall + gap), column * (wide + gap)
            made[y : y + tall, x : x + wide] = picture if channels == 3 else picture[..., :1]
    return made


def draw_curve(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG file: score, recovery after one step and membership over epsilon, one line per method. What is found
    without noise is a dotted line, and what an attacker reaches by guessing a dashed one."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = {
        "score": summary[0]["metric"],
        "step_psnr": "PSNR after one step (dB)",
        "membership_auc": "AUC of membership inference",
    }
    shown = [name for name in panels if any(_known(row[name]) for row in summary)]
    figure = Figure(figsize=(4 * len(shown), 3.4), dpi=110, layout="constrained")
    axes = dict(zip(shown, figure.subplots(1, len(shown), squeeze=False)[0], strict=True))
    methods = list(dict.fromkeys(row["method"] for row in summary))
    colours = {method: f"C{number % 10}" for number, method in enumerate(methods)}
    for (name, axis), (method, colour) in itertools.product(axes.items(), colours.items()):
        rows = [row for row in summary if row["method"] == method and _known(row[name])]
        noisy = sorted((row for row in rows if row["epsilon"]), key=lambda row: row["epsilon"])
        points = [row["epsilon"] for row in noisy], [row[name] for row in noisy]
        errors = [row["membership_se"] for row in noisy] if name == "membership_auc" else None
        axis.errorbar(*points, yerr=errors, fmt="o-", color=colour, markersize=4, linewidth=1.3, capsize=2)
        for row in rows:
            if not row["epsilon"]:
                axis.axhline(row[name], color=colour, linestyle=":", linewidth=1.3)
    guesses = {"step_psnr": next((row["step_guess"] for row in summary if _known(row["step_guess"])), None)}
    for name, axis in axes.items():
        if _known(guess := guesses.get(name, 0.5 if name == "membership_auc" else None)):
            axis.axhline(guess, color="gray", linestyle="--", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel("epsilon (less is more private)")
        axis.set_ylabel(panels[name])
        axis.grid(alpha=0.3)
    handles = [Line2D([], [], color=colour, marker="o", markersize=4, label=name) for name, colour in colours.items()]
    handles += [Line2D([], [], color="gray", linestyle=style, label=label) for style, label in LINES.items()]
    axes[shown[0]].legend(handles=handles, fontsize=7)
    write_file(path, lambda file: figure.savefig(file, format="png"))


def _known(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))
