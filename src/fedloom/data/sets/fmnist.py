"""Fashion-MNIST: 28x28 grey pictures of clothes."""

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.errors import UserError
from fedloom.data.pool import Dataset, Pool, folders

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class FashionMnist(Dataset):
    name = "fmnist"
    about = "Fashion-MNIST, 28x28 grey pictures of clothes"
    size = "70,000 samples, 10 classes"
    model = "cnn4"
    usual = {"lr": 0.005, "rounds": 100}

    def load(self, data_dir: Path | None, clients: int, seed: int) -> Pool:
        looked = folders(self.name, data_dir) + ([DEBIAN] if data_dir is None else [])
        folder = next((f for f in looked if _find(f, FILES[0])), None)
        if folder is None:
            raise UserError(
                f"Fashion-MNIST was not found in {' or '.join(str(f) for f in looked)}; install Debian's package "
                f"'dataset-fashion-mnist', or give --data-dir a folder with {FILES[0]}.gz and the other three."
            )
        parts = [_read_idx(folder, name) for name in FILES]
        for images, labels in (parts[:2], parts[2:]):
            n = len(labels)
            if images.shape != (n, 28, 28) or labels.shape != (n,) or n == 0 or labels.max() > 9:
                raise UserError(
                    f"The files in {folder} are not Fashion-MNIST: {images.shape} images, {labels.shape} labels."
                )
        x, y = np.concatenate([parts[0], parts[2]]), np.concatenate([parts[1], parts[3]])
        test = np.arange(len(parts[0]), len(x))
        return Pool(x[:, None], y.astype(np.int64), classes=10, official_test=test, shift=(0.5,), spread=(0.5,))


def _find(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None)


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """The IDX format: two zero bytes, type 8 (unsigned byte), rank, sizes as big-endian integers, then the data."""
    path = _find(folder, name)
    if path is None:
        raise UserError(f"{folder} has no {name} or {name}.gz; Fashion-MNIST has four such files.")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, rank = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{rank}I", raw, 4)
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * rank)
        if zero != 0 or kind != 8 or rank == 0 or len(values) != math.prod(shape):
            raise ValueError("sizes do not match")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise UserError(f"{path} is damaged or not in IDX format ({error}); fetch it again.") from error
    return values.reshape(shape)
