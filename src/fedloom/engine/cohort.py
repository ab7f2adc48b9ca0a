"""What an executor receives and returns: the clients of a round, stacked along the first axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fedloom.core.algorithm import Algorithm, Info, Slot
from fedloom.core.keys import fold, root
from fedloom.core.task import Task
from fedloom.core.tree import Params, Tree, take, tree_map
from fedloom.device.transfer import to_device
from fedloom.engine.plan import Plan

Scores = dict[str, torch.Tensor]  # split -> (clients, 3): correct predictions, summed loss, samples


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Clients that do the same thing in the same round, of one run or of several stacked runs.

    Everything but `shared`, `shared_by_run` and `next_ids` has one row per client.
    """

    ids: np.ndarray
    t: int
    shared: Tree  # constants and what all clients receive
    parts: Tree  # what each client receives individually
    client_state: Tree  # private state
    stats: Tree  # running statistics, by slot
    info: Info
    seeds: np.ndarray  # seed of each client's run; Python integers, since a seed may have any size
    run: np.ndarray  # index of each client's run
    scored: np.ndarray  # True where PM_post is scored
    shared_by_run: Mapping[int, Tree] = field(default_factory=dict)  # `shared`, where runs differ in it
    next_ids: np.ndarray | None = None  # the clients of the next round, in the same order of runs

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, index: np.ndarray) -> Cohort:
        """The clients at the given positions."""
        pick = to_device(self.info.n.device, index)
        arrays = {name: getattr(self, name)[index] for name in ("ids", "seeds", "run", "scored")}
        trees = {name: take(getattr(self, name), pick) for name in ("parts", "client_state", "stats", "info")}
        if self.shared_by_run:
            trees["parts"] = {**self._shared_rows(arrays["run"]), **trees["parts"]}
        return replace(self, **arrays, **trees, shared_by_run={}, next_ids=None)

    def _shared_rows(self, run: np.ndarray) -> Tree:
        """`shared` of each client's run, one row per client."""
        runs, position = np.unique(run, return_inverse=True)
        at = to_device(self.info.n.device, position)
        return tree_map(lambda *each: torch.stack(each)[at], *(self.shared_by_run[r] for r in runs.tolist()))


class Outcome(NamedTuple):
    """What training a cohort gave, one row per client."""

    client_state: Tree
    up: Tree
    stats: Tree
    report: Tree
    scores: Scores  # of PM_post; NaN for clients that are not scored
    visits: torch.Tensor  # (clients, phases, 2): steps, and samples used in them
    models: Tree = {}  # PM_post, if asked for


class Evaluated(NamedTuple):
    """What evaluating a cohort gave, one row per client."""

    scores: Scores
    models: Tree = {}  # the models that were scored, if asked for


class Executor(Protocol):
    """Computes what the clients of a cohort do: one after another, or stacked."""

    plan: Plan

    @property
    def call(self) -> Callable[..., Any]:
        """call(name, f, *args) is f(*args), replayed from a traced graph where that pays."""

    def train(self, cohort: Cohort, splits: tuple[str, ...], models: bool = False) -> Outcome:
        """Train the cohort for one round; scores PM_post on `splits`, and returns it if `models`."""

    def score_personal(self, cohort: Cohort, splits: tuple[str, ...], models: bool = False) -> Evaluated:
        """Scores of PM_pre on `splits`, and PM_pre itself if `models`; nothing is kept."""

    def score_global(self, params: Params, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        """Scores of one global model on the samples of every client of the cohort."""

    def logits(self, models: Tree, ids: np.ndarray, split: str) -> torch.Tensor:
        """Outputs of personal models, one row per sample of `split`, client after client."""

    def global_logits(self, params: Params, cohort: Cohort, split: str) -> torch.Tensor:
        """Outputs of one global model, one row per sample of `split`, client after client."""


def make_info(task: Task, seed: int, ids: np.ndarray, t: int, first: np.ndarray) -> Info:
    """`Info` of the given clients in round t, stacked."""
    key = fold(root(seed, "client"), ids, t)
    table = np.stack([ids, task.data.splits["train"].sizes[ids], np.full(len(ids), t), first, key])
    client, n, now, is_first, key = to_device(task.data.device, table).unbind()
    return Info(client, n, task.data.counts(ids), now, is_first.bool(), key)


# Running statistics (BatchNorm) belong to the client and are never sent. Algorithms do not handle them: between rounds
# the engine keeps them, by the name of the slot in `work`.


def get_stats(work: Tree) -> Tree:
    """Running statistics of all slots in `work`, by slot."""
    return {name: v.buffers for name, v in work.items() if isinstance(v, Slot) and v.buffers}


def with_stats(work: Tree, stats: Tree) -> Tree:
    """`work` with the given running statistics in its slots."""
    return {**work, **{name: work[name]._replace(buffers=kept) for name, kept in stats.items()}}


def global_slot(alg: Algorithm, task: Task, params: Params, stats: Tree) -> Slot:
    """The global model with a client's running statistics."""
    return Slot(params, stats[alg.global_slot] if stats else task.network.buffers, {})


def repeated(tree: Tree, rows: int) -> Tree:
    """A stacked tree of equal rows."""
    return tree_map(lambda v: v.repeat(rows, *[1] * v.dim()), tree)
