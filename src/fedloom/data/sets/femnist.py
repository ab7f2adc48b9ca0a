"""FEMNIST: handwritten digits and letters, 28x28. A client is a writer."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import decode_image, map_in_threads, readable, require, validated_labels

TABLE = "train-00000-of-00001.parquet"
LAYOUTS = {
    "parquet": (TABLE,),
    "leaf": ("train/*.json", "test/*.json"),
    "leaf, not split": ("all_data/*.json",),
}


@dataclass(frozen=True)
class Femnist(Dataset):
    """Classification of handwritten digits and letters; a client is a writer."""

    name = "femnist"
    about = "LEAF's FEMNIST, 28x28 handwritten digits and letters; a client is a writer"
    size = "about 815,000 samples, 62 classes, 3,597 writers"
    model = "cnn4"
    partition = "natural"
    licence = "BSD 2-clause; NIST's Special Database 19 is in the public domain"
    sources = (Source(TABLE, (f"https://huggingface.co/datasets/flwrlabs/femnist/resolve/main/data/{TABLE}",)),)
    clients_setting = "writers"
    usual = {"lr": 0.005, "rounds": 100}

    writers: int | None = setting(20, "number of writers, those with most samples (none: all)", low=1)

    def natural_clients(self) -> int:
        """The number of writers."""
        return self.writers or 3597

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read the images of the writers with most samples. LEAF's test images are the official test set."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "parquet":
            writers = _read_parquet(folder / TABLE, self.writers)
        else:
            writers = _read_leaf(folder, layout, self.writers)
        ends = np.cumsum([len(y) for _, y, _ in writers])
        x, y, is_test = (np.concatenate(arrays) for arrays in zip(*writers, strict=True))
        test = np.flatnonzero(is_test)
        rows = tuple(np.split(np.arange(len(y)), ends[:-1]))
        return RawDataset(x[:, None], y, 62, official_test=test if len(test) else None, natural=rows)


Writer = tuple[np.ndarray, np.ndarray, np.ndarray]  # images, labels, whether they are for testing


def _largest(counts: Counter[str], writers: int | None) -> list[str]:
    """The writers with most samples, given the number of each (ties in alphabetical order)."""
    return sorted(counts, key=lambda name: (-counts[name], name))[:writers]


def _read_leaf(folder: Path, layout: str, writers: int | None) -> list[Writer]:
    """Read the files that LEAF's preprocess.sh writes: JSON with many writers each, pixels as x/255."""
    parts: dict[str, list[Writer]] = {}
    for pattern in LAYOUTS[layout]:
        for path in sorted(folder.glob(pattern)):
            with readable(path, "a file of LEAF's"):
                users = json.loads(path.read_text(encoding="utf-8"))["user_data"]
                for name, data in users.items():
                    if data["y"]:
                        parts.setdefault(name, []).append(_read_writer(name, data, pattern.startswith("test")))
    if not parts:
        raise UserError(f"The files in {folder} have no writers; run LEAF's preprocess.sh again.")
    counts = Counter({name: sum(len(y) for _, y, _ in of_writer) for name, of_writer in parts.items()})
    merged = (zip(*parts[name], strict=True) for name in _largest(counts, writers))
    return [(np.concatenate(x), np.concatenate(y), np.concatenate(test)) for x, y, test in merged]


def _read_writer(name: str, data: dict[str, list], test: bool) -> Writer:
    """The samples of one writer in a file of LEAF's."""
    x = np.rint(np.array(data["x"], dtype=np.float64) * 255)
    y = np.array(data["y"])
    require(x.shape == (len(y), 784), f"writer {name} has {x.shape} pixels of {len(y)} pictures")
    require(bool(x.min() >= 0 and x.max() <= 255), f"a pixel of writer {name} is not between 0 and 1")
    return x.astype(np.uint8).reshape(-1, 28, 28), validated_labels(y, 62, len(y)), np.full(len(y), test)


def _read_parquet(path: Path, writers: int | None) -> list[Writer]:
    """Read Flower's copy: a table with a PNG file, a writer and a class for each sample."""
    with readable(path, "Flower's table of FEMNIST"):
        try:
            writer_ids = pq.read_table(path, columns=["writer_id"])["writer_id"].to_pylist()
            names = _largest(Counter(writer_ids), writers)
            columns = ["image", "writer_id", "character"]
            table = pq.read_table(path, columns=columns, filters=[("writer_id", "in", names)])
        except pa.ArrowException as error:
            raise ValueError(str(error)) from error
        x = np.stack(map_in_threads(_decode_character, (image["bytes"] for image in table["image"].to_pylist())))
        y = validated_labels(table["character"].to_numpy(), 62, len(x))
        writer_ids = np.array(table["writer_id"].to_pylist())
    masks = (writer_ids == name for name in names)
    return [(x[mask], y[mask], np.zeros(mask.sum(), bool)) for mask in masks]


def _decode_character(raw: bytes) -> np.ndarray:
    """The pixels of one image, [28, 28]."""
    pixels = decode_image(raw, "L")
    require(pixels.shape == (28, 28), f"a picture has {pixels.shape} pixels")
    return pixels
