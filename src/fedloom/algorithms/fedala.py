"""FedALA: before it trains, a client mixes the global model into its own, by weights that it learns for every element.

Zhang, Hua, Wang, Song, Xue, Ma, Guan. FedALA: Adaptive Local Aggregation for Personalized Federated Learning.
AAAI 2023.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.autodiff import grad
from fedloom.core.settings import setting
from fedloom.core.tree import leaves, where

LOSSES, SETTLED = 10, 0.1  # the weights are learnt when so many losses in a row have a smaller standard deviation


@dataclass(frozen=True)
class FedALA(Algorithm):
    name = "fedala"
    source = "Zhang et al., AAAI"
    paper = "FedALA: Adaptive Local Aggregation for Personalized Federated Learning"
    year = 2023
    shared = "model w"
    private = "weights A_i (and theta_i, its last model, as sent)"
    uploads = {"w": "the trained model theta_i"}
    global_slot = "theta"
    averages = True

    p: int = setting(1, "number of layers, from the last, that are mixed", low=1)
    s: float = setting(80.0, "percentage of the samples on which A_i is learnt", above=0, high=100)
    eta_A: float = setting(1.0, "eta_A, step size of A_i", low=0)
    start_epochs: int = setting(50, "most epochs on A_i when it is learnt for the first time", low=1)

    def names(self, task):
        return [name for layer in task.layers[-self.p :] for name in layer]

    def init_server(self, task, key):
        return {"w": task.init(key)}

    def init_client(self, task, key, key_i):
        theta = task.init(key)
        A = {name: torch.ones_like(theta[name]) for name in self.names(task)}
        return {"theta": theta, "A": A, "learnt": torch.zeros_like(key_i, dtype=torch.bool)}

    def begin(self, task, down, state, info):
        kept = {name: state["theta"][name] for name in self.names(task)}
        mixed = {**down["w"], **mix(kept, down["w"], state["A"])}
        losses = torch.full((LOSSES,), torch.nan, dtype=task.dtype, device=info.n.device)
        theta = task.slot(where(info.first, down["w"], mixed))  # a client that never trained has nothing to mix
        return {"theta": theta, "kept": kept, "A": state["A"], "learnt": state["learnt"], "losses": losses}

    def phases(self, task):
        return [*self.adapt(task), Phase(self.step, task.epochs)]

    def adapt(self, task):
        return [Phase(self.learn, self.epochs, select=self.window, until=self.settled, shuffle=False)]

    def epochs(self, task, work, info):
        return torch.where(info.first, 0, torch.where(work["learnt"], 1, self.start_epochs))

    def window(self, n, draw):
        size = max(1, int(self.s / 100 * n + 1e-9))
        start = int(draw.rng("ala", draw.i, draw.t).integers(0, n - size + 1))
        return np.arange(start, start + size)

    def settled(self, work):
        return work["losses"].std(correction=0) < SETTLED  # false until there are enough losses

    def learn(self, task, work, batch, down, info):
        theta, kept, w = work["theta"], work["kept"], down["w"]

        def loss(mixed):
            found = task.loss(task.forward(theta._replace(params={**theta.params, **mixed}), batch), batch)
            return found, found

        g, found = grad(loss, {name: theta.params[name] for name in kept})
        A = {k: (A - self.eta_A * g[k] * (w[k] - kept[k])).clamp(0, 1) for k, A in work["A"].items()}
        losses = torch.where(batch.last, torch.cat([work["losses"][1:], found[None]]), work["losses"])
        theta = theta._replace(params={**theta.params, **mix(kept, w, A)})
        return {**work, "theta": theta, "A": A, "losses": losses}

    def step(self, task, work, batch, down, info):
        g, theta = task.grad(work["theta"], batch)
        return {**work, "theta": task.step(theta, g)}

    def report(self, task, work, down, info):
        return {"A": torch.cat([v.flatten() for v in leaves(work["A"])]).mean()}  # 1: all from the global model

    def finish(self, task, work, down, state, info):
        theta = work["theta"].params
        return {"theta": theta, "A": work["A"], "learnt": ~info.first}, {"w": theta}

    def aggregate(self, task, server, up, info, t, key):
        return {"w": task.average(up["w"], info.n)}

    def model(self, task, work, down, info):
        return work["theta"]

    def global_model(self, task, server):
        return server["w"]


def mix(theta, w, A):
    """theta + (w - theta) * A, of the parameters that A has."""
    return {name: theta[name] + (w[name] - theta[name]) * a for name, a in A.items()}
