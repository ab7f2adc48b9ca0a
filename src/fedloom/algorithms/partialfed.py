"""PartialFed: a client takes some layers of the global model and keeps its own in the others; which ones, it learns.

Sun, Huo, Yang, Bai. PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization. NeurIPS 2021.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.parts import adam
from fedloom.algorithms.parts.holdout import divided
from fedloom.algorithms.parts.lwsam import by_name
from fedloom.core.algorithm import Phase
from fedloom.core.autodiff import grad
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, stream, uniform
from fedloom.core.settings import setting


@dataclass(frozen=True)
class PartialFed(FedAvg):
    name = "partialfed"
    source = "Sun et al., NeurIPS"
    paper = "PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization"
    year = 2021
    private = "policy pi_i (and theta_i, its last model, as sent)"
    pre_is_global = False

    mode: Literal["adaptive", "fix"] = setting("adaptive", "a learnt policy; fix: head and normalisations are kept")
    policy_epochs: int = setting(1, "epochs on the policy in a round", low=0)
    policy_lr: float = setting(0.01, "learning rate of the policy (Adam)", low=0)
    temperature: float = setting(5.0, "of the draws from the policy, in round 0", above=0)
    cooling: float = setting(0.965, "factor on the temperature per round", above=0, high=1)
    temperature_min: float = setting(0.5, "lowest temperature", above=0)
    warmup: float = setting(0.2, "share of the rounds, the first, before any policy is learnt", low=0, high=1)
    policy_share: float = setting(0.0, "share of a client's samples from which only its policy learns", low=0, high=0.9)

    def check(self, task):
        if self.mode == "fix" and not {*task.network.body} - {*task.network.norms}:
            raise UserError(
                "partialfed's mode=fix keeps the head at the client, but this model is nothing else; use mode=adaptive."
            )

    def depends_on_rounds(self, task):
        return "the number of rounds before a policy is learnt" if self.mode == "adaptive" and self.warmup else ""

    def init_client(self, task, key, key_i):
        state = {"theta": task.init(key)}
        if self.mode == "adaptive":  # columns: local, global
            state["pi"] = torch.zeros(len(task.layers), 2, dtype=task.dtype, device=key_i.device)
        return state

    def begin(self, task, down, state, info):
        work = {"w": task.slot(self.loaded(task, state, down))}
        return work if self.mode == "fix" else {**work, **state, "adam": adam.start(state["pi"])}

    def loaded(self, task, state, down):
        """theta_i with the global layers in their places. A new client's policy is even, which means global."""
        theta, w = state["theta"], down["w"]
        if self.mode == "fix":
            kept = {*task.network.head, *task.network.norms}
            return {k: theta[k] if k in kept else w[k] for k in w}
        taken = by_name(state["pi"][:, 1] >= state["pi"][:, 0], task.layers)
        return {k: torch.where(taken[k], w[k], theta[k]) for k in w}

    def phases(self, task):
        if self.mode == "fix":
            return [Phase(self.step, task.epochs)]
        train, held_out = divided(self.policy_share, "policy") if self.policy_share else ("train", "train")
        return [
            Phase(self.policy_step, self.policy_passes, select=held_out),
            Phase(self.step, task.epochs, select=train, enter=self.load),
        ]

    def policy_passes(self, task, work, info):
        return torch.where(info.first | (info.t < self.warmup * task.rounds), 0, self.policy_epochs)

    def policy_step(self, task, work, batch, down, info):
        """A layer is global or local by a draw from the policy; its gradient is that of the soft draw."""
        theta, w, pi = work["theta"], down["w"], work["pi"]
        noise = gumbel(fold(batch.key, stream("gumbel")), tuple(pi.shape), pi.dtype)
        heat = (self.temperature * self.cooling ** info.t.to(pi.dtype)).clamp(min=self.temperature_min)

        def loss(pi):
            soft = torch.softmax((pi + noise) / heat, -1)[:, 1]
            taken = by_name((soft >= 0.5) + (soft - soft.detach()), task.layers)
            params = {k: taken[k] * w[k] + (1 - taken[k]) * theta[k] for k in w}
            return task.loss(task.forward(work["w"]._replace(params=params), batch), batch), {}

        g, _ = grad(loss, pi)
        pi, state = adam.step(pi, g, work["adam"], batch.k + 1, self.policy_lr)
        return {**work, "pi": pi, "adam": state}

    def load(self, task, work, down, info):
        return {"w": work["w"]._replace(params=self.loaded(task, work, down)), "pi": work["pi"]}

    def report(self, task, work, down, info):
        return {} if self.mode == "fix" else {"global": (work["pi"][:, 1] >= work["pi"][:, 0]).to(task.dtype)}

    def finish(self, task, work, down, state, info):
        theta, learnt = work["w"].params, {} if self.mode == "fix" else {"pi": work["pi"]}
        return {"theta": theta, **learnt}, {"w": theta}


def gumbel(key, shape, dtype):
    """Gumbel noise: adding it to logits and taking the larger is a draw from their softmax."""
    return -torch.log(-torch.log(uniform(key, shape, dtype).clamp(min=2**-25)))  # uniform may be 0
