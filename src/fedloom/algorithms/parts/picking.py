"""Whose models a client is sent: those it got most from so far, now and then another."""

import torch
from torch import Tensor

from fedloom.core.autodiff import vmap
from fedloom.core.keys import fold, uniform


def pick(affinity: Tensor, known: Tensor, ids: Tensor, count: int, eps: float, key: int) -> tuple[Tensor, Tensor]:
    """For each of the clients `ids`, the `count` others with the largest affinity among those that are known, each
    with probability `eps` replaced by one that would not have been sent. Returns their ids, and which of them are
    there at all: where too few are known, the last are not."""
    everyone = torch.arange(len(known), device=known.device)

    def one(i: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        there = known & (everyone != i)
        luck = uniform(fold(key, 0), (len(known),), affinity.dtype)
        order = torch.argsort(luck, stable=True)  # of equal affinities any may come first
        value = torch.where(there, affinity[i], -torch.inf)[order]
        best = order[torch.argsort(value, descending=True, stable=True)][:count]
        left = torch.where(there, luck, 1.0).scatter(0, best, 1.0)
        new = torch.argsort(left, stable=True)[:count]
        swap = (uniform(fold(key, 1), (count,), affinity.dtype) < eps) & (left[new] < 1)
        who = torch.where(swap, new, best)
        return who, there[who]

    return vmap(one)(ids, fold(key, ids))
