"""Clients that are tuned: an agent chooses the learning rate eta_i and the number of epochs alpha_i in every round."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedloom.algorithms.parts.ddpg import DDPG
from fedloom.algorithms.parts.measuring import measuring, tally
from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.core.task import clip_norm


@dataclass(frozen=True)
class Tuned(Algorithm):
    """Local training under an action; a method adds what its agents see, what they earn, and the server."""

    lr_min: float = setting(0.001, "least eta_i", above=0)
    lr_max: float = setting(0.1, "largest eta_i", above=0)
    ep_max: int = setting(20, "largest alpha_i", low=1)
    decode: Literal["affine", "clip"] = setting("affine", "from action to eta_i and alpha_i; clip: PAGE's code")
    local_clip: float | None = setting(10.0, "gradient norm in local training", above=0)
    critic_lr: float = setting(0.005, "learning rate of critics", above=0)
    actor_lr: float = setting(0.0005, "learning rate of actors", above=0)
    tau: float = setting(0.005, "beta in the paper: share of the new networks that targets take over", low=0, high=1)
    gamma: float = setting(0.99, "discount of later rewards", low=0, high=1)
    t_warm: int = setting(35, "last round, from 0 on, in which agents act at random", low=0)
    replay: int = setting(60000, "transitions an agent remembers", low=1)
    replay_batch: int = setting(32, "transitions in an update of an agent", low=1)

    def check(self, task):
        if self.lr_min > self.lr_max:
            raise UserError(f"lr_min={self.lr_min:g} is above lr_max={self.lr_max:g}; set lr_min or lr_max.")

        if not task.schedule.constant:
            raise UserError(f"Agents of {self.name} choose learning rates; set lr_schedule=constant and lr_warmup=0.")

    def depends_on_rounds(self, task):
        return "the size of the agents' replay memory" if self.replay > task.rounds else ""

    def agent(self, task, states, actions, **noise):
        capacity = min(self.replay, task.rounds)  # a run has no more transitions than rounds
        return DDPG(
            states, actions, capacity, self.critic_lr, self.actor_lr, self.tau, self.gamma, self.replay_batch,
            self.t_warm, **noise,
        )  # fmt: skip

    def download(self, task, server, ids, t, key):
        return {"w": server["w"]}, {}  # agents are sent nowhere

    def begin(self, task, down, state, info):
        zero = torch.zeros(3, dtype=task.dtype, device=info.n.device)
        return {
            **state,
            "w": task.slot(down["w"]),
            "seen": zero,  # correct, summed loss, samples
            "eta": zero[0] + self.lr_max,
            "alpha": torch.full_like(info.n, self.ep_max),
        }

    def measuring_phase(self, task, select="train"):
        """A pass that measures the model as it is."""
        return measuring(task, self.look, select=select)

    def training_phase(self, enter):
        """alpha_i epochs with learning rate eta_i, both chosen in `enter`."""
        return Phase(self.step, lambda task, work, info: work["alpha"], enter=enter)

    def look(self, task, work, batch, down, info):
        return {**work, "seen": work["seen"] + tally(task, work["w"], batch)}

    def step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        g = g if self.local_clip is None else clip_norm(g, self.local_clip)
        return {**work, "w": task.step(w, g, lr=work["eta"])}

    def decoded(self, a):
        """eta_i in [lr_min, lr_max] and alpha_i in 1..ep_max from an action in [-1, 1]^2."""
        eta, alpha = (a + 1) / 2
        if self.decode == "affine":
            eta = self.lr_min + eta * (self.lr_max - self.lr_min)
            return eta, torch.floor(1 + alpha * (self.ep_max - 1) + 0.5).long()
        eta, alpha = (v.clamp(self.lr_min, self.lr_max) for v in (eta, alpha))
        return eta, torch.floor(alpha * int(self.ep_max / self.lr_max)).clamp(min=1).long()

    def model(self, task, work, down, info):
        return work["w"]

    def global_model(self, task, server):
        return server["w"]
