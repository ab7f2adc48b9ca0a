"""FedRep: FedPer in two phases; first the private head on the frozen body, then the shared body under the frozen head.

Collins, Hassani, Mokhtari, Shakkottai. Exploiting Shared Representations for Personalized Federated Learning.
ICML 2021.
"""

from dataclasses import dataclass
from typing import Literal

from fedloom.algorithms.fedper import FedPer
from fedloom.core.algorithm import Phase
from fedloom.core.settings import setting


@dataclass(frozen=True)
class FedRep(FedPer):
    name = "fedrep"
    source = "Collins et al., ICML"
    paper = "Exploiting Shared Representations for Personalized Federated Learning"
    year = 2021

    head_epochs: int = setting(1, "E_h, epochs on the head", low=0)
    body_epochs: int = setting(1, "E_b, epochs on the body", low=0)
    average: Literal["samples", "clients"] = setting("samples", "weights of the average: n_i, or all equal (PLGU)")

    def phases(self, task):
        return [Phase(self.head_step, self.head_epochs), Phase(self.body_step, self.body_epochs)]

    def head_step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch, only=task.network.head)
        return {**work, "w": task.step(w, g)}

    def body_step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch, only=task.network.body)
        return {**work, "w": task.step(w, g)}

    def aggregate(self, task, server, up, info, t, key):
        return {"phi": task.average(up["phi"], info.n if self.average == "samples" else None)}
