"""Models judged by the server on samples of its own, D_CS.

Running statistics do not travel, so BatchNorm normalises by the samples at hand; there is no dropout without a key.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedloom.core.autodiff import vmap
from fedloom.core.task import Task
from fedloom.core.tree import Params, Tree, leaves, mean, take, tree_map, where

SAMPLES = 512  # at once
ROWS = 1 << 12  # samples times models at once: memory must not grow with the number of clients


def accuracies(task: Task, models: Tree, rows: Tensor) -> Tensor:
    """Accuracy of each of the stacked models on the given rows."""
    count = len(leaves(models)[0])
    right = torch.zeros(count, dtype=torch.float64, device=rows.device)
    known = torch.zeros_like(right[0])

    def one(w: Params, x: Tensor, y: Tensor) -> Tensor:
        return task.data.targets.quality(_logits(task, w, x), y).sum()  # padding (-1) is never guessed

    for x, y in _samples(task, rows):
        known = known + ((y >= 0).sum() if task.data.kind == "classes" else len(y))
        some = max(1, ROWS // len(y))
        for first in range(0, count, some):
            here = slice(first, first + some)
            right[here] += vmap(one, in_dims=(0, None, None))(take(models, here), x, y)
    return (right / known).to(task.dtype)


def mean_loss(task: Task, w: Params, rows: Tensor) -> Tensor:
    """Mean loss of one model on the given rows."""
    total = torch.zeros(3, dtype=task.dtype, device=rows.device)
    for x, y in _samples(task, rows):
        everyone = torch.ones(len(y), dtype=task.dtype, device=y.device)
        total = total + task.score(_logits(task, w, x), y, everyone).sum(0)
    return total[1] / total[2]


def did_not_diverge(models: Tree) -> Tensor:
    """For each of the stacked models: True if all its parameters are finite."""
    return torch.stack([torch.isfinite(v).reshape(len(v), -1).all(1) for v in leaves(models)]).all(0)


def scored_average(task: Task, models: Tree, weights: Tensor, valid: Tensor, otherwise: Params, rows: Tensor) -> Tree:
    """The weighted mean `w` of the stacked models that are valid (`otherwise` if none is), with the weights `p` that
    they have in it, and its mean loss on the given rows."""
    p = torch.where(valid, weights, 0)
    p = p / p.sum().clamp(min=1e-30)
    finite = tree_map(lambda v: torch.where(valid.view(-1, *[1] * (v.dim() - 1)), v, 0), models)
    w = where(valid.any(), mean(finite, p), otherwise)
    return {"p": p, "w": w, "loss": mean_loss(task, w, rows)}


def _logits(task: Task, w: Params, x: Tensor) -> Tensor:
    return task.network.apply(w, task.network.buffers, x, train=True).logits


def _samples(task: Task, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of samples, each a cross-section, whatever the order."""
    pieces = -(-len(rows) // SAMPLES)
    for j in range(pieces):
        some = rows[j::pieces]
        yield task.data.prepare(task.data.x[some]), task.data.y[some]
