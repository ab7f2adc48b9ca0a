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
from fedloom.data.formats import checked_labels, need, picture, reading, together

TABLE = "train-00000-of-00001.parquet"
LAYOUTS = {
    "parquet": (TABLE,),
    "leaf": ("train/*.json", "test/*.json"),
    "leaf, not split": ("all_data/*.json",),
}


@dataclass(frozen=True)
class Femnist(Dataset):
    name = "femnist"
    about = "LEAF's FEMNIST, 28x28 handwritten digits and letters; a client is a writer"
    size = "about 815,000 samples, 62 classes, 3,597 writers"
    model = "cnn4"
    partition = "natural"
    licence = "BSD 2-clause; NIST's Special Database 19 is in the public domain"
    sources = (Source(TABLE, (f"https://huggingface.co/datasets/flwrlabs/femnist/resolve/main/data/{TABLE}",)),)
    usual = {"lr": 0.005, "rounds": 100}

    writers: int | None = setting(20, "so many writers, those with most samples (none: all)", low=1)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        found = _table(folder / TABLE, self.writers) if layout == "parquet" else _leaf(folder, layout, self.writers)
        ends = np.cumsum([len(y) for _, y, _ in found])
        x, y = (np.concatenate([one[part] for one in found]) for part in (0, 1))
        test = np.flatnonzero(np.concatenate([one[2] for one in found]))
        rows = tuple(np.split(np.arange(len(y)), ends[:-1]))
        return RawDataset(x[:, None], y, 62, official_test=test if len(test) else None, natural=rows)


Writer = tuple[np.ndarray, np.ndarray, np.ndarray]  # pictures, labels, whether for testing


def _most(counts: Counter[str], writers: int | None) -> list[str]:
    """Those with most samples; of equals the first in the alphabet."""
    return sorted(counts, key=lambda name: (-counts[name], name))[:writers]


def _leaf(folder: Path, layout: str, writers: int | None) -> list[Writer]:
    """What LEAF's preprocess.sh leaves in its folder data: pixels as x/255, in files of many writers each."""
    parts: dict[str, list[Writer]] = {}
    for pattern in LAYOUTS[layout]:
        for path in sorted(folder.glob(pattern)):
            with reading(path, "a file of LEAF's"):
                users = json.loads(path.read_text(encoding="utf-8"))["user_data"]
                for name, data in users.items():
                    if data["y"]:
                        parts.setdefault(name, []).append(_writer(name, data, pattern.startswith("test")))
    if not parts:
        raise UserError(f"The files in {folder} have no writers; run LEAF's preprocess.sh again.")
    counts = Counter({name: sum(len(y) for _, y, _ in found) for name, found in parts.items()})
    joined = (zip(*parts[name], strict=True) for name in _most(counts, writers))
    return [(np.concatenate(x), np.concatenate(y), np.concatenate(test)) for x, y, test in joined]


def _writer(name: str, data: dict[str, list], test: bool) -> Writer:
    x = np.rint(np.array(data["x"], dtype=np.float64) * 255)
    y = np.array(data["y"])
    need(x.shape == (len(y), 784), f"writer {name} has {x.shape} pixels of {len(y)} pictures")
    need(bool(x.min() >= 0 and x.max() <= 255), f"a pixel of writer {name} is not between 0 and 1")
    return x.astype(np.uint8).reshape(-1, 28, 28), checked_labels(y, 62, len(y)), np.full(len(y), test)


def _table(path: Path, writers: int | None) -> list[Writer]:
    """Flower's copy: a row for each sample with its picture as a PNG file, its writer and its class."""
    with reading(path, "Flower's table of FEMNIST"):
        try:
            owners = pq.read_table(path, columns=["writer_id"])["writer_id"].to_pylist()
            names = _most(Counter(owners), writers)
            columns = ["image", "writer_id", "character"]
            table = pq.read_table(path, columns=columns, filters=[("writer_id", "in", names)])
        except pa.ArrowException as error:
            raise ValueError(str(error)) from error
        x = np.stack(together(_letter, (image["bytes"] for image in table["image"].to_pylist())))
        y = checked_labels(table["character"].to_numpy(), 62, len(x))
        whose = np.array(table["writer_id"].to_pylist())
    return [(x[whose == name], y[whose == name], np.zeros((whose == name).sum(), bool)) for name in names]


def _letter(raw: bytes) -> np.ndarray:
    pixels = picture(raw, "L")
    need(pixels.shape == (28, 28), f"a picture has {pixels.shape} pixels")
    return pixels
