"""Diabetes: how far the disease of a patient has progressed after a year, from ten measurements. Comes with
scikit-learn.

Efron, Hastie, Johnstone, Tibshirani. Least Angle Regression. Annals of Statistics 32(2), 2004.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.federation import Scaling
from fedloom.core.preprocessing import Column, Preprocessing
from fedloom.data.dataset import Dataset, RawDataset


@dataclass(frozen=True)
class Diabetes(Dataset):
    """Regression on a small table of patients."""

    name = "diabetes"
    about = "progression of diabetes after a year, a number from 25 to 346; comes with scikit-learn"
    size = "442 samples, a number as target"
    model = "mlp"
    partition = "dirichlet_class"
    built_in = True
    licence = "free to use"
    usual = {"lr": 0.02, "rounds": 50, "clients": 8, "metric": "rmse", "partition.beta": 1.0}

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read the table from scikit-learn; its columns are scaled by the training samples."""
        from sklearn.datasets import load_diabetes

        table = load_diabetes(scaled=False)
        x, y = np.asarray(table.data, np.float64), np.asarray(table.target, np.float64)
        names = tuple(map(str, table.feature_names))
        columns = tuple(Column(name) for name in names)
        preprocessing = Preprocessing("table", x.shape[1:], "float64", ("progression",), columns=columns)
        scaling = Scaling(np.ones(x.shape[1], dtype=bool))
        return RawDataset(
            x, y, 1, target="number", class_names=("progression",), scaling=scaling, preprocessing=preprocessing
        )
