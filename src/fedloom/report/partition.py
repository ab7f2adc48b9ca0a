"""How samples are distributed over clients: statistics, and a plot."""

from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.storage.files import write_file

FORMATS = ("png", "svg", "pdf")
HELD_OUT = "#c05621"
BUBBLES = 60  # more clients or classes than this are drawn as a heat map


def describe(data: Federation) -> dict[str, Any]:
    """Statistics of a partition, for `fedloom data show`.

    `skew` is the total variation distance between a client's class distribution and that of all data, averaged over
    clients. Sequences have a label at every position; `positions` counts them.
    """
    labels = data.labels()
    shares = labels / np.maximum(labels.sum(1, keepdims=True), 1)
    overall = labels.sum(0) / labels.sum()
    sizes = {name: rows.sizes for name, rows in data.splits.items()}
    clients = [
        {
            "client": i,
            **({"name": data.client_names[i]} if data.client_names else {}),
            "samples": int(sum(n[i] for n in sizes.values())),
            **({"positions": int(labels[i].sum())} if data.y.dim() > 1 else {}),
            **{name: int(n[i]) for name, n in sizes.items()},
            "classes": int((labels[i] > 0).sum()),
            "labels": labels[i].tolist(),
            **({"held_out": i >= data.clients} if data.held_out else {}),
        }
        for i in range(len(labels))
    ]
    return {
        "clients": clients,
        "samples": sum(client["samples"] for client in clients),
        **({"positions": int(labels.sum())} if data.y.dim() > 1 else {}),
        "classes": data.classes,
        "server": 0 if data.server is None else len(data.server),
        "skew": float(np.abs(shares - overall).sum(1).mean() / 2),
        "partition": data.digest(),
    }


def check_image_path(path: Path) -> None:
    """Raise a UserError unless the file name ends in a format that can be drawn."""
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        raise UserError(f"A picture is a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file, not '{path.name}'.")


def draw(data: Federation, path: Path) -> None:
    """Plot the number of samples per client and class to a file: circles, or a heat map if there are many clients."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    check_image_path(path)
    labels = data.labels()
    clients, classes = labels.shape
    figure = Figure(figsize=(min(16, max(5, 1.5 + 0.28 * clients)), min(12, max(2.6, 1.2 + 0.26 * classes))), dpi=150)
    axes = figure.add_subplot()
    if clients <= BUBBLES and classes <= BUBBLES:
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
    axes.set_ylabel("class", fontsize=8)
    for axis, count in ((axes.xaxis, clients), (axes.yaxis, classes)):
        axis.set_major_locator(MaxNLocator(nbins=min(count, 20), integer=True))
    axes.tick_params(labelsize=7, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.tight_layout()
    write_file(path, lambda file: figure.savefig(file, format=path.suffix.removeprefix(".").lower()))
