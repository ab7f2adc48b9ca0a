"""FedAvg as one would write it by hand: `nn.Module`, `torch.optim.SGD`, one client after another, data in memory."""

import copy
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from machine import autocast

from fedloom.core.federation import Federation

EVALUATE = 512  # samples at once


class PlainFedAvg:
    """A round is `train` for all clients, in one go or in several, then `average`."""

    def __init__(
        self, module: torch.nn.Module, data: Federation, lr: float, batch: int, dtype: str = "float32"
    ) -> None:
        self.module, self.lr, self.batch, self.dtype = module.to(data.device, data.dtype), lr, batch, dtype
        self.x, self.y, self.splits, self.device = data.prepare(data.x), data.y, data.splits, data.device
        self._begin()

    def _begin(self) -> None:
        self.start = copy.deepcopy(self.module.state_dict())
        self.sums = {k: torch.zeros_like(v) for k, v in self.start.items()}
        self.samples = 0

    def steps(self, clients: Iterable[int]) -> int:
        return sum(-(-int(self.splits["train"].sizes[i]) // self.batch) for i in clients)

    def train(self, clients: Iterable[int]) -> None:
        for i in clients:
            self.module.load_state_dict(self.start)
            self.module.train()
            optimizer = torch.optim.SGD(self.module.parameters(), lr=self.lr)
            rows = self.splits["train"][i]
            rows = rows[torch.randperm(len(rows), device=self.device)]
            for batch in torch.split(rows, self.batch):
                optimizer.zero_grad()
                with autocast(self.dtype, self.device):
                    loss = F.cross_entropy(self.module(self.x[batch]), self.y[batch])
                loss.backward()
                optimizer.step()
            for k, v in self.module.state_dict().items():
                self.sums[k] += v * len(rows)
            self.samples += len(rows)

    def average(self) -> None:
        self.module.load_state_dict({k: v / self.samples for k, v in self.sums.items()})
        self._begin()

    @torch.no_grad()
    def evaluate(self, clients: Iterable[int]) -> list[tuple[float, float]]:
        """Test accuracy and training loss of the global model, by client."""
        self.module.load_state_dict(self.start)
        self.module.eval()
        found = []
        for i in clients:
            correct = loss = torch.zeros((), device=self.device)
            for rows in torch.split(self.splits["test"][i], EVALUATE):
                with autocast(self.dtype, self.device):
                    correct = correct + (self.module(self.x[rows]).argmax(1) == self.y[rows]).sum()
            for rows in torch.split(self.splits["train"][i], EVALUATE):
                with autocast(self.dtype, self.device):
                    loss = loss + F.cross_entropy(self.module(self.x[rows]), self.y[rows], reduction="sum")
            sizes = (max(1, int(self.splits[split].sizes[i])) for split in ("test", "train"))
            found.append((float(correct) / next(sizes), float(loss) / next(sizes)))
        return found
