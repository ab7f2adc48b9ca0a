"""MNIST's training digits with their writers, which QMNIST recovered. A client is a writer."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import open_npz, read_idx, readable, require, rows_by_client, validated_labels
from fedloom.data.limits import read_blocks

IMAGES, WRITERS = "train-images-idx3-ubyte.gz", "qmnist-train-labels-idx2-int.gz"
LAYOUTS = {"published": (IMAGES, WRITERS), "compact": ("images.npy.xz", "meta.npz")}


@dataclass(frozen=True)
class MnistByWriter(Dataset):
    """Classification of handwritten digits; a client is a writer."""

    name = "mnist-by-writer"
    about = "MNIST's training digits, 28x28; a client is a writer"
    size = "60,000 samples, 10 classes, 539 writers"
    model = "cnn4"
    partition = "natural"
    aliases = ("mnist_by_writer",)
    licence = "MNIST: CC BY-SA 3.0; QMNIST: BSD"
    sources = (
        Source(
            IMAGES,
            (
                f"https://ossci-datasets.s3.amazonaws.com/mnist/{IMAGES}",
                f"https://storage.googleapis.com/cvdf-datasets/mnist/{IMAGES}",
            ),
        ),
        Source(WRITERS, (f"https://raw.githubusercontent.com/facebookresearch/qmnist/master/{WRITERS}",)),
    )
    usual = {"lr": 0.005, "rounds": 100}

    def natural_clients(self) -> int:
        """The number of writers."""
        return 539

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read all digits and their writers."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        x, y, writer = (_read_published if layout == "published" else _read_compact)(folder)
        notes = () if len(y) == 60_000 else (f"mnist-by-writer: {len(y):,} of 60,000 digits",)
        return RawDataset(x[:, None], y, 10, natural=rows_by_client(writer), mean=(0.5,), std=(0.5,), notes=notes)


Digits = tuple[np.ndarray, np.ndarray, np.ndarray]  # images, labels, writers


def _read_published(folder: Path) -> Digits:
    """Read MNIST's images and QMNIST's table, a row for each image: digit, part of NIST's collection, writer, ..."""
    x, table = read_idx(folder / IMAGES), read_idx(folder / WRITERS)
    with readable(folder / WRITERS, "QMNIST's table of MNIST's training digits"):
        require(table.ndim == 2 and table.shape[1] == 8, f"its shape is {table.shape}")
        y = validated_labels(table[:, 0], 10, len(table))
    with readable(folder / IMAGES, "MNIST's training images"):
        require(x.shape == (len(y), 28, 28), f"{x.shape} pictures of {len(y)} rows in {WRITERS}")
    order = np.argsort(table[:, 2], kind="stable")  # by writer, as in the compact layout
    return x[order], y[order], table[order, 2]


def _read_compact(folder: Path) -> Digits:
    """Read FedLoom's compact layout."""
    path = folder / "images.npy.xz"
    with readable(path, "in FedLoom's compact layout"), io.BytesIO(b"".join(read_blocks(path))) as file:
        x = np.lib.format.read_array(file, allow_pickle=False)
        require(not file.read(1), "there is more behind the array")
        require(x.dtype == np.uint8 and x.shape[1:] == (28, 28), f"{x.dtype} {x.shape} are no digits")
    with open_npz(folder / "meta.npz") as arrays:
        y, writer = validated_labels(arrays["label"], 10, len(x)), arrays["writer"]
        require(len(writer) == len(x), f"{len(writer)} writers of {len(x)} digits")
    return x, y, writer
