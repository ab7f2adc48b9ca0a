"""The rounds of a run: who takes part, what is sent, what comes back, how good everybody's model is."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Algorithm
from fedloom.core.keys import fold, rng, root
from fedloom.core.network import Params
from fedloom.core.task import Task
from fedloom.core.tree import Tree, mean, size_bytes, take, tree_map
from fedloom.engines.choose import choose, make_executor
from fedloom.engines.cohort import Cohort, Scores, global_slot, keep_stats, make_info, score_client
from fedloom.engines.plan import Plan
from fedloom.engines.store import Fresh, MemoryStore, Snapshot, Store

log = logging.getLogger("fedloom")

Engine = Literal["reference", "vectorized"]
# evaluated at once at most, clients and bytes of their state: memory must not grow with the number of clients
EVAL_CLIENTS, EVAL_BYTES = 4096, 1 << 30


@dataclass(frozen=True)
class Round:
    """What happened in a round. Scores are arrays (clients, 3): correct, summed loss, samples."""

    t: int
    cohort: np.ndarray
    evaluated: np.ndarray  # clients that the rows of scores belong to
    scores: dict[str, dict[str, np.ndarray]]  # view (pre, post, global) -> split -> scores; empty if not evaluated
    server: np.ndarray | None  # GM on D_CS
    reports: dict[str, np.ndarray]  # numbers of the method, a row per client of the cohort
    server_report: dict[str, float]
    bytes_down: int
    bytes_up: int
    train_seconds: float
    eval_seconds: float


class State(NamedTuple):
    """Everything a run needs to go on after a round."""

    t: int
    server: Tree
    post: dict[str, np.ndarray]
    store: Snapshot


class Rounds:
    """Holds the state of a run between rounds and advances it."""

    def __init__(
        self,
        alg: Algorithm,
        task: Task,
        seed: int,
        engine: Engine = "vectorized",
        plan: Plan | str = "auto",
        evaluated: np.ndarray | None = None,
        store: Callable[[Fresh, int], Store] = MemoryStore,
    ) -> None:
        """`evaluated` limits evaluation to some clients; `store` makes the place for the clients' private state."""
        self.alg, self.task, self.seed = alg, task, seed
        key = root(seed, "init")
        self.key = key
        self.t = 0
        task.init(key)  # drawn here, before the state of clients is made under vmap
        self.server = alg.init_server(task, key)
        self.constants = alg.constants(task, key)
        self.evaluated = np.arange(task.clients) if evaluated is None else np.sort(evaluated)
        self.first_stats = self._first_stats()
        self.server_stats: Tree = self.first_stats
        self.store = store(self._fresh, task.clients)
        self.post: dict[str, np.ndarray] = {}  # by split: scores of the last PM_post of those who are evaluated
        if engine == "reference":
            plan = Plan("per-client", scoring="per-client", reason="reference engine")
        if isinstance(plan, Plan):
            self.plan, self.executor = plan, make_executor(alg, task, seed, plan)
        else:
            first = self._cohort(self.sample(0)[:1] if alg.turns else self.sample(0), 0)
            self.plan, self.executor = choose(alg, task, seed, first, len(self.evaluated), plan)
        self.plan = replace(self.plan, device=task.data.device.type, threads=torch.get_num_threads())
        log.info("Execution plan: %s (%s)", self.plan.mode, self.plan.reason)

    def _fresh(self, ids: np.ndarray) -> Tree:
        """State of clients before their first participation."""
        who = torch.from_numpy(ids).to(self.task.data.device)
        return {
            "own": self._fresh_own(who),
            "stats": tree_map(lambda v: v.repeat(len(ids), *[1] * v.dim()), self.first_stats),
        }

    def _fresh_own(self, who: Tensor) -> Tree:
        keys = fold(root(self.seed, "client-init"), who)
        own = torch.func.vmap(lambda key: self.alg.init_client(self.task, self.key, key))(keys)
        return tree_map(lambda v: v.clone(memory_format=torch.contiguous_format), own)

    def _first_stats(self) -> Tree:
        """Running statistics by slot; which slots there are shows in what the first client would begin with."""
        task = self.task
        if not task.network.buffers:
            return {}
        ids = np.zeros(1, np.int64)
        index = torch.from_numpy(ids).to(task.data.device)
        info = take(make_info(task, self.seed, ids, 0, torch.ones(1, dtype=torch.bool)), 0)
        shared, parts = self.alg.download(task, self.server, index, 0, self.key)
        down = {**self.constants, **shared, **take(parts, 0)}
        return keep_stats(self.alg.begin(task, down, take(self._fresh_own(index), 0), info))

    def state(self) -> State:
        return State(self.t, self.server, self.post, self.store.snapshot())

    def restore(self, saved: State) -> None:
        self.t, self.server, self.post = saved.t, saved.server, saved.post
        self.store.restore(saved.store)

    def sample(self, t: int) -> np.ndarray:
        """The clients of round t, in ascending order."""
        n, ratio = self.task.clients, self.task.participation
        m = int(ratio) if ratio > 1 else max(1, math.floor(ratio * n + 1e-9))
        return np.sort(rng("sample", self.seed, t).choice(n, size=m, replace=False)).astype(np.int64)

    def _cohort(self, ids: np.ndarray, t: int) -> Cohort:
        index = torch.from_numpy(ids).to(self.task.data.device)
        shared, parts = self.alg.download(self.task, self.server, index, t, self.key)
        rows = self.store.read(ids)
        first = torch.from_numpy(self.store.trained[ids] == 0)
        info = make_info(self.task, self.seed, ids, t, first)
        return Cohort(ids, t, {**self.constants, **shared}, parts, rows["own"], rows["stats"], info)

    @torch.no_grad()
    def advance(self, evaluate: bool = True, cohort: np.ndarray | None = None) -> Round:
        """One round of training (of the sampled clients, or of a given cohort), then scores."""
        start = time.perf_counter()
        t, ids = self.t, self.sample(self.t) if cohort is None else np.sort(np.asarray(cohort, dtype=np.int64))
        turns = [ids[j : j + 1] for j in range(len(ids))] if self.alg.turns else [ids]
        down = up = 0
        told: list[dict[str, np.ndarray]] = []
        # between evaluations PM_post matters only for clients that may not train again before the next one
        splits = ("val", "test") if evaluate or len(ids) < self.task.clients else ()
        for turn in turns:
            d, u, report = self._train(turn, t, splits)
            down, up = down + d, up + u
            told.append(report)
        reports = {name: np.concatenate([one[name] for one in told]) for name in told[0] if told[0][name].ndim}
        server_report = {name: float(value) for name, value in told[-1].items() if not value.ndim}
        self.t = t + 1
        trained = time.perf_counter()
        scores, server = self.evaluate() if evaluate else ({}, None)
        now = time.perf_counter()
        return Round(
            t, ids, self.evaluated, scores, server, reports, server_report, down, up, trained - start, now - trained
        )

    def _train(self, ids: np.ndarray, t: int, splits: tuple[str, ...]) -> tuple[int, int, dict[str, np.ndarray]]:
        """Bytes sent down and up, and the numbers that clients and server report."""
        cohort = self._cohort(ids, t)
        done = self.executor.train(cohort, splits)
        self.store.write(ids, {"own": done.own, "stats": done.stats})
        self._remember(ids, done.scores)
        if done.stats:  # for a global model that is tested without a client
            self.server_stats = mean(done.stats, cohort.info.n)
        server = self.alg.aggregate(self.task, self.server, done.up, cohort.info, t, self.key)
        self.server = tree_map(lambda v: v.contiguous(), server)  # a resumed run has no other layout either
        common = size_bytes(cohort.shared) - size_bytes(self.constants)
        report = {**done.report, **self.alg.report_server(self.task, self.server, cohort.info)}
        numbers = {name: value.double().cpu().numpy() for name, value in report.items()}
        return common * len(ids) + self.alg.size_of_parts(cohort.parts), size_bytes(done.up), numbers

    def _remember(self, ids: np.ndarray, scores: Scores) -> None:
        """PM_post stays what it was until the client trains again, and so do its scores."""
        at = np.minimum(np.searchsorted(self.evaluated, ids), len(self.evaluated) - 1)
        here = self.evaluated[at] == ids
        for split, found in scores.items():
            if split not in self.post:
                self.post[split] = np.full((len(self.evaluated), 3), np.nan)
            self.post[split][at[here]] = found.double().cpu().numpy()[here]

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, dict[str, np.ndarray]], np.ndarray | None]:
        """Scores of the clients' models at the start of the next round: view -> split -> (clients, 3)."""
        params = self.alg.global_model(self.task, self.server)
        one = self._cohort(self.evaluated[:1], self.t)
        some = min(EVAL_CLIENTS, max(1, EVAL_BYTES // max(1, size_bytes((one.parts, one.own, one.stats)))))
        blocks = np.array_split(self.evaluated, -(-len(self.evaluated) // some))
        scored = [self._evaluate(block, params) for block in blocks]
        found = tree_map(lambda *rows: np.concatenate(rows), *scored)
        # a client that never trained has no PM_post: it is served by what it would start from
        if self.post:
            found["post"] = {s: np.where(np.isnan(rows), found["pre"][s], rows) for s, rows in self.post.items()}
        return found, self._score_server(params)

    def _evaluate(self, ids: np.ndarray, params: Params | None) -> dict[str, dict[str, np.ndarray]]:
        cohort = self._cohort(ids, self.t)
        found: dict[str, dict[str, np.ndarray]] = {}
        if params is not None:
            splits = ("train", "val", "test") if self.alg.pre_is_global else ("val", "test")
            found["global"] = _numpy(self.executor.score_global(params, cohort, splits))
        if self.alg.pre_is_global:
            found["pre"] = found["global"]
        else:
            found["pre"] = _numpy(self.executor.score_personal(cohort, ("train", "val", "test")))
        return found

    def _score_server(self, params: Tree | None) -> np.ndarray | None:
        found = self.alg.score_server(self.task, self.server, self.server_stats, self.key)
        rows = self.alg.server_test(self.task)
        if found is None and params is not None and rows is not None:
            slot = global_slot(self.alg, self.task, params, self.server_stats)
            found = score_client(self.task, lambda x: self.task.predict(slot, x).logits, rows)
        return None if found is None else found.double().cpu().numpy()


def _numpy(scores: Scores) -> dict[str, np.ndarray]:
    return {split: found.double().cpu().numpy() for split, found in scores.items()}
