"""The rounds of a run: who takes part, what is sent, what comes back, how good everybody's model is."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Algorithm
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, rng, root
from fedloom.core.network import Params
from fedloom.core.task import Task
from fedloom.core.transfer import fetch, onto
from fedloom.core.tree import Tree, leaves, mean, size_bytes, take, tree_map
from fedloom.engines.choose import choose, make_executor
from fedloom.engines.cohort import Cohort, Executor, Scores, global_slot, keep_stats, make_info, score_client
from fedloom.engines.lockstep import CLOCK, Request, Steps, lockstep
from fedloom.engines.plan import Plan
from fedloom.engines.store import Fresh, MemoryStore, Snapshot, Store

log = logging.getLogger("fedloom")

Engine = Literal["reference", "vectorized"]
REFERENCE = Plan("per-client", scoring="per-client", reason="reference engine")
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
    unseen: np.ndarray  # clients that never take part, of whom these are the scores on test data:
    unseen_scores: dict[str, np.ndarray]  # view (new, joined) -> scores
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
        plan: Plan | str | None = "auto",
        evaluated: np.ndarray | None = None,
        store: Callable[[Fresh, int], Store] = MemoryStore,
        unseen: np.ndarray | None = None,
        join_rounds: int = 1,
    ) -> None:
        """`evaluated` limits evaluation to some clients, `unseen` to some of those who are held out; `store` makes the
        place for the clients' private state. Who is held out joins for `join_rounds` rounds when it is evaluated.
        Without a plan it waits for one (`follow`)."""
        self.everyone = task
        task = replace(task, data=task.data.participants())  # all that a method ever sees
        self.alg, self.task, self.seed, self.join_rounds = alg, task, seed, join_rounds
        self.number, self.companions = 0, 1  # which of how many runs that go on together
        self.label = ""  # which one, in words
        key = root(seed, "init")
        self.key = key
        self.t = 0
        self.diverged: set[int] = set()
        task.init(key)  # drawn here, before the state of clients is made under vmap
        self.server = alg.init_server(task, key)
        self.constants = alg.constants(task, key)
        self.evaluated = np.arange(task.clients) if evaluated is None else np.sort(evaluated)
        held_out = np.arange(task.clients, task.clients + self.everyone.data.held_out)
        self.unseen = held_out if unseen is None else np.sort(unseen)
        self.first_stats = self._first_stats()
        self.server_stats: Tree = self.first_stats
        if len(self.unseen):
            self._check_newcomers()
        self.store = store(self._fresh, task.clients)
        self.post: dict[str, np.ndarray] = {}  # by split: scores of the last PM_post of those who are evaluated
        if engine == "reference":
            plan = REFERENCE
        if isinstance(plan, Plan):
            self.follow(plan, make_executor(alg, task, plan))
        elif plan is not None:
            self.follow(*choose(alg, task, self.first_cohort(), len(self.evaluated), plan))
        if plan is not None:
            log.info("Execution plan: %s (%s)", self.plan.mode, self.plan.reason)

    def follow(self, plan: Plan, executor: Executor) -> None:
        self.chosen = replace(plan, device=self.task.data.device.type, threads=torch.get_num_threads())
        self.executor = executor

    @property
    def plan(self) -> Plan:
        """As it is carried out now: where memory was short, with less at once than was chosen."""
        now = self.executor.plan
        return replace(self.chosen, chunk=now.chunk, rows=now.rows)

    def first_cohort(self) -> Cohort:
        """Such as an executor will be given."""
        ids = self.sample(0)
        return self._cohort(ids[:1] if self.alg.turns else ids, 0)

    def _fresh(self, ids: np.ndarray) -> Tree:
        """State of clients before their first participation."""
        who = onto(self.task.data.device, ids)
        return {"own": self._fresh_own(who), "stats": _repeated(self.first_stats, len(ids))}

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
        index = onto(task.data.device, ids)
        info = take(make_info(task, self.seed, ids, 0, np.ones(1, bool)), 0)
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
        return self._meeting(self.server, ids, t, self.store.read(ids), self.store.trained[ids] == 0)

    def _meeting(self, server: Tree, ids: np.ndarray, t: int, rows: Tree, first: np.ndarray) -> Cohort:
        info = make_info(self.everyone, self.seed, ids, t, first)
        shared, parts = self.alg.download(self.task, server, info.id, t, self.key)
        seeds, run = np.full(len(ids), self.seed, dtype=object), np.full(len(ids), self.number)
        down, scored = {**self.constants, **shared}, np.ones(len(ids), bool)
        return Cohort(ids, t, down, parts, rows["own"], rows["stats"], info, seeds, run, scored)

    @torch.no_grad()
    def advance(self, evaluate: bool = True, cohort: np.ndarray | None = None) -> Round:
        """One round of training (of the sampled clients, or of a given cohort), then scores."""
        return self._alone(self.steps(evaluate, cohort))

    def _alone(self, steps: Steps) -> Any:
        return lockstep([steps], lambda _, requests: [self.answer(request) for request in requests])[0]

    def answer(self, request: Request) -> Any:
        return request.carry_out(self.executor.serving(self.everyone) if request.newcomers else self.executor)

    def steps(self, evaluate: bool = True, cohort: np.ndarray | None = None) -> Steps:
        """`advance`, for somebody who answers what it asks for."""
        start = yield CLOCK
        t, ids = self.t, self.sample(self.t) if cohort is None else np.sort(np.asarray(cohort, dtype=np.int64))
        turns = [ids[j : j + 1] for j in range(len(ids))] if self.alg.turns else [ids]
        down = up = 0
        told: list[dict[str, np.ndarray]] = []
        stats: list[tuple[np.ndarray, Tree]] = []
        # between evaluations PM_post matters only for clients that may not train again before the next one
        splits = ("val", "test") if evaluate or len(ids) < self.task.clients else ()
        for turn in turns:
            d, u, report, kept = yield from self._train(turn, t, splits)
            down, up = down + d, up + u
            told.append(report)
            stats.append(kept)
        sound = np.concatenate([whose for whose, _ in stats])
        if self.first_stats and len(sound):  # for whoever has none: a global model without a client, a newcomer
            n = onto(self.task.data.device, self.task.data.splits["train"].sizes[sound])
            self.server_stats = mean(tree_map(lambda *rows: torch.cat(rows), *(kept for _, kept in stats)), n)
        reports = {name: np.concatenate([one[name] for one in told]) for name in told[0] if told[0][name].ndim}
        server_report = {name: float(value) for name, value in told[-1].items() if not value.ndim}
        self.t = t + 1
        trained = yield CLOCK
        scores, server = (yield from self._evaluation()) if evaluate else ({}, None)
        unseen_scores = (yield from self._joining()) if evaluate and len(self.unseen) else {}
        now = yield CLOCK
        return Round(
            t, ids, self.evaluated, scores, server, self.unseen, unseen_scores, reports, server_report, down, up,
            trained - start, now - trained,
        )  # fmt: skip

    def _train(self, ids: np.ndarray, t: int, splits: tuple[str, ...]) -> Steps:
        """Bytes sent down and up, the numbers that clients and server report, and the running statistics of those who
        did not diverge."""
        at = np.minimum(np.searchsorted(self.evaluated, ids), len(self.evaluated) - 1)
        scored = self.evaluated[at] == ids
        cohort = replace(self._cohort(ids, t), scored=scored, coming=None if self.alg.turns else self.sample(t + 1))
        done = yield Request("train", cohort, splits)
        self.store.write(ids, {"own": done.own, "stats": done.stats})
        # here, and nowhere else in a round without evaluation, it waits for the device
        finite, scores, report = fetch((self._finite(done.up, len(ids)), _double(done.scores), _double(done.report)))
        self._remember(at[scored], {split: found[scored] for split, found in scores.items()})
        self._warn(ids[~finite], t)
        up, info, kept = done.up, cohort.info, done.stats
        if not finite.all():
            up, info, kept = take((up, info, kept), onto(self.task.data.device, np.flatnonzero(finite)))
        if finite.any():
            server = self.alg.aggregate(self.task, self.server, up, info, t, self.key)
            self.server = tree_map(lambda v: v.contiguous(), server)  # a resumed run has no other layout either
        common = size_bytes(cohort.shared) - size_bytes(self.constants)
        told = {**report, **fetch(_double(self.alg.report_server(self.task, self.server, cohort.info)))}
        down = common * len(ids) + self.alg.size_of_parts(cohort.parts)
        return down, size_bytes(done.up), told, (ids[finite], kept)

    def _finite(self, up: Tree, clients: int) -> Tensor:
        """Which rows of an upload the server uses: a client that diverged must not spoil it for all others."""
        parts = [v.reshape(clients, -1) for v in leaves(up) if v.is_floating_point() and v.numel()]
        if self.alg.takes_diverged or not parts:
            return torch.ones(clients, dtype=torch.bool, device=self.task.data.device)
        return self.executor.replayed("finite", _finite_rows, parts)

    def _warn(self, diverged: np.ndarray, t: int) -> None:
        for i in diverged.tolist():
            if i not in self.diverged:  # once is enough
                log.warning(
                    "Client %d diverged in round %d%s: what it sends is left out while it is no number.",
                    i, t + 1, self.label,
                )  # fmt: skip
            self.diverged.add(i)

    def _remember(self, at: np.ndarray, scores: dict[str, np.ndarray]) -> None:
        """PM_post stays what it was until the client trains again, and so do its scores; `at` are places among those
        who are evaluated."""
        for split, found in scores.items():
            if split not in self.post:
                self.post[split] = np.full((len(self.evaluated), 3), np.nan)
            self.post[split][at] = found

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, dict[str, np.ndarray]], np.ndarray | None]:
        """Scores of the clients' models at the start of the next round: view -> split -> (clients, 3)."""
        return self._alone(self._evaluation())

    def _evaluation(self) -> Steps:
        params = self.alg.global_model(self.task, self.server)
        scored = []
        for block in self._blocks(self.evaluated, self._cohort(self.evaluated[:1], self.t)):
            scored.append((yield from self._evaluate(block, params)))
        found, server = fetch((tree_map(lambda *rows: torch.cat(rows), *scored), self._score_server(params)))
        # a client that never trained has no PM_post: it is served by what it would start from
        if self.post:
            found["post"] = {s: np.where(np.isnan(rows), found["pre"][s], rows) for s, rows in self.post.items()}
        return found, server

    def _evaluate(self, ids: np.ndarray, params: Params | None) -> Steps:
        cohort = self._cohort(ids, self.t)
        found: dict[str, Scores] = {}
        if params is not None:
            splits = ("train", "val", "test") if self.alg.pre_is_global else ("val", "test")
            found["global"] = _double((yield Request("score_global", cohort, splits, params)))
        if self.alg.pre_is_global:
            found["pre"] = found["global"]
        else:
            found["pre"] = _double((yield Request("score_personal", cohort, ("train", "val", "test"))))
        return found

    def _joining(self) -> Steps:
        """Scores, on test data, of clients that never took part: the model they are given when they come (`new`), and
        what they have after taking part in `join_rounds` rounds (`joined`). Each joins as if it came alone: the server
        learns nothing from it but what it keeps for this client, and nothing of it stays."""
        server = self._admitted()
        found = []
        for block in self._blocks(self.unseen, self._newcomers(server, self.unseen[:1])):
            found.append((yield from self._join(server, block)))
        return fetch(_double({view: torch.cat([one[view] for one in found]) for view in found[0]}))

    def _join(self, server: Tree, ids: np.ndarray) -> Steps:
        cohort = self._newcomers(server, ids)
        found = {"new": (yield Request("score_personal", cohort, ("test",), newcomers=True))["test"]}
        done = yield Request("train", cohort, ("test",), newcomers=True)
        for _ in range(self.join_rounds - 1):
            server = self.alg.welcome(self.task, server, done.up, cohort.info, cohort.t, self.key)
            rows = {"own": done.own, "stats": done.stats}
            cohort = self._meeting(server, ids, cohort.t + 1, rows, np.zeros(len(ids), bool))
            done = yield Request("train", cohort, ("test",), newcomers=True)
        return {**found, "joined": done.scores["test"]}

    def _newcomers(self, server: Tree, ids: np.ndarray) -> Cohort:
        who = onto(self.task.data.device, ids)
        rows = {"own": self._fresh_own(who), "stats": _repeated(self.server_stats, len(ids))}
        return self._meeting(server, ids, self.t, rows, np.ones(len(ids), bool))

    def _admitted(self) -> Tree:
        n, data = self.task.clients, self.everyone.data
        ids = torch.arange(n, n + data.held_out, device=data.device)
        return self.alg.admit(self.task, self.server, ids, self.key)

    def _check_newcomers(self) -> None:
        try:
            self._newcomers(self._admitted(), self.unseen[-1:])
        except IndexError:
            raise UserError(
                f"{self.alg.name} keeps something per client at the server, but nothing for those who are held out; "
                "give the method a function 'admit', or set holdout_clients=0."
            ) from None

    def _blocks(self, ids: np.ndarray, one: Cohort) -> list[np.ndarray]:
        """Clients in pieces that fit memory together with those of other runs; `one` is the state of one of them."""
        some = min(EVAL_CLIENTS, EVAL_BYTES // max(1, size_bytes((one.parts, one.own, one.stats)))) // self.companions
        return np.array_split(ids, -(-len(ids) // max(1, some)))

    def _score_server(self, params: Tree | None) -> Tensor | None:
        found = self.alg.score_server(self.task, self.server, self.server_stats, self.key)
        rows = self.alg.server_test(self.task)
        if found is None and params is not None and rows is not None:
            slot = global_slot(self.alg, self.task, params, self.server_stats)
            found = score_client(self.task, lambda x: self.task.predict(slot, x).logits, rows)
        return None if found is None else found.double()


def _repeated(tree: Tree, rows: int) -> Tree:
    return tree_map(lambda v: v.repeat(rows, *[1] * v.dim()), tree)


def _finite_rows(parts: list[Tensor]) -> Tensor:
    """Which rows are finite in all parts."""
    return torch.stack([end for rows in parts for end in rows.aminmax(dim=1)]).isfinite().all(0)  # NaN is both ends


def _double(numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in numbers.items()}
