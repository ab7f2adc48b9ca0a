"""LWSAM: the ascent step of sharpness-aware minimisation, its size scaled layer by layer.

SAM looks for the worst point within radius rho of the model and descends with the gradient found there. LWSAM gives
every layer l a score xi_l and goes xi_l * rho far in it; with xi = 1 it is SAM, with rho = 0 plain SGD. (PLGU, Eq. 4-6)
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.tree import Params, norm

Layers = Sequence[Sequence[str]]  # names of parameters by layer
Scale = Literal["sum1", "mean1", "raw"]


def perturbation(g: Params, rho: float, xi: Params | None = None, p: float = 2.0) -> Params:
    """eps = rho * xi * sign(g) |g|^(q-1) / (sum |g|^q)^(1/p); for xi = 1 the maximiser of <g, eps> on the ball of
    radius rho in the p-norm, 1/p + 1/q = 1. The sum is over the whole gradient. (Eq. 5 is printed with another
    exponent, which does not give norm rho.)"""
    q = 1.0 if math.isinf(p) else p / (p - 1)
    s = torch.stack([(v.abs() ** q).sum() for v in g.values()]).sum()
    size = torch.where(s > 1e-24, rho / torch.clamp(s, min=1e-24) ** (1 / p), 0.0)
    ascent = g if p == 2 else {k: v.sign() * v.abs() ** (q - 1) for k, v in g.items()}
    return {k: v * (size if xi is None else size * xi[k]) for k, v in ascent.items()}


def distances(a: Params, b: Params, layers: Layers) -> Tensor:
    """d_l = ||a_l - b_l|| / dim(l)  (Eq. 6)"""
    if not layers:
        return torch.zeros(0)
    return torch.stack([norm([a[k] - b[k] for k in layer]) / sum(a[k].numel() for k in layer) for layer in layers])


def scores(d: Tensor, scale: Scale = "sum1") -> Tensor:
    """xi_l from the distances: adding up to 1, to the number of layers, or the distances themselves. Two equal models
    have uniform scores."""
    if scale == "raw" or not len(d):
        return d
    total = d.sum()
    share = torch.where(total > 1e-12, d / torch.clamp(total, min=1e-12), 1 / len(d))
    return share * (len(d) if scale == "mean1" else 1)


def largest(xi: Tensor, count: int) -> Tensor:
    """Which layers have the `count` largest scores; of equals, the first. By comparison: `topk` returns ties in any
    order."""
    index = torch.arange(len(xi), device=xi.device)
    ahead = (xi[None, :] > xi[:, None]) | ((xi[None, :] == xi[:, None]) & (index[None, :] < index[:, None]))
    return ahead.sum(1) < count


def by_name(values: Tensor, layers: Layers) -> Params:
    """A value per layer as one per parameter."""
    return {k: values[index] for index, layer in enumerate(layers) for k in layer}
