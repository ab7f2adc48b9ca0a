"""Fashion-MNIST: 28x28 grey images of clothes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.errors import UserError
from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import read_idx

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
LAYOUTS = {"gzip": tuple(f"{name}.gz" for name in FILES), "plain": FILES}
URLS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)


@dataclass(frozen=True)
class FashionMnist(Dataset):
    """Classification of images of clothes."""

    name = "fmnist"
    about = "Fashion-MNIST, 28x28 grey pictures of clothes"
    size = "70,000 samples, 10 classes"
    model = "cnn4"
    class_names = (
        "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    )  # fmt: skip
    licence = "MIT"
    sources = tuple(Source(f"{name}.gz", tuple(url + f"{name}.gz" for url in URLS)) for name in FILES)
    debian = ("dataset-fashion-mnist", Path("/usr/share/datasets/fashion-mnist"))
    usual = {"lr": 0.005, "rounds": 100}

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read all images; the published test images are the official test set."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        parts = [read_idx(folder / name) for name in LAYOUTS[layout]]
        for images, labels in (parts[:2], parts[2:]):
            n = len(labels)
            if images.shape != (n, 28, 28) or labels.shape != (n,) or n == 0 or labels.max() > 9:
                raise UserError(
                    f"The files in {folder} are not Fashion-MNIST: {images.shape} images, {labels.shape} labels."
                )
        x, y = np.concatenate([parts[0], parts[2]]), np.concatenate([parts[1], parts[3]])
        test = np.arange(len(parts[0]), len(x))
        return RawDataset(x[:, None], y.astype(np.int64), classes=10, official_test=test, mean=(0.5,), std=(0.5,))
