"""CIFAR-100: 32x32 photographs of a hundred kinds of things (the fine labels)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import NORMALISE, Part, checked_labels, joined, npz, pictures, squares, together
from fedloom.data.sets.cifar10 import binary

INSIDE = "cifar-100-binary"
LAYOUTS = {
    "published": (f"{INSIDE}/train.bin", f"{INSIDE}/test.bin"),
    "inside": ("train.bin", "test.bin"),
    "compact": ("train_a.npz", "train_b.npz", "test.npz"),
}
NORMAL = {"half": ((0.5,), (0.5,)), "published": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))}


@dataclass(frozen=True)
class Cifar100(Dataset):
    name = "cifar100"
    about = "CIFAR-100, 32x32 photographs, fine labels"
    size = "60,000 samples, 100 classes"
    model = "cnn4"
    aliases = (INSIDE,)
    licence = "none stated; free for research, citing Krizhevsky, Learning Multiple Layers of Features, 2009"
    sources = (
        Source("cifar-100-binary.tar.gz", ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",), unpack=True),
    )
    usual = {"lr": 0.005, "rounds": 100}

    normalise: Literal["half", "published"] = setting("half", NORMALISE)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "compact":
            parts = [_compact(folder / name) for name in LAYOUTS[layout]]
        else:
            parts = [binary(folder / name, 100, skip=1) for name in LAYOUTS[layout]]
        full = (50_000, 10_000)
        return pictures(self.name, joined(parts), len(parts[-1][1]), 100, full, NORMAL[self.normalise])


def _compact(path: Path) -> Part:
    """A strip of pictures for each class."""
    with npz(path) as arrays:
        classes = sorted(int(name[1:]) for name in arrays.files if name[0] == "c" and name[1:].isdecimal())
        strips = together(squares, (arrays[f"c{c:02d}"] for c in classes))
        x, y = np.concatenate(strips), np.repeat(classes, [len(strip) for strip in strips])
        return x, checked_labels(y, 100, len(x))
