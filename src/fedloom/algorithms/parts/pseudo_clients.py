"""The server's samples D_CS dealt out to pseudo-clients, for methods whose shared part is no model by itself.

Each of them adapts a copy on some of its samples and is tested on the others.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.core.algorithm import Batch, Slot
from fedloom.core.keys import Key, fold, permutations, rng, stream
from fedloom.core.task import Task

SAMPLES = 512  # tested at once
Step = Callable[[Slot, Batch], Slot]


def scores(task: Task, w: Slot, step: Step, epochs: int, count: int, share: float, key: Key) -> Tensor | None:
    """(correct, summed loss, samples) of `count` equal parts, each after so many epochs on the first `share` of its
    samples. Parts have at least two samples; what an equal division leaves over is not used."""
    rows = task.data.server_test
    count = 0 if rows is None else min(count, len(rows) // 2)
    if rows is None or not count:
        return None
    order = rng("partition", 0, stream("pseudo-clients")).permutation(len(rows))  # the same for all seeds
    parts = rows[task.data.tensor(order)].split(len(rows) // count)[:count]
    found = torch.zeros(3, dtype=task.dtype, device=rows.device)
    for j, part in enumerate(parts):
        cut = max(1, math.floor(share * len(part) + 1e-9))
        adapted = _adapted(task, w, step, epochs, part[:cut], fold(key, stream("pseudo-clients"), j))
        for some in part[cut:].split(SAMPLES):
            x, y, mask = _samples(task, some)
            found = found + task.score(task.predict(adapted, x).logits, y, mask).sum(0)
    return found


def _adapted(task: Task, w: Slot, step: Step, epochs: int, rows: Tensor, key: Key) -> Slot:
    zero = torch.zeros((), dtype=torch.int64, device=rows.device)
    k = 0
    for e in range(epochs):
        draw = zero + fold(key, e)
        batches = rows[permutations(draw[None], zero[None] + len(rows), len(rows))].split(task.batch_size)
        for j, some in enumerate(batches):
            if len(some) > 1 or not task.network.buffers:  # BatchNorm has no statistics of one sample
                last = zero + (j + 1) == len(batches)
                w = step(w, Batch(*_samples(task, some), zero + k, zero + e, last, fold(draw, j)))
                k += 1
    return w


def _samples(task: Task, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    data = task.data
    return data.prepare(data.x[rows]), data.y[rows], torch.ones(len(rows), dtype=task.dtype, device=data.device)
