"""PLGU-LF: the layers in which a client differs most from the federation stay personal, and the global model is trained
to be flat where clients disagree, so that it serves those who are far from the average.

Qu, Li, Han, Duan, Shen, Chen. How to Prevent the Poor Performance Clients for Personalized Federated Learning?
CVPR 2023. Algorithms 1 and 2.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from fedloom.algorithms.parts.lwsam import by_name, distances, largest, perturbation, scores
from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.settings import setting
from fedloom.core.tree import add, sub, where


@dataclass(frozen=True)
class PLGULF(Algorithm):
    name = "plgu-lf"
    source = "Qu et al., CVPR"
    paper = "How to Prevent the Poor Performance Clients for Personalized Federated Learning?"
    year = 2023
    shared = "model w"
    private = "model theta_i"
    uploads = {"delta": "the change of the model"}
    averages = True

    D: int | None = setting(None, "number of personal layers [5, or all but one where there are fewer]", low=0)
    rho: float = setting(0.05, "radius of the perturbation", low=0)
    p: float = setting(2.0, "order of its norm", above=1)
    scale: Literal["sum1", "mean1", "raw"] = setting(
        "sum1", "scores add up to 1, to the number of layers, or are raw distances"
    )
    perturb_set: Literal["all", "per", "uni"] = setting("all", "perturb all layers, the personal or the universal ones")
    eps_from: Literal["theta", "w"] = setting("theta", "perturb along the gradient at theta_i, or at w_i (one more)")
    grad_at: Literal["w", "theta"] = setting("w", "the perturbed gradient is taken at w_i, or at theta_i (Algorithm 1)")
    count: Literal["epochs", "steps"] = setting("epochs", "K (local_epochs) counts passes over the data, or batches")

    def init_server(self, task, key):
        return {"w": task.init(key)}

    def init_client(self, task, key, key_i):
        return {"theta": task.init(key)}

    def begin(self, task, down, state, info):
        xi = scores(distances(state["theta"], down["w"], task.layers), self.scale)
        personal = self.personal_layers(xi)
        mine = by_name(personal, task.layers)
        theta = {k: torch.where(mine[k], v, down["w"][k]) for k, v in state["theta"].items()}
        reach = {"all": xi, "per": xi * personal, "uni": xi * ~personal}[self.perturb_set]
        return {"theta": task.slot(theta), "w": task.slot(down["w"]), "xi": xi, "reach": reach}

    def personal_layers(self, xi):
        return largest(xi, min(5, len(xi) - 1) if self.D is None else self.D)

    def phases(self, task):
        if self.count == "steps":
            return [Phase(self.step, steps=task.epochs)]
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        w = work["w"]
        g, theta = task.grad(work["theta"], batch)  # Alg. 1, line 4
        ascent = g if self.eps_from == "theta" else task.grad(w, batch)[0]
        eps = perturbation(ascent, self.rho, by_name(work["reach"], task.layers), self.p)  # Eq. 5
        point = w.params if self.grad_at == "w" else work["theta"].params
        g_tilde, seen = task.grad(w._replace(params=add(point, eps)), batch)
        w = task.step(w._replace(buffers=seen.buffers), g_tilde)  # line 7
        return {**work, "theta": task.step(theta, g), "w": w}

    def report(self, task, work, down, info):
        return {"xi": work["xi"]}

    def finish(self, task, work, down, state, info):
        return {"theta": work["theta"].params}, {"delta": sub(work["w"].params, down["w"])}

    def aggregate(self, task, server, up, info, t, key):
        return {"w": add(server["w"], task.average(up["delta"]))}

    def model(self, task, work, down, info):
        return where(info.first, work["w"], work["theta"])  # a client that never trained uses the global model

    def global_model(self, task, server):
        return server["w"]
