"""Which samples every client sees in which step of a phase, worked out for a whole cohort at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Batch, Draw, Phase
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, permutations, roots
from fedloom.core.task import Task
from fedloom.core.transfer import onto

AHEAD = 256  # steps of one client that are worked out at once


class Window(NamedTuple):
    """Padded batches of some steps (leading axis) for some clients (second axis), as indices into the pool."""

    rows: Tensor
    mask: Tensor
    k: Tensor
    epoch: Tensor
    last: Tensor
    key: Tensor


@dataclass(frozen=True)
class Schedule:
    """In step k, client i visits `count` samples of `order` from `start` on (see `locate`)."""

    steps: np.ndarray  # K_i, batches of this phase per client
    per_epoch: np.ndarray  # batches per epoch
    n: np.ndarray  # samples per epoch
    offset: np.ndarray  # where a client's samples begin in `order`
    order: Tensor  # rows of the pool in the order of visits: client after client, epoch after epoch
    noise: np.ndarray  # key per client for draws inside a step
    batch: int
    group: int
    first_epoch: int  # epochs that ran before this schedule (phases that stop by a condition run epoch by epoch)

    def rows(self, order: np.ndarray) -> Schedule:
        """The same for the clients in another order."""
        steps, per_epoch, n, offset = (v[order] for v in (self.steps, self.per_epoch, self.n, self.offset))
        return replace(self, steps=steps, per_epoch=per_epoch, n=n, offset=offset, noise=self.noise[order])

    def locate(self, clients: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """start, count, epoch and index within the epoch of step k; arrays broadcast."""
        per_epoch, n = np.maximum(self.per_epoch[clients], 1), self.n[clients]
        epoch, j = k // per_epoch, k % per_epoch
        width = self.batch * self.group
        count = np.where(k < self.steps[clients], np.clip(n - j * width, 0, width), 0)
        return self.offset[clients] + epoch * n + j * width, count, epoch, j

    def batches(self, task: Task, client: int) -> Iterator[Batch]:
        """The batches of one client in their order, without padding."""
        for first in range(0, int(self.steps[client]), AHEAD):
            k = np.arange(first, min(first + AHEAD, int(self.steps[client])))
            _, count, _, _ = self.locate(np.asarray(client), k)
            width = _cut(count, self.batch, self.group).tolist()
            columns = [v[:, 0].unbind() for v in self.window(task, np.array([client]), k)]
            for step, (rows, mask, *rest) in enumerate(zip(*columns, strict=True)):
                rows = rows[..., : width[step]]
                yield Batch(task.data.samples(rows), task.data.y[rows], mask[..., : width[step]], *rest)

    def full_batch(self, task: Task) -> Batch:
        """What a batch looks like when it is full, filled up with the first client's first sample."""
        rows, mask, *rest = (v[0, 0] for v in self.window(task, np.zeros(1, np.int64), np.zeros(1, np.int64)))
        return Batch(task.data.samples(rows), task.data.y[rows], torch.ones_like(mask), *rest)

    def window(self, task: Task, clients: np.ndarray, k: np.ndarray) -> Window:
        """Batches of steps k for the clients, padded to full size. Rows beyond a client's last step are garbage."""
        start, count, epoch, j = self.locate(clients[None, :], k[:, None])
        cut = _cut(count, self.batch, self.group)
        device, per_epoch, epoch = task.data.device, self.per_epoch[clients], epoch + self.first_epoch
        steps = np.broadcast_to(k[:, None] + self.first_epoch * per_epoch, start.shape)
        # padding is the client's own first sample, so that what one client's data holds reaches no other
        first = np.broadcast_to(np.minimum(self.offset[clients], len(self.order) - 1), start.shape)
        key = fold(self.noise[clients], epoch, j)
        table = np.stack([start, count, cut, first, steps, epoch, j == per_epoch - 1, key])  # one transfer
        starts, counts, cuts, firsts, ks, epochs, last, keys = onto(device, table).unbind()
        b = torch.arange(self.batch, device=device)
        if self.group == 1:
            inside = b.expand(*starts.shape, self.batch)
            valid = inside < counts[..., None]
            rows = torch.where(valid, starts[..., None] + inside, firsts[..., None])
        else:
            piece = torch.arange(self.group, device=device)[:, None] * cuts[..., None, None]
            inside = piece + b
            valid = (b < cuts[..., None, None]) & (inside < counts[..., None, None])
            rows = torch.where(valid, starts[..., None, None] + inside, firsts[..., None, None])
        return Window(self.order[rows], valid.to(task.dtype), ks, epochs, last.bool(), keys)


class Ahead:
    """Windows of a schedule, worked out a number of steps ahead while they are used up."""

    def __init__(self, task: Task, timetable: Schedule, length: int) -> None:
        self.task, self.timetable, self.length = task, timetable, length
        self.k = self.start = self.end = 0

    def look(self, prefix: int) -> None:
        """Work out the next window, for the first `prefix` clients."""
        self.start, self.end = self.k, min(int(self.timetable.steps.max()), self.k + self.length)
        clients = np.minimum(np.arange(prefix), len(self.timetable.steps) - 1)
        self.window = self.timetable.window(self.task, clients, np.arange(self.start, self.end))

    def until(self, stop: int, prefix: int) -> Iterator[tuple[Window, int, int]]:
        """(window, first, last): the steps up to `stop` for the first `prefix` clients, which must not grow."""
        while self.k < stop:
            if self.k == self.end:
                self.look(prefix)
            last = min(stop, self.end)
            yield self.window, self.k - self.start, last - self.start
            self.k = last


def _cut(count: np.ndarray | int, batch: int, group: int) -> np.ndarray:
    """Width of each of the `group` pieces: the batch size, or an even share of too few samples."""
    return np.minimum(batch, -(-np.asarray(count) // group))


def batches_per_epoch(task: Task, phase: Phase, n: np.ndarray) -> np.ndarray:
    size = phase.batch or task.batch_size
    alone = bool(phase.train and task.network.buffers)  # BatchNorm has no statistics of one sample: skip such a batch
    if phase.group > 1:
        full = n // (size * phase.group)
        smallest = n - (phase.group - 1) * _cut(n, size, phase.group)  # the last piece of a group that was too small
        return np.where(full == 0, phase.halve & (smallest > alone), full * (size > alone))
    full = -(-n // size)
    if alone:
        full = full - ((n % size == 1) | (size == 1))
        return np.maximum(full, 0)
    return full


def build(
    task: Task,
    phase: Phase,
    seeds: np.ndarray | int,
    ids: np.ndarray,
    t: int,
    epochs: np.ndarray,
    first_epoch: int = 0,
    run: np.ndarray | int = 0,
) -> Schedule:
    """The schedule of one phase for the clients `ids`, client j passing `epochs[j]` times over its samples, in the run
    `run[j]`, which has the seed `seeds[j]`."""
    device = task.data.device
    seeds, run = np.broadcast_to(np.asarray(seeds, dtype=object), ids.shape), np.broadcast_to(run, ids.shape)
    base, starts, n = _selected(task, phase, seeds, ids, t, run)
    per_epoch = batches_per_epoch(task, phase, n)
    if phase.steps is None:
        steps = epochs * per_epoch
    else:
        steps = np.where(per_epoch > 0, phase.steps, 0)
        epochs = -(-steps // np.maximum(per_epoch, 1))
    client = np.repeat(np.arange(len(ids)), epochs)  # segments: a client's epochs one after another
    epoch = np.arange(len(client)) - np.repeat(np.cumsum(epochs) - epochs, epochs) + first_epoch
    visits = epochs * n
    total = int(visits.sum())
    # keys are worked out on the host: a client has a few, and an operation on so little costs a GPU more
    host, columns = torch.device("cpu"), [starts[client], n[client]]
    if phase.shuffle:
        keys = fold(roots(seeds, "batch", host).numpy(), ids, t)
        columns.append(fold(keys[client], epoch))
    begins, sizes, *last = onto(device, np.stack(columns)).unbind()
    first = torch.repeat_interleave(begins, sizes, output_size=total)
    if phase.shuffle:
        position = permutations(last[0], sizes, total)
    else:
        before = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes, output_size=total)
        position = torch.arange(total, device=device) - before
    order = base[first + position]
    return Schedule(
        steps=steps,
        per_epoch=per_epoch,
        n=n,
        offset=np.cumsum(visits) - visits,
        order=order if len(order) else torch.zeros(1, dtype=torch.int64, device=device),
        noise=fold(roots(seeds, "noise", host).numpy(), ids, t),
        batch=phase.batch or task.batch_size,
        group=phase.group,
        first_epoch=first_epoch,
    )


def _selected(
    task: Task, phase: Phase, seeds: np.ndarray, ids: np.ndarray, t: int, run: np.ndarray
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Rows of the pool that the phase passes over: flat rows, where each client's begin, how many it has."""
    if isinstance(phase.select, str):
        split = task.data.splits.get(phase.select)
        if split is None:
            raise UserError(f"There is no split '{phase.select}'; known: {', '.join(task.data.splits)}.")
        return split.flat, split.starts[ids], split.sizes[ids]
    train = task.data.splits["train"]
    draws = [Draw(seed, int(i), t, int(r)) for seed, i, r in zip(seeds, ids, run, strict=True)]
    chosen = [np.asarray(phase.select(int(train.sizes[draw.i]), draw), dtype=np.int64) for draw in draws]
    sizes = np.array([len(c) for c in chosen], dtype=np.int64)
    positions = np.concatenate([train.starts[i] + c for i, c in zip(ids, chosen, strict=True)])
    return train.flat[onto(train.flat.device, positions)], np.cumsum(sizes) - sizes, sizes
