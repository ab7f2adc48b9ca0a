"""Synthetic data: Gaussian inputs, and labels from a linear model, which clients share or have one each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.keys import rng, stream
from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset
from fedloom.data.limits import memory_limit

MIN_SAMPLES = 50  # of a client (fedprox)
LARGEST_SPREAD = 1e6  # of clients; inputs of such a size cannot be learnt from any more
SERVER_SHARE = 0.2  # of a client's samples, the last ones, goes to the server


class Client(NamedTuple):
    """The samples of a client, and the linear model that labels them."""

    x: np.ndarray
    y: np.ndarray
    w: np.ndarray  # y is argmax(x w + c)
    c: np.ndarray


@dataclass(frozen=True)
class Synthetic(Dataset):
    """Generated data, as in the experiments of PAGE or FedProx."""

    name = "synthetic"
    about = "generated; variant page (one labelling model for all) or fedprox, Synthetic(alpha, beta)"
    size = "page: 375 samples per client, 30 classes; fedprox: sizes vary, 10 classes"
    model = "logreg"
    partition = "natural"
    built_in = True
    has_server_data = True
    licence = "none needed"
    usual = {"lr": 0.1, "rounds": 50}

    variant: Literal["page", "fedprox"] = setting("page", "page: one model for all clients; fedprox: one for each")
    alpha: float = setting(
        0.0, "a, how much the clients' labelling models differ (fedprox)", low=0, high=LARGEST_SPREAD
    )
    beta: float = setting(1.0, "b, how much the clients' inputs differ", low=0, high=LARGEST_SPREAD)
    per_client: int = setting(375, "samples per client (page)", low=5)
    theta: float = setting(0.0, "standard deviation of the logarithm of a client's size (page)", low=0, high=20)
    iid_x: bool = setting(False, "the same input distribution at all clients")

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of inputs and of classes."""
        return (30, 30) if self.variant == "page" else (60, 10)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Generate the samples of all clients."""
        self._check_memory(clients * (self.per_client if self.variant == "page" else MIN_SAMPLES))
        generated = [self.client(i, seed) for i in range(clients)]
        ends = np.cumsum([len(c.y) for c in generated])
        local, server = [], []
        for client, end in zip(generated, ends, strict=True):
            rows = np.arange(end - len(client.y), end)
            count = round(len(rows) * (1 - SERVER_SHARE))
            local.append(rows[:count])
            server.append(rows[count:])
        x = np.concatenate([c.x for c in generated]).astype(np.float32)
        y = np.concatenate([c.y for c in generated])
        return RawDataset(x, y, self.shape[1], natural=tuple(local), server=np.concatenate(server), ordered=True)

    def client(self, i: int, seed: int) -> Client:
        """Generate the samples of client i; they do not depend on the number of clients."""
        dim, classes = self.shape
        draw = rng("partition", seed, stream("synthetic"), i)
        if self.variant == "page":
            n = np.floor(draw.lognormal(np.log(self.per_client + 0.001), self.theta))
        else:
            n = np.floor(draw.lognormal(4, 2)) + MIN_SAMPLES
        self._check_memory(n)
        u, b = draw.normal(0, self.alpha), draw.normal(0, self.beta)
        centre = np.zeros(dim) if self.iid_x else draw.normal(b, 1, dim)
        if self.variant == "page":
            shared = rng("partition", seed, stream("synthetic-model"))
            w, c = shared.normal(0, 1, (dim, classes)), shared.normal(0, 1, classes)
        else:
            w, c = draw.normal(u, 1, (dim, classes)), draw.normal(u, 1, classes)
        std = np.arange(1, dim + 1) ** -0.6  # square root of Sigma = diag(j^-1.2)
        x = centre + draw.normal(0, 1, (int(n), dim)) * std
        return Client(x, np.argmax(x @ w + c, axis=1), w, c)

    def _check_memory(self, samples: float) -> None:
        """Raise UserError if so many samples, in float64 and then in float32, take over half of the free memory."""
        if samples * self.shape[0] * (8 + 4) > memory_limit():
            raise UserError(
                f"{samples:g} synthetic samples do not fit memory; use fewer clients, or smaller per_client or theta."
            )
