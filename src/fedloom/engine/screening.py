"""Leaving out or clipping uploads that are larger than usual, so that what one client sends cannot harm the others.

The size of an upload is its Euclidean norm, less what the server had sent (`Algorithm.reference`). An upload is left
out if it is larger than a bound times what is usual. Usual is the median over the uploads of the round. Where a round
has fewer than `FEW` uploads, or the server steps after each client, it is the 1/3 quantile of the last `RECENT`
uploads, used or not. The bound is `BOUND`, or more where the uploads differ more: `exp(SPREAD * s)`, where s is a
robust standard deviation of the logarithms of the sizes below the usual one (1.4826 times the median absolute
deviation), but at most `MAX_BOUND`. For a client with more samples than usual it is multiplied by the square root of
their ratio, because an update grows with the number of steps. Uploads without a change (up to rounding, `UNCHANGED`
times what was sent) do not count. As long as there are few recent uploads to compare with, an upload must also not be
larger than `START` times what was sent; of fewer than `FEW`, the smallest is usual, and the bound is `MAX_BOUND`.
Clipping scales an update that is larger than a given number of times the usual size down to that size.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm
from fedloom.core.autodiff import vmap
from fedloom.core.task import Task
from fedloom.core.tree import Tree, leaves, tree_map

FEW = 4
RECENT = 32
BOUND, MAX_BOUND, SPREAD = 10.0, 20.0, 6.0
START = 8.0
UNCHANGED = 1e-6
JUDGED = 10
NO_SIZE = 1e200  # usual where no upload has a change: more than any size


def update_norms(alg: Algorithm, task: Task, up: Mapping[str, Tree], shared: Tree, parts: Tree, stats: Tree) -> Tensor:
    """Norms (clients, 3) of what was sent to each client, of its upload, less what was sent, and of its running
    statistics. They are NaN or infinite where something is not finite."""

    def of_client(up: Mapping[str, Tree], mine: Tree, stats: Tree) -> Tensor:
        down = {**shared, **mine}
        change = _change(alg, task, up, down)
        return torch.stack([_norm(numbers, change[0]) for numbers in (_numbers(down), change, _numbers(stats))])

    return vmap(of_client)(up, parts, stats)


def update_vectors(alg: Algorithm, task: Task, up: Mapping[str, Tree], shared: Tree, parts: Tree) -> Tensor:
    """The updates of clients as vectors (clients, numbers)."""

    def of_client(up: Mapping[str, Tree], mine: Tree) -> Tensor:
        return torch.cat([v.flatten() for v in _change(alg, task, up, {**shared, **mine})])

    return vmap(of_client)(up, parts)


def scaled_updates(
    alg: Algorithm, task: Task, up: Mapping[str, Tree], shared: Tree, parts: Tree, factors: Tensor
) -> Tree:
    """The uploads of clients whose updates are multiplied by a factor each."""

    def of_client(up: Mapping[str, Tree], mine: Tree, factor: Tensor) -> Tree:
        sent = alg.reference(task, up, {**shared, **mine})

        def scaled(new: Tensor, old: Tensor | float = 0.0) -> Tensor:
            return (old + factor * (new - old)).to(new.dtype) if new.is_floating_point() else new

        return {name: tree_map(scaled, part, *([sent[name]] if name in sent else [])) for name, part in up.items()}

    return vmap(of_client)(up, parts, factors)


def _change(alg: Algorithm, task: Task, up: Mapping[str, Tree], down: Tree) -> list[Tensor]:
    """A client's upload, less what was sent to it."""
    sent = alg.reference(task, up, down)
    change = []
    for name, part in up.items():
        new = _numbers(part)
        change += [a - b for a, b in zip(new, _numbers(sent[name]), strict=True)] if name in sent else new
    return change


def _numbers(tree: Tree) -> list[Tensor]:
    return [v for v in leaves(tree) if v.is_floating_point() and v.numel()]


def _norm(tensors: list[Tensor], like: Tensor) -> Tensor:
    norms = [torch.linalg.vector_norm(v) for v in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else like.new_zeros(())


class Screening:
    """Decides which uploads of a run are used or clipped, and remembers the sizes of recent ones."""

    def __init__(self, turns: bool, leave_out: bool = True, clip: float | None = None) -> None:
        """
        Args:
            turns: the server steps after each client, so the uploads of a round cannot be compared with each other.
            leave_out: leave out what is far larger than usual.
            clip: clip what is larger than so many times the usual size.
        """
        self.turns, self.leave_out, self.clip = turns, leave_out, clip
        self.recent = np.empty((0, 2))  # samples of the client, and size, of recent uploads, the newest last

    def factors(self, sent: np.ndarray, size: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """By what each update of a round, or of a turn, is multiplied: 0 if it is left out, less than 1 if clipped.

        Args:
            sent: norms of what was sent to the clients.
            size: norms of their updates, which are finite.
            samples: their numbers of training samples.
        """
        found = np.column_stack([samples, np.where(size > UNCHANGED * sent, size, 0)])
        self.recent = np.concatenate([self.recent, found])[-RECENT:]
        compared = len(found) >= FEW and not self.turns
        usual_samples, usual, bound = _usual(found, 1 / 2) if compared else _usual(self.recent, 1 / 3)
        factors = np.ones(len(size))
        if self.clip is not None:
            factors = self.clip * usual / np.maximum(size, self.clip * usual)
        if self.leave_out:
            larger = np.sqrt(np.maximum(samples / max(1.0, usual_samples), 1))
            used = size <= usual * bound * larger
            if not compared and len(self.recent) < 2 * FEW:
                used &= (size <= START * sent) | (sent == 0)
            factors = np.where(used, factors, 0)
        return factors


def _usual(uploads: np.ndarray, quantile: float) -> tuple[float, float, float]:
    """Usual number of samples, usual size, and bound on sizes in multiples of it, from samples and sizes of uploads."""
    uploads = uploads[uploads[:, 1] > 0]
    if not len(uploads):
        return 1, NO_SIZE, 1
    uploads = uploads[uploads[:, 1].argsort()]
    samples, sizes = float(np.median(uploads[:, 0])), uploads[:, 1]
    if len(sizes) < FEW:
        return float(uploads[0, 0]), float(sizes[0]), MAX_BOUND
    at = int(quantile * (len(sizes) - 1))
    below = np.log(sizes[: at + 1])  # uploads that are too large do not affect the deviation
    deviation = 1.4826 * float(np.median(below[-1] - below))
    return samples, float(sizes[at]), min(max(BOUND, math.exp(SPREAD * deviation)), MAX_BOUND)


class Directions:
    """Decides which clients send updates that point the same way as those of others.

    The updates of honest clients agree at the start of a run, and oppose each other later, when their average goes to
    zero. So the first `JUDGED` rounds decide: a client is left out while the sum, over these rounds, of the cosines
    between its update and the sum of the others' directions is negative. Rounds with fewer than `FEW` uploads, and
    methods whose server steps after each client, have nothing to compare.
    """

    def __init__(self, clients: int) -> None:
        self.recent = np.zeros(clients)  # each client's sum of cosines

    def judges(self, uploads: int, t: int) -> bool:
        """True if so many uploads of round t are to be compared."""
        return uploads >= FEW and t < JUDGED

    def compare(self, ids: np.ndarray, updates: Tensor) -> None:
        """Take into account the updates (clients, numbers) of a round."""
        ways = updates / torch.linalg.vector_norm(updates, dim=1, keepdim=True).clamp(min=1e-30)
        cosines = (ways @ ways.T).double().cpu().numpy()
        own, total = cosines.diagonal(), cosines.sum(1)
        others = np.sqrt(np.maximum(total.sum() - 2 * total + own, 1e-12))  # norm of the sum of the others
        self.recent[ids] += (total - own) / others

    def accept(self, ids: np.ndarray) -> np.ndarray:
        """Which clients are used."""
        return self.recent[ids] >= 0
