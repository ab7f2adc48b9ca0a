"""PLGU-GRep: FedRep whose shared body is trained by LWSAM: after each step on the body comes a second one, with the
gradient at a point perturbed most in the layers in which this client's last body differs from the received one.

Qu, Li, Han, Duan, Shen, Chen. How to Prevent the Poor Performance Clients for Personalized Federated Learning?
CVPR 2023. Algorithm 3, Eq. 8-13.
"""

from dataclasses import dataclass
from typing import Literal

from fedloom.algorithms.fedrep import FedRep
from fedloom.algorithms.parts.lwsam import by_name, distances, perturbation, scores
from fedloom.core.algorithm import Phase
from fedloom.core.settings import setting


@dataclass(frozen=True)
class PLGUGRep(FedRep):
    name = "plgu-grep"
    source = "Qu et al., CVPR"
    paper = "How to Prevent the Poor Performance Clients for Personalized Federated Learning?"
    year = 2023
    private = "head h_i (and its last body, as sent)"

    head_epochs: int = setting(5, "K, epochs on the head", low=0)
    average: Literal["samples", "clients"] = setting("clients", "weights of the average: n_i, or all equal")
    rho: float = setting(0.05, "radius of the perturbation", low=0)
    p: float = setting(2.0, "order of its norm", above=1)
    scale: Literal["sum1", "mean1", "raw"] = setting(
        "sum1", "scores add up to 1, to the number of layers, or are raw distances"
    )
    reuse_grad: bool = setting(False, "perturb along the gradient of the first step: two gradients, not three")
    body_steps: int | None = setting(None, "so many batches on the body instead of epochs (the paper's text: 1)", low=1)

    def init_client(self, task, key, key_i):
        return {**super().init_client(task, key, key_i), "phi": task.body(task.init(key))}

    def begin(self, task, down, state, info):
        d = distances(state["phi"], down["phi"], task.body_layers)  # Eq. 10
        return {**super().begin(task, down, state, info), "xi": scores(d, self.scale).to(task.data.device, task.dtype)}

    def phases(self, task):
        head, body = super().phases(task)
        if not task.network.body:
            return [head]
        return [head, body if self.body_steps is None else Phase(self.body_step, steps=self.body_steps)]

    def body_step(self, task, work, batch, down, info):
        only = task.network.body
        g, w = task.grad(work["w"], batch, only)
        w = task.step(w, g)  # Eq. 11
        ascent = g if self.reuse_grad else task.grad(w, batch, only)[0]
        eps = perturbation(ascent, self.rho, by_name(work["xi"], task.body_layers), self.p)  # Eq. 12
        there = {k: v + eps[k] if k in eps else v for k, v in w.params.items()}
        g_tilde, _ = task.grad(w._replace(params=there), batch, only)
        return {**work, "w": task.step(w, g_tilde)}  # Eq. 13

    def report(self, task, work, down, info):
        return {"xi": work["xi"]}

    def finish(self, task, work, down, state, info):
        kept, up = super().finish(task, work, down, state, info)
        return {**kept, **up}, up
