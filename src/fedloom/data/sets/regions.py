"""Regions: a generated number to predict, from the same inputs in all regions, but with other coefficients in each."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.keys import rng, stream
from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset
from fedloom.data.limits import memory_limit

MEAN, UNIT = 100.0, 20.0  # of targets


@dataclass(frozen=True)
class Regions(Dataset):
    """Linear regression with coefficients that regions have partly in common."""

    name = "regions"
    about = "generated numbers to predict; every client has coefficients of its own"
    size = "60 samples per client, a number as target"
    model = "mlp"
    partition = "natural"
    built_in = True
    licence = "none needed"
    usual = {"lr": 0.05, "rounds": 50, "metric": "rmse"}

    per_client: int = setting(60, "samples per client", low=5)
    features: int = setting(16, "inputs", low=1)
    spread: float = setting(0.4, "standard deviation of a region's own part of a coefficient", low=0, high=1e6)
    noise: float = setting(0.3, "standard deviation of the noise", low=0, high=1e6)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Generate the samples of all clients: y = 100 + 20 (x (a + spread b_i) + noise)."""
        if clients * self.per_client * self.features * (8 + 4) > memory_limit():
            raise UserError("These samples do not fit memory; use fewer clients, or smaller per_client or features.")
        both = [self._client(i, seed) for i in range(clients)]
        x, y = (np.concatenate(parts) for parts in zip(*both, strict=True))
        rows = np.arange(len(y)).reshape(clients, -1)
        return RawDataset(
            x.astype(np.float32), y, 1, natural=tuple(rows), target="number", class_names=("y",), ordered=True
        )

    def _client(self, i: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of client i; they do not depend on the number of clients."""
        shared, draw = (rng("partition", seed, stream("regions"), k) for k in (0, i + 1))
        coefficients = shared.normal(size=self.features) + self.spread * draw.normal(size=self.features)
        x = draw.normal(size=(self.per_client, self.features))
        return x, MEAN + UNIT * (x @ coefficients + self.noise * draw.normal(size=self.per_client))
