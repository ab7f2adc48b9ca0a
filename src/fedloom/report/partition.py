"""How samples are distributed over clients: statistics, and a plot."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.storage.files import write_file

FORMATS = ("png", "svg", "pdf")
HELD_OUT = "#c05621"
BUBBLES = 60  # more clients or classes than this are drawn as a heat map


def describe(data: Federation) -> dict[str, Any]:
    """Statistics of a partition, for `fedloom data show`.

    `skew` is the total variation distance between a client's class distribution and that of all data, averaged over
    clients; for numbers, the share of their variance that is between clients, whose means and standard deviations are
    there, too. Sequences have a label at every position; `positions` counts them.
    """
    labels = data.labels()
    numbers = [_statistics(values) for values in _numbers(data)] if data.kind == "number" else []
    sizes = {name: rows.sizes for name, rows in data.splits.items()}
    clients = [
        {
            "client": i,
            **({"name": data.client_names[i]} if data.client_names else {}),
            "samples": int(sum(n[i] for n in sizes.values())),
            **({"positions": int(labels[i].sum())} if data.sequences else {}),
            **{name: int(n[i]) for name, n in sizes.items()},
            **(numbers[i] if numbers else {"classes": int((labels[i] > 0).sum()), "labels": labels[i].tolist()}),
            **({"held_out": i >= data.clients} if data.held_out else {}),
        }
        for i in range(len(labels))
    ]
    return {
        "clients": clients,
        "samples": sum(client["samples"] for client in clients),
        **({"positions": int(labels.sum())} if data.sequences else {}),
        "target": data.kind,
        **(_statistics(np.concatenate(_numbers(data))) if numbers else {"classes": data.classes}),
        "server": 0 if data.server is None else len(data.server),
        "skew": _skew_of_numbers(_numbers(data)) if numbers else _skew(labels),
        "partition": data.digest(),
    }


def _numbers(data: Federation) -> list[np.ndarray]:
    """The targets of every client."""
    rows = [[split[i] for split in data.splits.values()] for i in range(len(data.splits["train"]))]
    return [data.targets.in_unit(data.y[torch.cat(mine)]).cpu().numpy() for mine in rows]


def _statistics(values: np.ndarray) -> dict[str, float]:
    found = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    return {name: float(value) for name, value in found.items()}


def _skew(labels: np.ndarray) -> float:
    shares = labels / np.maximum(labels.sum(1, keepdims=True), 1)
    return float(np.abs(shares - labels.sum(0) / max(1, labels.sum())).sum(1).mean() / 2)


def _skew_of_numbers(values: list[np.ndarray]) -> float:
    everything = np.concatenate(values)
    between = sum(len(mine) * (mine.mean() - everything.mean()) ** 2 for mine in values)
    return float(between / max(len(everything) * everything.var(), np.finfo(float).tiny))


def check_image_path(path: Path) -> None:
    """Raise a UserError unless the file name ends in a format that can be drawn."""
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        raise UserError(f"A picture is a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file, not '{path.name}'.")


def draw(data: Federation, path: Path) -> None:
    """Plot the number of samples per client and class to a file: circles, or a heat map if there are many clients. For
    numbers, plot their distribution at every client."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    check_image_path(path)
    labels = data.labels()
    clients, classes = labels.shape
    high = 3.6 if data.kind == "number" else min(12, max(2.6, 1.2 + 0.26 * classes))
    figure = Figure(figsize=(min(16, max(5, 1.5 + 0.28 * clients)), high), dpi=150)
    axes = figure.add_subplot()
    if data.kind == "number":
        boxes = axes.boxplot(_numbers(data), positions=np.arange(clients), widths=0.6, patch_artist=True, sym=".")
        for i, box in enumerate(boxes["boxes"]):
            box.set(facecolor="#2b6cb0" if i < data.clients else HELD_OUT, alpha=0.75, linewidth=0)
        for line in (*boxes["medians"], *boxes["whiskers"], *boxes["caps"]):
            line.set(color="#333333", linewidth=0.8)
        for points in boxes["fliers"]:
            points.set(markersize=2, markerfacecolor="#777777", markeredgewidth=0)
        axes.grid(True, axis="y", color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title("Targets by client: median, quartiles, range", fontsize=9, loc="left")
    elif clients <= BUBBLES and classes <= BUBBLES:
        client, label = np.nonzero(labels)
        count = labels[client, label]
        colours = np.where(client < data.clients, "#2b6cb0", HELD_OUT)
        axes.scatter(client, label, s=220 * count / labels.max(), color=colours, alpha=0.75, linewidths=0)
        axes.set_xlim(-0.7, clients - 0.3)
        axes.set_ylim(-0.7, classes - 0.3)
        axes.grid(True, color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(f"Samples per client and class (largest circle: {labels.max()})", fontsize=9, loc="left")
    else:
        image = axes.imshow(
            np.log10(labels.T + 1), aspect="auto", interpolation="nearest", cmap="Blues", origin="lower"
        )
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
        ticks = [n for n in (0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 100000) if n <= labels.max()]
        bar.set_ticks([np.log10(n + 1) for n in ticks], labels=[str(n) for n in ticks], fontsize=7)
        axes.set_title("Samples per client and class", fontsize=9, loc="left")
    if data.held_out:
        axes.axvline(data.clients - 0.5, color=HELD_OUT, linewidth=1)
    axes.set_xlabel(f"client ({data.clients} and above are held out)" if data.held_out else "client", fontsize=8)
    noun = {"classes": "class", "labels": "label", "number": data.class_names[0] if data.class_names else "target"}
    axes.set_ylabel(noun[data.kind], fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=min(clients, 20), integer=True))
    if data.kind == "number":
        axes.xaxis.set_major_formatter("{x:.0f}")  # box plots name their positions
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=min(classes, 20), integer=True))
    axes.tick_params(labelsize=7, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.tight_layout()
    write_file(path, lambda file: figure.savefig(file, format=path.suffix.removeprefix(".").lower()))
