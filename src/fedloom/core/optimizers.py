"""Optimisers of local training, and schedules of the learning rate over rounds.

A client's optimiser starts anew in every round. Its state is in the slot of the model that it trains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.tree import Number, Params

Moments = dict[str, Params]  # by name of the moment, then of the parameter


@dataclass(frozen=True)
class Optimizer:
    """What a step makes of a gradient: as torch's SGD, Adam or AdamW. Learning rate, momentum and weight decay are the
    task's."""

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)  # of Adam and AdamW
    eps: float = 1e-8

    @property
    def plain(self) -> bool:
        """True for SGD, with or without momentum."""
        return self.kind == "sgd"

    def init(self, params: Params, momentum: Number) -> Moments:
        """The state before the first step."""
        if self.plain:
            return {"first": tree.zeros_like(params)} if tree.nonzero(momentum) else {}
        steps = {name: v.new_zeros(()) for name, v in params.items()}  # a step may be on some of the parameters only
        return {"first": tree.zeros_like(params), "second": tree.zeros_like(params), "steps": steps}

    def step(
        self, params: Params, gradient: Params, moments: Moments, lr: Number, momentum: Number, weight_decay: Number
    ) -> tuple[Params, Moments]:
        """Parameters and state after a step on the parameters that are named in the gradient."""
        decays = tree.nonzero(weight_decay)
        if decays and self.kind != "adamw":
            gradient = tree.axpy(weight_decay, {k: params[k] for k in gradient}, gradient)
        if self.plain:
            return self._sgd(params, gradient, moments, lr, momentum)
        b1, b2 = self.betas
        moved, changed = dict(params), {name: dict(moments[name]) for name in ("first", "second", "steps")}
        for k, g in gradient.items():
            w = params[k] * (1 - lr * weight_decay) if decays and self.kind == "adamw" else params[k]
            t = moments["steps"][k] + 1
            m = torch.lerp(moments["first"][k], g, 1 - b1)
            v = b2 * moments["second"][k] + (1 - b2) * g**2
            size = v.sqrt() / torch.sqrt(1 - b2**t) + self.eps
            moved[k] = w - lr / (1 - b1**t) * (m / size)
            changed["first"][k], changed["second"][k], changed["steps"][k] = m, v, t
        return moved, changed

    def _sgd(
        self, params: Params, gradient: Params, moments: Moments, lr: Number, momentum: Number
    ) -> tuple[Params, Moments]:
        """v = mom*v + g; w = w - eta*v, with Nesterov's momentum w = w - eta*(g + mom*v)."""
        if tree.nonzero(momentum):
            first = moments["first"]
            velocity = tree.axpy(momentum, {k: first[k] for k in gradient}, gradient)
            moments = {"first": {**first, **velocity}}
            gradient = tree.axpy(momentum, velocity, gradient) if self.nesterov else velocity
        if isinstance(lr, Tensor):
            moved = {k: params[k] - lr * g for k, g in gradient.items()}
        else:
            moved = {k: torch.sub(params[k], g, alpha=lr) for k, g in gradient.items()}
        return {**params, **moved}, moments


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a round, as a factor of the one that is set."""

    kind: Literal["constant", "cosine", "step"] = "constant"
    rounds: int = 1  # of the run; cosine falls from 1 to 0 over them
    warmup: int = 0  # rounds in which it first rises linearly
    every: int = 1  # step: rounds after which it is multiplied by gamma, again and again
    gamma: float = 0.1

    @property
    def constant(self) -> bool:
        """True if the factor is always 1."""
        return self.kind == "constant" and not self.warmup

    def factor(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """The factor in round t, which counts from 0."""
        now = t.to(dtype)
        if self.kind == "cosine":
            now = now.clamp(max=self.rounds - 1)  # models that adapt after the last round do so as in it
        after = (now - self.warmup).clamp(min=0)
        factor = torch.ones_like(now)
        if self.kind == "cosine":
            factor = (1 + torch.cos(math.pi * after / max(1, self.rounds - self.warmup))) / 2
        elif self.kind == "step":
            factor = self.gamma ** torch.floor(after / self.every)
        return factor * ((now + 1) / self.warmup).clamp(max=1) if self.warmup else factor
