"""Which samples every client uses in which step of a phase, computed for a whole cohort at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Batch, Draw, Phase
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, permutations, roots
from fedloom.core.task import Task
from fedloom.device.transfer import to_device

if TYPE_CHECKING:
    from fedloom.engine.cohort import Cohort

STEPS_AT_ONCE = 256  # of one client, whose batches are computed at once
Call = Callable[..., Any]  # (name, f, *args) -> f(*args), see `FunctionCache`


def call_directly(name: Hashable, f: Callable[..., Any], *args: Any) -> Any:
    """f(*args), without a trace."""
    return f(*args)


class Window(NamedTuple):
    """Padded batches of some steps (first axis) for some clients (second axis). Columns as in `Batch`, with row indices
    into all samples in place of x and y."""

    rows: Tensor
    mask: Tensor
    k: Tensor
    epoch: Tensor
    last: Tensor
    key: Tensor


@dataclass(frozen=True)
class Schedule:
    """The batches of a phase. In step k, client i uses `count` samples of `order` from `start` on (see `_locate`)."""

    steps: np.ndarray  # K_i, batches of this phase per client
    per_epoch: np.ndarray  # batches per epoch
    n: np.ndarray  # samples per epoch
    offset: np.ndarray  # where a client's samples begin in `order`
    order: Tensor  # row indices in the order of use: client after client, epoch after epoch
    noise: np.ndarray  # random key per client, for draws inside a step
    batch: int
    group: int
    first_epoch: int  # epochs before this schedule (a phase with a stopping condition is scheduled epoch by epoch)

    def rows(self, order: np.ndarray) -> Schedule:
        """The schedule with its clients in another order."""
        steps, per_epoch, n, offset = (v[order] for v in (self.steps, self.per_epoch, self.n, self.offset))
        return replace(self, steps=steps, per_epoch=per_epoch, n=n, offset=offset, noise=self.noise[order])

    def visits(self) -> np.ndarray:
        """(clients, 2): steps of every client, and samples that it uses in them, as often as it uses them."""
        epochs, rest = np.divmod(self.steps, np.maximum(self.per_epoch, 1))
        of_epoch, of_rest = (np.minimum(self.n, k * self.batch * self.group) for k in (self.per_epoch, rest))
        return np.stack([self.steps, epochs * of_epoch + of_rest], 1)

    def batches(self, task: Task, client: int) -> Iterator[Batch]:
        """The batches of one client, in order, without padding."""
        for first in range(0, int(self.steps[client]), STEPS_AT_ONCE):
            last = min(first + STEPS_AT_ONCE, int(self.steps[client]))
            at = np.arange(first, last) % self.per_epoch[client]
            widths = self._width(self._count(self.n[client], at)).tolist()
            columns = [v[:, 0].unbind() for v in self.window(task, np.array([client]), first, last)]
            for width, (rows, mask, *rest) in zip(widths, zip(*columns, strict=True), strict=True):
                rows = rows[..., :width]
                yield Batch(task.data.samples(rows), task.data.y[rows], mask[..., :width], *rest)

    def full_batch(self, task: Task) -> Batch:
        """A full batch of the first client, for tracing; padding is its first sample."""
        rows, mask, *rest = (v[0, 0] for v in self.window(task, np.zeros(1, np.int64), 0, 1))
        return Batch(task.data.samples(rows), task.data.y[rows], torch.ones_like(mask), *rest)

    def window(self, task: Task, clients: np.ndarray, first: int, last: int, call: Call = call_directly) -> Window:
        """Batches of the steps from `first` to `last` for the given clients, padded to full size. Batches beyond a
        client's last step have arbitrary contents."""
        device, steps = task.data.device, last - first
        known = np.stack([self.steps, self.per_epoch, self.n, self.offset, self.noise])[:, clients]
        known = np.concatenate([known, np.full((2, len(clients)), [[first], [self.first_epoch]])])
        if call is call_directly:  # small integer operations are faster in NumPy
            table = to_device(device, np.stack(self._locate(known, np.arange(steps))))  # one transfer
            return Window(*self._batches(self.order, table.unbind(), task.dtype))

        def compute(known: Tensor, order: Tensor) -> list[Tensor]:
            return self._batches(order, self._locate(known, torch.arange(steps, device=device)), task.dtype)

        name = "window", steps, self.batch, self.group, task.dtype
        return Window(*call(name, compute, to_device(device, known), self.order))

    def _locate(self, known: Any, k: Any) -> list[Any]:
        """For every step and client: start in `order`, number of samples, samples per batch of a group, the client's
        first sample, k, epoch, whether it is the last batch of its epoch, random key. Works on arrays and on
        tensors."""
        steps, per_epoch, n, offset, noise, first, first_epoch = known
        k = k[:, None] + first
        epoch, j = k // per_epoch.clip(1), k % per_epoch.clip(1)
        count = self._count(n, j) * (k < steps)
        start = offset + epoch * n + j * self.batch * self.group
        # padding repeats the client's first sample, so that no other client's data gets in
        padding = offset.clip(0, len(self.order) - 1) + 0 * start
        k, epoch = k + first_epoch * per_epoch, epoch + first_epoch
        return [start, count, self._width(count), padding, k, epoch, j == per_epoch - 1, fold(noise, epoch, j)]

    def _count(self, n: Any, j: Any) -> Any:
        """Number of samples in the j-th step of an epoch."""
        return (n - j * self.batch * self.group).clip(0, self.batch * self.group)

    def _width(self, count: Any) -> Any:
        """Samples in each of the `group` batches of a step."""
        return _even_share(count, self.group).clip(0, self.batch)

    def _batches(self, order: Tensor, table: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The columns of `Window`, from what `_locate` returns."""
        starts, counts, widths, firsts, ks, epochs, last, keys = table
        b = torch.arange(self.batch, device=order.device)
        if self.group == 1:
            inside = b.expand(*starts.shape, self.batch)
            valid = inside < counts[..., None]
            rows = torch.where(valid, starts[..., None] + inside, firsts[..., None])
        else:
            start_of = torch.arange(self.group, device=order.device)[:, None] * widths[..., None, None]
            inside = start_of + b
            valid = (b < widths[..., None, None]) & (inside < counts[..., None, None])
            rows = torch.where(valid, starts[..., None, None] + inside, firsts[..., None, None])
        return [order[rows], valid.to(dtype), ks, epochs, last.bool(), keys]


class BatchWindows:
    """The batches of a schedule, computed some steps ahead of their use."""

    def __init__(self, task: Task, schedule: Schedule, length: int, call: Call = call_directly) -> None:
        self.task, self.schedule, self.length, self.call = task, schedule, length, call
        self.k = self.start = self.end = 0

    def compute(self, prefix: int) -> None:
        """Compute the next window, for the first `prefix` clients."""
        self.start, self.end = self.k, min(int(self.schedule.steps.max()), self.k + self.length)
        clients = np.minimum(np.arange(prefix), len(self.schedule.steps) - 1)
        self.window = self.schedule.window(self.task, clients, self.start, self.end, self.call)

    def until(self, stop: int, prefix: int) -> Iterator[tuple[Window, int, int]]:
        """Yields (window, first, last): the steps up to `stop` for the first `prefix` clients; `prefix` must not
        grow."""
        while self.k < stop:
            if self.k == self.end:
                self.compute(prefix)
            last = min(stop, self.end)
            yield self.window, self.k - self.start, last - self.start
            self.k = last


def _even_share(count: Any, group: int) -> Any:
    """Samples per batch, where they are split evenly over the batches of a group."""
    return -(-count // group)


def batches_per_epoch(task: Task, phase: Phase, n: np.ndarray) -> np.ndarray:
    """Number of batches (or groups of batches) in an epoch over n samples."""
    size = phase.batch or task.batch_size
    skip_one = bool(phase.train and task.network.buffers)  # BatchNorm has no variance of one sample: skip such a batch
    if phase.group > 1:
        full = n // (size * phase.group)
        # the last batch of a group that was split evenly
        smallest = n - (phase.group - 1) * np.minimum(size, _even_share(n, phase.group))
        return np.where(full == 0, phase.halve & (smallest > skip_one), full * (size > skip_one))
    if skip_one:
        return -(-n // size) - (n % size == 1) if size > 1 else np.zeros_like(n)
    return -(-n // size)


def build(
    task: Task,
    phase: Phase,
    seeds: np.ndarray | int,
    ids: np.ndarray,
    t: int,
    epochs: np.ndarray,
    first_epoch: int = 0,
    run: np.ndarray | int = 0,
    call: Call = call_directly,
) -> Schedule:
    """The schedule of one phase for the clients `ids`: client j makes `epochs[j]` epochs in the run `run[j]`, whose
    seed is `seeds[j]`."""
    device = task.data.device
    seeds, run = np.broadcast_to(np.asarray(seeds, dtype=object), ids.shape), np.broadcast_to(run, ids.shape)
    base, starts, n = _selected(task, phase, seeds, ids, t, run)
    per_epoch = batches_per_epoch(task, phase, n)
    if phase.steps is None:
        steps = epochs * per_epoch
    else:
        steps = np.where(per_epoch > 0, phase.steps, 0)
        epochs = -(-steps // np.maximum(per_epoch, 1))
    client = np.repeat(np.arange(len(ids)), epochs)  # one segment per client and epoch
    epoch = np.arange(len(client)) - np.repeat(np.cumsum(epochs) - epochs, epochs) + first_epoch
    visits = epochs * n
    total = int(visits.sum())
    # keys are computed on the host: there are so few that launching GPU kernels would take longer
    host, columns = torch.device("cpu"), [starts[client], n[client]]
    if phase.shuffle:
        keys = fold(roots(seeds, "batch", host).numpy(), ids, t)
        columns.append(fold(keys[client], epoch))
    order = call(("order", total), partial(_order, total), to_device(device, np.stack(columns)), base)
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


def for_cohort(task: Task, phase: Phase, cohort: Cohort, epochs: int | np.ndarray) -> Schedule:
    """The schedule of a cohort in which every client makes so many epochs."""
    passes = np.full(len(cohort), epochs)
    return build(task, phase, cohort.seeds, cohort.ids, cohort.t, passes, run=cohort.run)


def _order(total: int, segments: Tensor, base: Tensor) -> Tensor:
    """Row indices of all segments, concatenated; `segments` has their begins, sizes and, to shuffle, random keys."""
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
    """The rows that a phase uses: flat row indices, where each client's begin, how many it has."""
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
    return train.flat[to_device(train.flat.device, positions)], np.cumsum(sizes) - sizes, sizes
