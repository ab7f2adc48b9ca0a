"""FedProx: FedAvg whose local loss pulls the client towards the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020.
"""

from dataclasses import dataclass

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.settings import setting
from fedloom.core.tree import axpy, sub


@dataclass(frozen=True)
class FedProx(FedAvg):
    name = "fedprox"
    source = "Li et al., MLSys"
    paper = "Federated Optimization in Heterogeneous Networks"
    year = 2020

    mu: float = setting(0.001, "mu, strength of the proximal term", low=0)

    def step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        pull = sub(w.params, down["w"])  # gradient of ||w_i - w^t||^2 / 2
        return {"w": task.step(w, axpy(self.mu, pull, g))}
