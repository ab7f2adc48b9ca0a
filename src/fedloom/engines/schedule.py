"""Which samples every client sees in which step of a phase, worked out for a whole cohort at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Batch, Draw, Phase
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, permutations, roots
from fedloom.core.task import Task
from fedloom.core.transfer import onto

AHEAD = 256  # steps of one client that are worked out at once
Call = Callable[..., Any]  # (name, f, *args) -> f(*args), as `Replayed`


def plainly(name: Hashable, f: Callable[..., Any], *args: Any) -> Any:
    return f(*args)


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

    def batches(self, task: Task, client: int) -> Iterator[Batch]:
        """The batches of one client in their order, without padding."""
        for first in range(0, int(self.steps[client]), AHEAD):
            last = min(first + AHEAD, int(self.steps[client]))
            at = np.arange(first, last) % self.per_epoch[client]
            widths = self._cut(self._count(self.n[client], at)).tolist()
            columns = [v[:, 0].unbind() for v in self.window(task, np.array([client]), first, last)]
            for width, (rows, mask, *rest) in zip(widths, zip(*columns, strict=True), strict=True):
                rows = rows[..., :width]
                yield Batch(task.data.samples(rows), task.data.y[rows], mask[..., :width], *rest)

    def full_batch(self, task: Task) -> Batch:
        """What a batch looks like when it is full, filled up with the first client's first sample."""
        rows, mask, *rest = (v[0, 0] for v in self.window(task, np.zeros(1, np.int64), 0, 1))
        return Batch(task.data.samples(rows), task.data.y[rows], torch.ones_like(mask), *rest)

    def window(self, task: Task, clients: np.ndarray, first: int, last: int, call: Call = plainly) -> Window:
        """Batches of the steps from `first` to `last` for the clients, padded to full size. Rows beyond a client's last
        step are garbage."""
        device, steps = task.data.device, last - first
        known = np.stack([self.steps, self.per_epoch, self.n, self.offset, self.noise])[:, clients]
        known = np.concatenate([known, np.full((2, len(clients)), [[first], [self.first_epoch]])])
        if call is plainly:  # one operation after another on so little is faster on the host
            table = onto(device, np.stack(self._locate(known, np.arange(steps))))  # one transfer
            return Window(*self._batches(self.order, table.unbind(), task.dtype))

        def work_out(known: Tensor, order: Tensor) -> list[Tensor]:
            return self._batches(order, self._locate(known, torch.arange(steps, device=device)), task.dtype)

        name = "window", steps, self.batch, self.group, task.dtype
        return Window(*call(name, work_out, onto(device, known), self.order))

    def _locate(self, known: Any, k: Any) -> list[Any]:
        """Of every step and client: where its samples start in `order`, how many there are, the width of a piece, the
        client's first sample, k, epoch, whether it is the last of its epoch, and the key. Of arrays or tensors."""
        steps, per_epoch, n, offset, noise, first, first_epoch = known
        k = k[:, None] + first
        epoch, j = k // per_epoch.clip(1), k % per_epoch.clip(1)
        count = self._count(n, j) * (k < steps)
        start = offset + epoch * n + j * self.batch * self.group
        # padding is the client's own first sample, so that what one client's data holds reaches no other
        own = offset.clip(0, len(self.order) - 1) + 0 * start
        k, epoch = k + first_epoch * per_epoch, epoch + first_epoch
        return [start, count, self._cut(count), own, k, epoch, j == per_epoch - 1, fold(noise, epoch, j)]

    def _count(self, n: Any, j: Any) -> Any:
        """Samples of the j-th step of an epoch."""
        return (n - j * self.batch * self.group).clip(0, self.batch * self.group)

    def _cut(self, count: Any) -> Any:
        """Width of each of the `group` pieces."""
        return _share(count, self.group).clip(0, self.batch)

    def _batches(self, order: Tensor, table: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """What is located, spread out over the samples of batches."""
        starts, counts, cuts, firsts, ks, epochs, last, keys = table
        b = torch.arange(self.batch, device=order.device)
        if self.group == 1:
            inside = b.expand(*starts.shape, self.batch)
            valid = inside < counts[..., None]
            rows = torch.where(valid, starts[..., None] + inside, firsts[..., None])
        else:
            piece = torch.arange(self.group, device=order.device)[:, None] * cuts[..., None, None]
            inside = piece + b
            valid = (b < cuts[..., None, None]) & (inside < counts[..., None, None])
            rows = torch.where(valid, starts[..., None, None] + inside, firsts[..., None, None])
        return [order[rows], valid.to(dtype), ks, epochs, last.bool(), keys]


class Ahead:
    """Windows of a schedule, worked out a number of steps ahead while they are used up."""

    def __init__(self, task: Task, timetable: Schedule, length: int, call: Call = plainly) -> None:
        self.task, self.timetable, self.length, self.call = task, timetable, length, call
        self.k = self.start = self.end = 0

    def look(self, prefix: int) -> None:
        """Work out the next window, for the first `prefix` clients."""
        self.start, self.end = self.k, min(int(self.timetable.steps.max()), self.k + self.length)
        clients = np.minimum(np.arange(prefix), len(self.timetable.steps) - 1)
        self.window = self.timetable.window(self.task, clients, self.start, self.end, self.call)

    def until(self, stop: int, prefix: int) -> Iterator[tuple[Window, int, int]]:
        """(window, first, last): the steps up to `stop` for the first `prefix` clients, which must not grow."""
        while self.k < stop:
            if self.k == self.end:
                self.look(prefix)
            last = min(stop, self.end)
            yield self.window, self.k - self.start, last - self.start
            self.k = last


def _share(count: Any, group: int) -> Any:
    """Of samples that are too few for `group` pieces, an even share."""
    return -(-count // group)


def batches_per_epoch(task: Task, phase: Phase, n: np.ndarray) -> np.ndarray:
    size = phase.batch or task.batch_size
    alone = bool(phase.train and task.network.buffers)  # BatchNorm has no statistics of one sample: skip such a batch
    if phase.group > 1:
        full = n // (size * phase.group)
        # the last piece of a group that was too small
        smallest = n - (phase.group - 1) * np.minimum(size, _share(n, phase.group))
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
    call: Call = plainly,
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
    order = call(("order", total), partial(_order, total), onto(device, np.stack(columns)), base)
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


def _order(total: int, segments: Tensor, base: Tensor) -> Tensor:
    """The rows of all segments (where they begin, sizes, keys where they are shuffled) one after another."""
    begins, sizes, *keys = segments
    first = torch.repeat_interleave(begins, sizes, output_size=total)
    if keys:
        position = permutations(keys[0], sizes, total)
    else:
        before = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes, output_size=total)
        position = torch.arange(total, device=base.device) - before
    return base[first + position]


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
