"""CIFAR-100: 32x32 photographs of a hundred kinds of things (the fine labels)."""

from pathlib import Path

import numpy as np

from fedloom.data import formats
from fedloom.data.dataset import RawDataset, Source, locate
from fedloom.data.sets.cifar10 import Cifar10, read_binary

ARCHIVE_FOLDER = "cifar-100-binary"
LAYOUTS = {
    "published": (f"{ARCHIVE_FOLDER}/train.bin", f"{ARCHIVE_FOLDER}/test.bin"),
    "inside": ("train.bin", "test.bin"),
    "compact": ("train_a.npz", "train_b.npz", "test.npz"),
}
MEAN_STD = {"half": ((0.5,), (0.5,)), "published": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))}


class Cifar100(Cifar10):
    """Classification of photographs, 100 classes. Licence, default settings and options are those of CIFAR-10."""

    name = "cifar100"
    about = "CIFAR-100, 32x32 photographs, fine labels"
    size = "60,000 samples, 100 classes"
    aliases = (ARCHIVE_FOLDER,)
    sources = (
        Source("cifar-100-binary.tar.gz", ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",), unpack=True),
    )

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read all images; the published test images are the official test set."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "compact":
            parts = [_read_compact(folder / name) for name in LAYOUTS[layout]]
        else:
            parts = [read_binary(folder / name, 100, skip=1) for name in LAYOUTS[layout]]
        data, test = formats.join_parts(parts), len(parts[-1][1])
        return formats.image_dataset(self.name, data, test, 100, (50_000, 10_000), MEAN_STD[self.normalise])


def _read_compact(path: Path) -> formats.Labelled:
    """Read an .npz file of FedLoom's compact layout: a strip of images for each class (c00, c01, ...)."""
    with formats.open_npz(path) as arrays:
        classes = sorted(int(name[1:]) for name in arrays.files if name[0] == "c" and name[1:].isdecimal())
        strips = formats.map_in_threads(formats.decode_image_strip, (arrays[f"c{c:02d}"] for c in classes))
        x, y = np.concatenate(strips), np.repeat(classes, [len(strip) for strip in strips])
        return x, formats.validated_labels(y, 100, len(x))
