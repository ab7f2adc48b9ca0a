"""The clients' side of a run, as the server sees it.

The server sends a `ClientRequest` and receives `ClientReplies`; nothing else crosses between them. Private state,
running statistics and samples stay behind that line: `LocalClients` keeps them in this process, sites keep them on
machines of their own (`fedloom.deployment`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm, Info
from fedloom.core.keys import Key, fold, root
from fedloom.core.task import Task
from fedloom.core.tree import Params, Tree, leaves, size_bytes, take, tree_map
from fedloom.device.transfer import to_device, to_numpy
from fedloom.engine.budget import step_costs
from fedloom.engine.client_store import ClientStore, InitialRows
from fedloom.engine.cohort import Cohort, Evaluated, Executor, Outcome, Scores, get_stats, make_info, repeated
from fedloom.engine.privacy import keyed_noise, protected
from fedloom.engine.screening import update_norms
from fedloom.metrics.predictions import Predictions
from fedloom.metrics.registry import Metric

MakeStore = Callable[[InitialRows, int], ClientStore]


@dataclass(frozen=True, kw_only=True)
class ClientRequest:
    """What the server asks of some clients in a round: all that leaves the server."""

    job: Literal["train", "evaluate"]
    ids: np.ndarray
    t: int
    shared: Tree  # download for all clients
    parts: Tree  # individual downloads, one row per client
    splits: tuple[str, ...]  # what to score: PM_post after training, or PM_pre
    scored: np.ndarray | None = None  # after training, which clients to score; None for all
    global_params: Params | None = None  # of the global model, which is evaluated on `global_splits`
    global_splits: tuple[str, ...] = ()
    next_ids: np.ndarray | None = None  # clients that will probably train next, so that their batches can be prepared
    join_round: int | None = None  # of clients that join after training: how many rounds they have trained
    then: ClientRequest | None = None  # of an evaluation: how its clients will be asked to train next, if that is known
    models: bool = False  # reply with the models that are scored; only where clients are in the server's process
    best: bool = False  # evaluate with the private state of the best round, which clients have kept
    stats: Tree = field(default_factory=dict)  # running statistics that a joining client starts with

    def only(self, ids: np.ndarray) -> ClientRequest:
        """The request to some of its clients, in ascending order."""
        at = np.searchsorted(self.ids, ids)
        index = torch.from_numpy(at)
        parts = tree_map(lambda v: v[index.to(v.device)], self.parts)
        return replace(self, ids=ids, parts=parts, scored=None if self.scored is None else self.scored[at])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Requests of equal kind can be carried out together, for stacked runs."""
        return self.job, self.splits, self.global_splits, self.join_round, self.models, self.best


@dataclass(frozen=True, kw_only=True)
class ClientReplies:
    """What clients answer, one row per client in the order of the request. Values may still be on the device."""

    scores: dict[str, Scores]  # view (pre, post, global) -> split -> scores
    ids: np.ndarray | None = None  # after training, the clients of the rows if some did not answer, in ascending order
    up: Tree = field(default_factory=dict)
    info: Info | None = None  # without class counts, which clients do not send
    norms: Tensor | None = None  # (clients, 3): of downloads, updates, running statistics (`update_norms`)
    computed: Tensor | None = None  # (clients, 2): gradients, and samples that they were taken of (`engine.budget`)
    report: Tree = field(default_factory=dict)
    stats: Tree = field(default_factory=dict)  # running statistics; a real site sends none
    models: Tree = field(default_factory=dict)  # as the method's `model` returns them, if asked for


class InitialState(NamedTuple):
    """What all clients of a run start from, known to both sides from the seed."""

    constants: Tree
    stats: Tree  # running statistics by slot


def initial_state(alg: Algorithm, task: Task, seed: int, server: Tree) -> InitialState:
    """Constants and initial running statistics; the slots show in what the first client would begin with."""
    key = root(seed, "init")
    task.init(key)  # drawn here, because a module cannot draw under vmap
    constants = alg.constants(task, key)
    if not task.network.buffers:
        return InitialState(constants, {})
    ids = np.zeros(1, np.int64)
    index = to_device(task.data.device, ids)
    info = take(make_info(task, seed, ids, 0, np.ones(1, bool)), 0)
    shared, parts = alg.download(task, server, index, 0, key)
    down = {**constants, **shared, **take(parts, 0)}
    state = take(_initial_client_state(alg, task, seed, index), 0)
    return InitialState(constants, get_stats(alg.begin(task, down, state, info)))


def _initial_client_state(alg: Algorithm, task: Task, seed: int, ids: Tensor) -> Tree:
    key: Key = root(seed, "init")
    several = ids if len(ids) > 1 else ids.repeat(2)  # sums over one client round differently from those over several
    keys = fold(root(seed, "client-init"), several)
    made = torch.func.vmap(lambda key_i: alg.init_client(task, key, key_i))(keys)
    return tree_map(lambda v: v[: len(ids)].clone(memory_format=torch.contiguous_format), made)


class Clients(Protocol):
    """The clients of a run: in this process, or at sites of their own."""

    metric: Metric | None  # another column of all scores on validation and test data
    store: ClientStore  # what is kept for each client on this side
    best_store: ClientStore | None  # the same as it was in the best round, if that is kept
    trains_ahead: bool  # an evaluation request may say how clients will be asked to train next (`ClientRequest.then`)

    @property
    def bytes_per_client(self) -> int:
        """Size of what is kept for one client."""

    def ask(self, request: ClientRequest, executor: Executor) -> ClientReplies:
        """Carry out a request."""

    def keep_best(self) -> None:
        """Keep the private state as it is now as that of the best round."""


class LocalClients:
    """Clients in this process. Private state is in a client store; an executor is given for every call."""

    trains_ahead = False

    def __init__(
        self,
        alg: Algorithm,
        task: Task,
        population: Task,
        seed: int,
        initial: InitialState,
        make_store: MakeStore,
        make_best_store: MakeStore | None = None,
        metric: Metric | None = None,
    ) -> None:
        """`task` is what the algorithm sees; `population` also has the samples of clients that are held out. With
        `make_best_store`, the private state of the best round can be kept, too. A `metric` is another column of all
        scores on validation and test data."""
        self.alg, self.task, self.population, self.seed, self.initial = alg, task, population, seed, initial
        self.metric = metric
        self.store = make_store(self._initial_rows, task.clients)
        self.best_store = make_best_store(self._initial_rows, task.clients) if make_best_store is not None else None
        self.noise = keyed_noise(seed)  # of differential privacy
        self.joining: Tree = None  # state of joining clients between two of their rounds
        self.on_upload: Callable[[ClientRequest, ClientReplies], None] | None = None  # sees what leaves the clients
        self.costs: Tensor | None = None  # (phases, 2) of a step, see `step_costs`; known after the first training

    def _initial_rows(self, ids: np.ndarray) -> Tree:
        return self._rows(ids, self.initial.stats)

    def _rows(self, ids: np.ndarray, stats: Tree) -> Tree:
        """State of clients that have never trained."""
        index = to_device(self.task.data.device, ids)
        return {"own": _initial_client_state(self.alg, self.task, self.seed, index), "stats": repeated(stats, len(ids))}

    @property
    def bytes_per_client(self) -> int:
        """Size of one client's private state."""
        return size_bytes(self.store.like)

    def keep_best(self) -> None:
        """Keep the private state as it is now as that of the best round."""
        if self.best_store is not None:
            self.best_store.copy_from(self.store)

    def ask(self, request: ClientRequest, executor: Executor) -> ClientReplies:
        """Carry out a request."""
        cohort = self.cohort(request)
        if request.job == "train":
            outcome = executor.train(cohort, request.splits, self.needs_models(request))
            return self.training_replies(request, cohort, outcome, executor)
        scores = self.score_global(request, cohort, executor)
        personal = None
        if request.splits or request.models:
            personal = executor.score_personal(cohort, request.splits, self.needs_models(request))
        return self.evaluation_replies(request, cohort, scores, personal, executor)

    def needs_models(self, request: ClientRequest) -> bool:
        """True if the executor has to return the models that it scores."""
        return request.models or (self.metric is not None and bool(request.splits))

    # Stacked runs carry out the three steps below for all runs at once, with merged cohorts in the middle.

    def cohort(self, request: ClientRequest) -> Cohort:
        """What the executor needs to know of the clients of a request."""
        ids = request.ids
        if request.join_round is None:
            store = self.best_store if request.best and self.best_store is not None else self.store
            rows, first = store.read(ids), store.trained[ids] == 0
        elif request.join_round == 0:
            rows, first = self._rows(ids, request.stats or self.initial.stats), np.ones(len(ids), bool)
        else:
            rows, first = self.joining, np.zeros(len(ids), bool)
        return Cohort(
            ids=ids,
            t=request.t,
            shared={**self.initial.constants, **request.shared},
            parts=request.parts,
            client_state=rows["own"],
            stats=rows["stats"],
            info=make_info(self.population, self.seed, ids, request.t, first),
            seeds=np.full(len(ids), self.seed, dtype=object),
            run=np.zeros(len(ids), np.int64),
            scored=np.ones(len(ids), bool) if request.scored is None else request.scored,
            next_ids=request.next_ids,
        )

    def training_replies(
        self, request: ClientRequest, cohort: Cohort, outcome: Outcome, executor: Executor
    ) -> ClientReplies:
        """Keep what stays with the clients, and return what they send."""
        rows = {"own": outcome.client_state, "stats": outcome.stats}
        if request.join_round is None:
            self.store.write(request.ids, rows)
        else:
            self.joining = rows
        logits = partial(executor.logits, outcome.models, cohort.ids)
        info = cohort.info._replace(counts=cohort.info.counts[:, :0])
        if self.task.privacy is not None:
            shared = {**self.initial.constants, **request.shared}
            ids = to_device(self.task.data.device, request.ids)
            up = protected(
                self.task.privacy, self.noise, self.alg, self.task, ids, request.t, outcome.up, shared, request.parts
            )
            outcome, info = outcome._replace(up=up), info._replace(n=torch.ones_like(info.n))
        replies = ClientReplies(
            scores={"post": self._with_metric(outcome.scores, cohort.ids, logits)},
            up=outcome.up,
            info=info,
            norms=self._norms(outcome, request, executor),
            computed=self._computed(cohort, outcome),
            report=_double(outcome.report),
            stats=outcome.stats if self.task.privacy is None else {},
            models=outcome.models if request.models else {},
        )
        if self.on_upload is not None and request.join_round is None:
            self.on_upload(request, replies)
        return replies

    def _computed(self, cohort: Cohort, outcome: Outcome) -> Tensor:
        if self.costs is None:
            costs = step_costs(self.alg, self.task, cohort, self.population)
            self.costs = to_device(self.task.data.device, np.array(costs))
        return (outcome.visits * self.costs).sum(1)  # of all phases

    def score_global(self, request: ClientRequest, cohort: Cohort, executor: Executor) -> dict[str, Scores]:
        """Scores of the global model, if the request has one."""
        if request.global_params is None:
            return {}
        found = executor.score_global(request.global_params, cohort, request.global_splits)
        logits = partial(executor.global_logits, request.global_params, cohort)
        return {"global": self._with_metric(found, cohort.ids, logits)}

    def evaluation_replies(
        self,
        request: ClientRequest,
        cohort: Cohort,
        scores: dict[str, Scores],
        personal: Evaluated | None,
        executor: Executor,
    ) -> ClientReplies:
        """The replies to an evaluation request; without personal scores, PM_pre is the global model."""
        if personal is None:
            return ClientReplies(scores={**scores, "pre": scores["global"]})
        mine = self._with_metric(personal.scores, cohort.ids, partial(executor.logits, personal.models, cohort.ids))
        return ClientReplies(scores={**scores, "pre": mine}, models=personal.models if request.models else {})

    def _with_metric(self, scores: Scores, ids: np.ndarray, logits: Callable[[str], Tensor]) -> Scores:
        """The scores in float64, with the metric as another column on validation and test data."""
        found = _double(scores)
        if self.metric is None:
            return found
        for split in set(found) & {"val", "test"}:
            values = self.metric.per_client(self.predictions(ids, split, logits(split)))
            column = torch.from_numpy(values).to(found[split].device)[:, None]
            found[split] = torch.cat([found[split], column], 1)
        return found

    def predictions(self, ids: np.ndarray, split: str, logits: Tensor) -> Predictions:
        """Targets and predictions of clients' samples, from the outputs of their models."""
        data = self.population.data
        lists = data.splits[split]
        starts = np.concatenate([[0], np.cumsum(lists.sizes[ids])])
        targets, y = data.targets, data.y[lists.joined(ids)]
        known, p = to_numpy((targets.in_unit(y), targets.predictions(logits.double())))
        return Predictions(known, p, starts, data.positive)

    def _norms(self, outcome: Outcome, request: ClientRequest, executor: Executor) -> Tensor:
        """How large the updates are. For a method that sends nothing, how large the private state is, because that
        shows whether a client has diverged."""
        up, shared, parts = outcome.up, {**self.initial.constants, **request.shared}, request.parts
        if not up:
            up, shared, parts = outcome.client_state, {}, {}
        if not leaves(up):
            return torch.zeros(len(request.ids), 3, device=self.task.data.device)
        return executor.call("norms", partial(update_norms, self.alg, self.task), up, shared, parts, outcome.stats)


def _double(numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in numbers.items()}
