"""Tiny-ImageNet-200: 64x64 photographs; the published validation images are the test part, as in all papers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import (
    NORMALISE,
    Part,
    checked_labels,
    joined,
    need,
    npz,
    picture,
    pictures,
    reading,
    together,
)

INSIDE = "tiny-imagenet-200"
FILES = ("wnids.txt", "train", "val/val_annotations.txt", "val/images")
LAYOUTS = {
    "published": tuple(f"{INSIDE}/{name}" for name in FILES),
    "inside": FILES,
    "compact": ("train.npz", "val.npz"),
}
NORMAL = {"half": ((0.5,), (0.5,)), "published": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
SHAPE = (64, 64, 3)


@dataclass(frozen=True)
class TinyImageNet(Dataset):
    name = "tiny"
    about = "Tiny-ImageNet-200, 64x64 photographs"
    size = "110,000 samples, 200 classes"
    model = "cnn4"
    aliases = ("tiny_imagenet", INSIDE)
    licence = "as ImageNet: non-commercial research and education only"
    sources = (Source("tiny-imagenet-200.zip", ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",), unpack=True),)
    usual = {"lr": 0.005, "rounds": 100}

    normalise: Literal["half", "published"] = setting("half", NORMALISE)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "compact":
            parts = [_compact(folder / name) for name in LAYOUTS[layout]]
            found, test = joined(parts), len(parts[1][1])
        else:
            found, test = _published(folder / INSIDE if layout == "published" else folder)
        return pictures(self.name, found, test, 200, (100_000, 10_000), NORMAL[self.normalise])


def _published(folder: Path) -> tuple[Part, int]:
    """train/WNID/images/*.JPEG, and val/images/*.JPEG with their WordNet ids in val_annotations.txt; a label is the
    place of the id among all, sorted."""
    with reading(folder / "wnids.txt", "a list of 200 WordNet ids"):
        ids = sorted((folder / "wnids.txt").read_text().split())
        need(len(set(ids)) == 200, f"{len(set(ids))} ids")
    label = {wnid: c for c, wnid in enumerate(ids)}
    train: list[tuple[Path, int]] = []
    for wnid in ids:
        files = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not files:
            raise UserError(f"{folder / 'train' / wnid / 'images'} has no pictures (*.JPEG); fetch the data set again.")
        train += [(file, label[wnid]) for file in files]
    notes = folder / "val" / "val_annotations.txt"
    test: list[tuple[Path, int]] = []
    with reading(notes, "a table of file names and WordNet ids"):
        for number, line in enumerate(notes.read_text().splitlines(), 1):
            cells = line.split("\t")
            need(len(cells) > 1 and cells[1] in label, f"line {number} names no class")
            need(Path(cells[0]).name == cells[0], f"line {number} names no file")
            test.append((folder / "val" / "images" / cells[0], label[cells[1]]))
        need(bool(test), "it is empty")
    paths, labels = zip(*train, *test, strict=True)
    return (_decoded(paths, paths), np.array(labels, dtype=np.int64)), len(test)


def _decoded(raws: Sequence[Path | np.ndarray], names: Sequence[Path | str]) -> np.ndarray:
    """Pictures in the order in which they are given."""
    x = np.empty((len(raws), 3, 64, 64), np.uint8)

    def decode(i: int) -> None:
        with reading(Path(names[i]), "a 64x64 picture"):
            pixels = picture(raws[i])
            need(pixels.shape == SHAPE, f"{pixels.shape[1]}x{pixels.shape[0]} pixels")
            x[i] = pixels.transpose(2, 0, 1)

    together(decode, range(len(raws)))
    return x


def _compact(path: Path) -> Part:
    """JPEG files end to end, and where each begins."""
    with npz(path) as arrays:
        jpeg, offset, label = arrays["jpeg"], arrays["offset"].astype(np.int64), arrays["label"]
        need(bool(len(offset) > 1 and (np.diff(offset) > 0).all()), "its offsets do not ascend")
        need(offset[0] == 0 and offset[-1] == len(jpeg), "its offsets do not cover the pictures")
        y = checked_labels(label, 200, len(offset) - 1)
    raws = [jpeg[a:b] for a, b in itertools.pairwise(offset)]
    return _decoded(raws, [f"{path} (picture {i})" for i in range(len(raws))]), y
