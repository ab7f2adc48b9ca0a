"""What an executor is given and gives back: the clients of a round, stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Info, Slot
from fedloom.core.keys import fold, root
from fedloom.core.network import Params
from fedloom.core.task import Task
from fedloom.core.transfer import onto
from fedloom.core.tree import Tree, take, tree_map
from fedloom.engines.plan import Plan
from fedloom.engines.replayed import Replayed
from fedloom.engines.workers import proceed

EVAL_BATCH = {"cpu": 1 << 9, "cuda": 1 << 11}  # samples that one model scores at once
EVAL_IMAGES = 128  # of images on a CPU: what layers give for more is new memory every time, which costs a quarter
EVAL_LOGITS = 1 << 24  # at once; a language model has a logit for every position and word
Scores = dict[str, Tensor]  # split -> (correct, summed loss, samples) per client


@dataclass(frozen=True)
class Cohort:
    """Clients that do the same thing in the same round, of one run or of several. Everything but `shared` and `by_run`
    has a row per client."""

    ids: np.ndarray
    t: int
    shared: Tree  # constants and what all clients receive
    parts: Tree  # what each client receives for itself
    own: Tree  # private state
    stats: Tree  # running statistics, by slot
    info: Info
    seeds: np.ndarray  # of each client's run; objects, since a seed may have any size
    run: np.ndarray  # which of several runs
    scored: np.ndarray  # whose PM_post anybody will ask for
    by_run: Mapping[int, Tree] = field(default_factory=dict)  # what all clients of a run share, where there are several
    coming: np.ndarray | None = None  # the clients of the next round, in the same places of the same runs

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, index: np.ndarray) -> Cohort:
        pick = onto(self.info.n.device, index)
        parts, own, stats, info = (take(v, pick) for v in (self.parts, self.own, self.stats, self.info))
        run = self.run[index]
        if self.by_run:
            parts = {**self._received(run), **parts}
        ids, seeds, scored = self.ids[index], self.seeds[index], self.scored[index]
        return Cohort(ids, self.t, self.shared, parts, own, stats, info, seeds, run, scored)

    def _received(self, run: np.ndarray) -> Tree:
        """What clients of these runs share with others of theirs, a row per client."""
        which, row = np.unique(run, return_inverse=True)
        at = onto(self.info.n.device, row)
        return tree_map(lambda *each: torch.stack(each)[at], *(self.by_run[r] for r in which.tolist()))


class Outcome(NamedTuple):
    own: Tree
    up: Tree
    stats: Tree
    report: Tree
    scores: Scores  # of PM_post; NaN where nobody asks


class Executor(Protocol):
    """Carries out what a cohort does, one client after another or stacked."""

    @property
    def plan(self) -> Plan: ...
    @property
    def replayed(self) -> Replayed: ...
    def train(self, cohort: Cohort, splits: tuple[str, ...]) -> Outcome: ...
    def score_personal(self, cohort: Cohort, splits: tuple[str, ...]) -> Scores: ...
    def score_global(self, params: Params, cohort: Cohort, splits: tuple[str, ...]) -> Scores: ...
    def serving(self, population: Task) -> Executor:
        """The same for clients of another task, of which methods see nothing but the clients at hand; all that was
        got ready serves them, too."""


def make_info(task: Task, seed: int, ids: np.ndarray, t: int, first: np.ndarray) -> Info:
    key = fold(root(seed, "client"), ids, t)
    table = np.stack([ids, task.data.splits["train"].sizes[ids], np.full(len(ids), t), first, key])
    who, n, now, is_first, key = onto(task.data.device, table).unbind()
    return Info(who, n, task.data.counts(ids), now, is_first.bool(), key)


# Running statistics belong to the client and are never sent. Methods do not handle them: between rounds they are kept
# here, by the name of the slot in `work`.


def keep_stats(work: Tree) -> Tree:
    return {name: v.buffers for name, v in work.items() if isinstance(v, Slot) and v.buffers}


def put_stats(work: Tree, stats: Tree) -> Tree:
    return {**work, **{name: work[name]._replace(buffers=kept) for name, kept in stats.items()}}


def global_slot(alg: Algorithm, task: Task, params: Params, stats: Tree) -> Slot:
    return Slot(params, stats[alg.global_slot] if stats else task.network.buffers, {})


def eval_rows(task: Task, most: int) -> int:
    """Samples that are scored at once: `most`, or as many as memory has room for."""
    return max(1, min(most, EVAL_LOGITS // task.network.logits))


def eval_batch(task: Task, most: int | None = None) -> int:
    """The same for one model alone."""
    kind = task.data.device.type
    most = most or EVAL_BATCH[kind]
    return eval_rows(task, min(most, EVAL_IMAGES) if kind == "cpu" and task.data.x.dim() == 4 else most)


def score_client(task: Task, predict: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Scores of one model on the given samples, without padding."""
    data = task.data
    total = torch.zeros(3, dtype=task.dtype, device=data.device)
    for some in torch.split(rows, eval_batch(task)):
        proceed()
        everyone = torch.ones(len(some), dtype=task.dtype, device=data.device)
        total = total + task.score(predict(data.samples(some)), data.y[some], everyone).sum(0)
    return total


def stack(trees: list[Any]) -> Tree:
    return tree_map(lambda *rows: torch.stack(rows).contiguous(), *trees)
