"""Handwritten digits, 8x8 pixels. They come with scikit-learn, so there is nothing to download."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.data.dataset import Dataset, RawDataset


@dataclass(frozen=True)
class Digits(Dataset):
    """Classification of handwritten digits."""

    name = "digits"
    about = "8x8 handwritten digits, shipped with scikit-learn"
    size = "1,797 samples, 10 classes"
    model = "mlp"
    built_in = True
    licence = "CC BY 4.0 (UCI)"
    usual = {"lr": 0.05, "rounds": 50}

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Load the images from scikit-learn, scaled to -1..1."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x = (bunch.images[:, None] / 8.0 - 1.0).astype(np.float32)  # from 0..16
        return RawDataset(x, bunch.target.astype(np.int64), classes=10)
