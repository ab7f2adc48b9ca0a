"""Tiny-ImageNet-200: 64x64 photographs. The published validation images are for testing, as in papers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.data import formats
from fedloom.data.dataset import Dataset, RawDataset, Source, locate

ARCHIVE_FOLDER = "tiny-imagenet-200"
FILES = ("wnids.txt", "train", "val/val_annotations.txt", "val/images")
LAYOUTS = {
    "published": tuple(f"{ARCHIVE_FOLDER}/{name}" for name in FILES),
    "inside": FILES,
    "compact": ("train.npz", "val.npz"),
}
MEAN_STD = {"half": ((0.5,), (0.5,)), "published": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
SHAPE = (64, 64, 3)


@dataclass(frozen=True)
class TinyImageNet(Dataset):
    """Classification of photographs, 200 classes."""

    name = "tiny"
    about = "Tiny-ImageNet-200, 64x64 photographs"
    size = "110,000 samples, 200 classes"
    model = "cnn4"
    aliases = ("tiny_imagenet", ARCHIVE_FOLDER)
    licence = "as ImageNet: non-commercial research and education only"
    sources = (Source("tiny-imagenet-200.zip", ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",), unpack=True),)
    usual = {"lr": 0.005, "rounds": 100}

    normalise: Literal["half", "published"] = setting("half", formats.NORMALISE)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read all images; the published validation images are the official test set."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "compact":
            parts = [_read_compact(folder / name) for name in LAYOUTS[layout]]
            data, test = formats.join_parts(parts), len(parts[1][1])
        else:
            data, test = _read_published(folder / ARCHIVE_FOLDER if layout == "published" else folder)
        return formats.image_dataset(self.name, data, test, 200, (100_000, 10_000), MEAN_STD[self.normalise])


def _read_published(folder: Path) -> tuple[formats.Labelled, int]:
    """Read the published files: train/WNID/images/*.JPEG, and val/images/*.JPEG with their WordNet ids in
    val_annotations.txt. A label is the index of the id among all, sorted. Also returns the number of test images."""
    with formats.readable(folder / "wnids.txt", "a list of 200 WordNet ids"):
        ids = sorted((folder / "wnids.txt").read_text().split())
        formats.require(len(set(ids)) == 200, f"{len(set(ids))} ids")
    label = {wnid: c for c, wnid in enumerate(ids)}
    train: list[tuple[Path, int]] = []
    for wnid in ids:
        files = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not files:
            raise UserError(f"{folder / 'train' / wnid / 'images'} has no pictures (*.JPEG); fetch the data set again.")
        train += [(file, label[wnid]) for file in files]
    annotations = folder / "val" / "val_annotations.txt"
    test: list[tuple[Path, int]] = []
    with formats.readable(annotations, "a table of file names and WordNet ids"):
        for number, line in enumerate(annotations.read_text().splitlines(), 1):
            cells = line.split("\t")
            formats.require(len(cells) > 1 and cells[1] in label, f"line {number} names no class")
            formats.require(Path(cells[0]).name == cells[0], f"line {number} names no file")
            test.append((folder / "val" / "images" / cells[0], label[cells[1]]))
        formats.require(bool(test), "it is empty")
    paths, labels = zip(*train, *test, strict=True)
    return (_decode_all(paths, paths), np.array(labels, dtype=np.int64)), len(test)


def _decode_all(encoded: Sequence[Path | np.ndarray], names: Sequence[Path | str]) -> np.ndarray:
    """Decode images, given as files or bytes, to [n, 3, 64, 64]; `names` are for messages."""
    x = np.empty((len(encoded), 3, 64, 64), np.uint8)

    def decode(i: int) -> None:
        with formats.readable(Path(names[i]), "a 64x64 picture"):
            pixels = formats.decode_image(encoded[i])
            formats.require(pixels.shape == SHAPE, f"{pixels.shape[1]}x{pixels.shape[0]} pixels")
            x[i] = pixels.transpose(2, 0, 1)

    formats.map_in_threads(decode, range(len(encoded)))
    return x


def _read_compact(path: Path) -> formats.Labelled:
    """Read an .npz file of FedLoom's compact layout: JPEG files end to end, where each begins, and labels."""
    with formats.open_npz(path) as arrays:
        jpeg, offset, label = arrays["jpeg"], arrays["offset"].astype(np.int64), arrays["label"]
        formats.require(bool(len(offset) > 1 and (np.diff(offset) > 0).all()), "its offsets do not ascend")
        formats.require(offset[0] == 0 and offset[-1] == len(jpeg), "its offsets do not cover the pictures")
        y = formats.validated_labels(label, 200, len(offset) - 1)
    encoded = [jpeg[a:b] for a, b in itertools.pairwise(offset)]
    return _decode_all(encoded, [f"{path} (picture {i})" for i in range(len(encoded))]), y
