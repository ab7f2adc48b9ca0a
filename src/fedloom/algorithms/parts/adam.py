"""Adam for what a method trains beside the run's SGD.

Kingma, Ba. Adam: A Method for Stochastic Optimization. ICLR 2015.
"""

import torch
from torch import Tensor

from fedloom.core.tree import Params

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8

State = dict[str, Tensor]


def start(x: Tensor) -> State:
    """The state before the first step."""
    return {"m": torch.zeros_like(x), "v": torch.zeros_like(x)}


def step(x: Tensor, g: Tensor, state: State, k: Tensor, lr: float | Tensor) -> tuple[Tensor, State]:
    """Step k (from 1 on): the new values and the new state."""
    m = BETA1 * state["m"] + (1 - BETA1) * g
    v = BETA2 * state["v"] + (1 - BETA2) * g * g
    rise1, rise2 = (1 - beta ** k.double() for beta in (BETA1, BETA2))  # in float32, 0.999 ** 1 has lost 4 digits
    return x - lr * (m / rise1.to(x.dtype)) / (torch.sqrt(v / rise2.to(x.dtype)) + EPS), {"m": m, "v": v}


def start_tree(params: Params) -> dict[str, State]:
    """The states of several tensors, by name."""
    return {name: start(x) for name, x in params.items()}


def step_tree(
    params: Params, g: Params, states: dict[str, State], k: Tensor, lr: float | Tensor
) -> tuple[Params, dict[str, State]]:
    """Step k of each of them."""
    done = {name: step(x, g[name], states[name], k, lr) for name, x in params.items()}
    return {name: x for name, (x, _) in done.items()}, {name: state for name, (_, state) in done.items()}
