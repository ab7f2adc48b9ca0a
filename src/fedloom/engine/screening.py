"""Leaving out uploads that are far larger than usual, so that what one client sends cannot harm the others.

The size of an upload is measured by its parts (the entries of the uploaded dictionary): the Euclidean norm of each,
less what the server had sent (`Algorithm.reference`). An upload is left out if a part is larger than a bound times what
is usual. Usual is the median over the uploads of the round. Where a round has fewer than `FEW` uploads, or the server
steps after each client, it is the 1/3 quantile of the last `RECENT` uploads, used or not. The bound is `BOUND`, or more
where the uploads differ more: `exp(SPREAD * s)`, where s is a robust standard deviation of the logarithms of the sizes
below the usual one (1.4826 times the median absolute deviation), but at most `MAX_BOUND`. As long as there are few
recent uploads to compare with, an upload must also not be larger than `START` times what was sent.
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
BOUND, MAX_BOUND, SPREAD = 20.0, 50.0, 8.0
START = 4.0


def update_norms(alg: Algorithm, task: Task, up: Mapping[str, Tree], shared: Tree, parts: Tree) -> Tensor:
    """Norms (clients, 1 + parts) of what was sent to each client, and of the parts of its upload, less what was sent.
    They are NaN or infinite where an upload is not finite."""
    names = [name for name in sorted(up) if _numbers(up[name])]

    def of_client(up: Mapping[str, Tree], mine: Tree) -> Tensor:
        down = {**shared, **mine}
        sent = alg.reference(task, up, down)
        norms = [_norm(down, up)]
        for name in names:
            new = _numbers(up[name])
            old = _numbers(sent[name]) if name in sent else [torch.zeros_like(v) for v in new]
            norms.append(_norm([a - b for a, b in zip(new, old, strict=True)], up))
        return torch.stack(norms)

    return vmap(of_client)(up, parts)


def _numbers(tree: Tree) -> list[Tensor]:
    return [v for v in leaves(tree) if v.is_floating_point() and v.numel()]


def _norm(tree: Tree, like: Tree) -> Tensor:
    norms = [torch.linalg.vector_norm(v) for v in _numbers(tree)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else _numbers(like)[0].new_zeros(())


class Screening:
    """Decides which uploads of a run are used, and remembers the norms of recent ones."""

    def __init__(self, turns: bool) -> None:
        """`turns`: the server steps after each client, so the uploads of a round cannot be compared with each other."""
        self.turns = turns
        self.recent = np.empty((0, 0))  # (uploads, parts), the newest last

    def accept(self, norms: np.ndarray) -> np.ndarray:
        """Which of the uploads of a round, or of a turn, are used; `norms` are those of `update_norms`, and finite."""
        sent, sizes = norms[:, :1], norms[:, 1:]
        seen = np.concatenate([self.recent, sizes]) if len(self.recent) else sizes
        self.recent = seen[-RECENT:]
        if len(sizes) >= FEW and not self.turns:
            return np.all(sizes <= _bounds(sizes, 1 / 2), axis=1)
        bounds = _bounds(self.recent, 1 / 3)
        if len(seen) < 2 * FEW:
            bounds = np.minimum(bounds, np.where(sent > 0, START * sent, np.inf))
        return np.all(sizes <= bounds, axis=1)


def _bounds(usual: np.ndarray, quantile: float) -> np.ndarray:
    """The largest norm that is used, per part."""
    return np.array([_bound(np.sort(part[part > 0]), quantile) for part in usual.T])


def _bound(sizes: np.ndarray, quantile: float) -> float:
    """The bound of a part, from its sorted positive norms."""
    if not len(sizes):
        return math.inf
    at = int(quantile * (len(sizes) - 1)) if len(sizes) >= FEW else 0
    below = np.log(sizes[: at + 1])  # uploads that are too large do not affect the deviation
    deviation = 1.4826 * float(np.median(below[-1] - below))
    return float(sizes[at]) * min(max(BOUND, math.exp(SPREAD * deviation)), MAX_BOUND)
