"""Leaving out uploads that are far larger than usual, so that what one client sends cannot harm the others.

The size of an upload is its Euclidean norm, less what the server had sent (`Algorithm.reference`). An upload is left
out if it is larger than a bound times what is usual. Usual is the median over the uploads of the round. Where a round
has fewer than `FEW` uploads, or the server steps after each client, it is the 1/3 quantile of the last `RECENT`
uploads, used or not. The bound is `BOUND`, or more where the uploads differ more: `exp(SPREAD * s)`, where s is a
robust standard deviation of the logarithms of the sizes below the usual one (1.4826 times the median absolute
deviation), but at most `MAX_BOUND`. For a client with more samples than usual it is multiplied by the square root of
their ratio, because an update grows with the number of steps. Uploads without a change (up to rounding, `UNCHANGED`
times what was sent) do not count. As long as there are few recent uploads to compare with, an upload must also not be
larger than `START` times what was sent; of fewer than `FEW`, the smallest is usual, and the bound is `MAX_BOUND`.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm
from fedloom.core.autodiff import vmap
from fedloom.core.task import Task
from fedloom.core.tree import Tree, leaves

FEW = 4
RECENT = 32
BOUND, MAX_BOUND, SPREAD = 20.0, 35.0, 6.0
START = 8.0
UNCHANGED = 1e-6


def update_norms(alg: Algorithm, task: Task, up: Mapping[str, Tree], shared: Tree, parts: Tree) -> Tensor:
    """Norms (clients, 2) of what was sent to each client, and of its upload, less what was sent. The second is NaN or
    infinite where an upload is not finite."""

    def of_client(up: Mapping[str, Tree], mine: Tree) -> Tensor:
        down = {**shared, **mine}
        sent = alg.reference(task, up, down)
        change = []
        for name, part in up.items():
            new = _numbers(part)
            change += [a - b for a, b in zip(new, _numbers(sent[name]), strict=True)] if name in sent else new
        return torch.stack([_norm(_numbers(down), change[0]), _norm(change, change[0])])

    return vmap(of_client)(up, parts)


def _numbers(tree: Tree) -> list[Tensor]:
    return [v for v in leaves(tree) if v.is_floating_point() and v.numel()]


def _norm(tensors: list[Tensor], like: Tensor) -> Tensor:
    norms = [torch.linalg.vector_norm(v) for v in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else like.new_zeros(())


class Screening:
    """Decides which uploads of a run are used, and remembers the sizes of recent ones."""

    def __init__(self, turns: bool) -> None:
        """`turns`: the server steps after each client, so the uploads of a round cannot be compared with each other."""
        self.turns = turns
        self.recent = np.empty((0, 2))  # samples of the client, and size, of recent uploads, the newest last

    def accept(self, norms: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Which of the uploads of a round, or of a turn, are used; `norms` are those of `update_norms`, and finite."""
        sent, size = norms.T
        found = np.column_stack([samples, np.where(size > UNCHANGED * sent, size, 0)])
        self.recent = np.concatenate([self.recent, found])[-RECENT:]
        if len(found) >= FEW and not self.turns:
            return size <= _bounds(found, samples, 1 / 2)
        accepted: np.ndarray = size <= _bounds(self.recent, samples, 1 / 3)
        if len(self.recent) < 2 * FEW:
            accepted &= (size <= START * sent) | (sent == 0)
        return accepted


def _bounds(usual: np.ndarray, samples: np.ndarray, quantile: float) -> np.ndarray:
    """The largest size that is used of clients with so many samples, from the samples and sizes of usual uploads."""
    usual = usual[usual[:, 1] > 0]
    if not len(usual):
        return np.full(len(samples), math.inf)
    sizes = np.sort(usual[:, 1])
    bound = MAX_BOUND * float(sizes[0])
    if len(sizes) >= FEW:
        at = int(quantile * (len(sizes) - 1))
        below = np.log(sizes[: at + 1])  # uploads that are too large do not affect the deviation
        deviation = 1.4826 * float(np.median(below[-1] - below))
        bound = float(sizes[at]) * min(max(BOUND, math.exp(SPREAD * deviation)), MAX_BOUND)
    return bound * np.sqrt(np.maximum(samples / max(1.0, float(np.median(usual[:, 0]))), 1))
