"""FedAvg-FT: FedAvg whose global model every client fine-tunes before use; the copy is thrown away."""

from dataclasses import dataclass
from typing import Literal

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.algorithm import Phase
from fedloom.core.settings import setting


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    name = "fedavg-ft"
    source = "control"
    paper = ""
    year = 0
    pre_is_global = False

    ft_epochs: int = setting(5, "epochs of fine-tuning before evaluation", low=0)
    ft_scope: Literal["all", "head"] = setting("all", "parameters that are fine-tuned")

    def adapt(self, task):
        return [Phase(self.fine_tune, self.ft_epochs)]

    def fine_tune(self, task, work, batch, down, info):
        only = task.network.head if self.ft_scope == "head" else None
        g, w = task.grad(work["w"], batch, only=only)
        return {"w": task.step(w, g)}
