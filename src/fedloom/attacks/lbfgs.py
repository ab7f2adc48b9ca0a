"""L-BFGS for many independent problems at once: what `torch.optim.LBFGS` computes for each, without a line search."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]  # points (problems, size) -> values, and gradients of that shape
GRADIENT, CHANGE, CURVATURE = 1e-7, 1e-9, 1e-10  # tolerances of torch.optim.LBFGS


def minimise(
    objective: Objective, start: Tensor, steps: int, *, iterations: int = 20, history: int = 100, lr: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The points after so many steps of `torch.optim.LBFGS`, and the values there. Every problem has its own history
    and stops on its own. As in torch, one that diverges ends in NaN: no comparison with NaN stops it.

    Args:
        start: one row per problem.
        steps: calls of torch's `step`, each of up to `iterations` iterations.
    """
    x, (count, size) = start.clone(), start.shape
    rows = torch.arange(count, device=x.device)
    ys, ss = x.new_zeros(2, history, count, size)  # the latest changes of gradients and of points, in a ring
    rho, scale = x.new_zeros(history, count), x.new_ones(count)
    stored, done = rows.new_zeros(2, count)  # changes that were stored, and iterations, so far
    d, before, t = torch.zeros_like(x), torch.zeros_like(x), x.new_zeros(count)
    for _ in range(steps):
        value, g = objective(x)
        active = ~((g.abs().amax(1) <= GRADIENT) | x.isnan().any(1))
        moved = torch.zeros_like(active)
        for n in range(iterations):
            first = done == 0
            done = done + active
            y, s = g - before, d * t[:, None]
            curvature = (y * s).sum(1)
            keep = active & ~first & (curvature > CURVATURE)
            place = stored % history, rows
            for ring, new in ((ys, y), (ss, s)):
                ring[place] = torch.where(keep[:, None], new, ring[place])
            rho[place] = torch.where(keep, 1 / curvature, rho[place])
            scale = torch.where(keep, curvature / (y * y).sum(1), scale)
            stored = stored + keep
            d = torch.where(active[:, None], _direction(g, ys, ss, rho, scale, stored), d)
            before, previous = torch.where(active[:, None], g, before), value
            t = torch.where(active, torch.where(first, lr * (1 / g.abs().sum(1)).clamp(max=1.0), lr), t)
            active &= ~((g * d).sum(1) > -CHANGE)
            x = torch.where(active[:, None], x + t[:, None] * d, x)
            moved |= active
            if n + 1 == iterations or not active.any():
                break
            new_value, new_g = objective(x)
            value, g = torch.where(active, new_value, value), torch.where(active[:, None], new_g, g)
            active &= ~((g.abs().amax(1) <= GRADIENT) | ((d * t[:, None]).abs().amax(1) <= CHANGE))
            active &= ~((value - previous).abs() < CHANGE)
        if not moved.any():
            break
    return x, objective(x)[0]


def _direction(g: Tensor, ys: Tensor, ss: Tensor, rho: Tensor, scale: Tensor, stored: Tensor) -> Tensor:
    """The two loops of L-BFGS; changes that a problem does not have yet are zeros with rho = 0."""
    rows, history = torch.arange(len(g), device=g.device), len(rho)
    places = [((stored - j) % history, rows) for j in range(1, min(history, int(stored.max())) + 1)]  # newest first
    q, factors = -g, []
    for place in places:
        a = (ss[place] * q).sum(1) * rho[place]
        q = q - a[:, None] * ys[place]
        factors.append(a)
    r = q * scale[:, None]
    for place, a in zip(reversed(places), reversed(factors), strict=True):
        b = (ys[place] * r).sum(1) * rho[place]
        r = r + (a - b)[:, None] * ss[place]
    return r
