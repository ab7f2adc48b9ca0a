"""FedPHP: every client keeps a moving average of its trained models, which it uses and hands on to its next training.

Li, Zhan, Shao, Li, Song. FedPHP: Federated Personalization with Inherited Private Models. ECML PKDD 2021.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.parts.distances import batch_mean
from fedloom.core.algorithm import Phase
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.core.tree import tree_map, where

WIDTHS = (10, 15, 20, 50)  # variances of the Gaussian kernels of the MMD


@dataclass(frozen=True)
class FedPHP(FedAvg):
    name = "fedphp"
    source = "Li et al., ECML PKDD"
    paper = "FedPHP: Federated Personalization with Inherited Private Models"
    year = 2021
    private = "inherited model q_i, number of participations c_i"
    pre_is_global = False

    lam: float = setting(0.01, "lambda, share of the transfer loss in the whole", low=0, high=0.9999)
    transfer: Literal["mmd", "kd"] = setting("mmd", "loss between w_i and q_i: MMD of features, or distillation")
    mu_max: float = setting(0.9, "mu, share of the old q_i in the new one, in the end", low=0, high=1)
    temperature: float = setting(4.0, "of the softened logits of q_i (kd)", above=0)

    def check(self, task):
        if self.transfer == "kd" and task.data.kind != "classes":
            raise UserError(f"fedphp's transfer=kd is for classes, not for {task.data.kind}; use transfer=mmd.")

    def depends_on_rounds(self, task):
        return "mu, which grows up to the last round"

    def init_client(self, task, key, key_i):
        return {"q": task.init(key), "c": torch.zeros_like(key_i)}

    def begin(self, task, down, state, info):
        return {"w": task.slot(down["w"]), "q": task.slot(state["q"]), "c": state["c"]}

    def phases(self, task):
        return [Phase(self.step, task.epochs), Phase(self.step, 0, enter=self.inherit)]

    def step(self, task, work, batch, down, info):
        q = task.predict(work["q"], batch.x)

        def loss(out, batch):
            return (1 - self.lam) * task.loss(out, batch) + self.lam * self.difference(out, q, batch)

        g, w = task.grad(work["w"], batch, loss=loss)
        return {**work, "w": task.step(w, g)}

    def difference(self, out, q, batch):
        if self.transfer == "kd":
            target = F.softmax(q.logits / self.temperature, -1)
            return batch_mean(-(target * F.log_softmax(out.logits, -1)).sum(-1), batch)
        return mmd(*(v.features.flatten(batch.weight.dim()).flatten(0, -2) for v in (out, q)), batch.weight.flatten())

    def inherit(self, task, work, down, info):
        """q_i = mu q_i + (1 - mu) w_i with mu growing with the participations; running statistics likewise."""
        share = task.participation if task.participation <= 1 else task.participation / task.clients  # rho
        expected = max(1, math.floor(share * task.rounds + 1e-9))
        mu = self.mu_max * (work["c"].to(task.dtype) / expected).clamp(max=1)
        return {**work, "q": tree_map(lambda q, w: mu * q + (1 - mu) * w, work["q"], work["w"]), "c": work["c"] + 1}

    def finish(self, task, work, down, state, info):
        return {"q": work["q"].params, "c": work["c"]}, {"w": work["w"].params}

    def model(self, task, work, down, info):
        return where(info.first, work["w"], work["q"])  # a client that never trained uses the global model


def mmd(a, b, weight):
    """Maximum mean discrepancy: means over all pairs of k(a, a) + k(b, b) - 2 k(a, b), as one quadratic form."""
    points, sign = torch.cat([a, b]), torch.cat([weight, -weight]) / weight.sum()
    squares = (points**2).sum(-1)
    gaps = squares[:, None] + squares - 2 * points @ points.T
    kernel = torch.stack([torch.exp(-gaps / (2 * width)) for width in WIDTHS]).sum(0)
    return sign @ kernel @ sign
