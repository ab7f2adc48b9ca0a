"""What an actor does: it has the samples and the private state of the clients of its shards, and trains them.

Nothing here knows of Ray. Trees come and go as NumPy arrays, which Ray carries without copies.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fedloom.core.algorithm import Algorithm
from fedloom.core.authors import describe_failure
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.core.keys import root
from fedloom.core.task import Task
from fedloom.core.tree import Tree, leaves, tree_map
from fedloom.device.memory import free_memory, is_out_of_memory
from fedloom.device.torch_settings import deterministic, precision
from fedloom.device.transfer import to_device, to_numpy
from fedloom.engine.client_store import InitialRows, MemoryStore
from fedloom.engine.clients import ClientRequest, InitialState, LocalClients
from fedloom.engine.cohort import Executor
from fedloom.engine.plan import Plan
from fedloom.engine.planning.choose import choose_executor, make_executor
from fedloom.metrics.registry import Metric
from fedloom.nn.network import Network

log = logging.getLogger("fedloom")

MOST_INLINE = 1 << 16  # bytes of arrays in the message of a call; more go through Ray's memory


def on_device(tree: Tree, device: torch.device) -> Tree:
    """The tree with tensors in place of arrays, which are copied: those that Ray hands out cannot be written to."""
    return tree_map(lambda v: to_device(device, np.array(v)) if isinstance(v, np.ndarray) else v, tree)


def array_bytes(tree: Tree) -> int:
    """Bytes of all arrays of a tree."""
    return sum(v.nbytes for v in leaves(tree) if isinstance(v, np.ndarray))


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """What every actor needs to know of a run, besides the samples of its clients."""

    alg: Algorithm
    settings: dict[str, Any]  # of the task
    make: Callable[[], nn.Module]
    head: str
    sample: np.ndarray  # what the model receives, for its shape
    dtype: torch.dtype
    half: bool
    initial: InitialState  # of arrays
    seed: int
    metric: Metric | None
    keeps_best: bool
    device: str  # its type
    threads: int
    deterministic: bool
    precision: str
    log_level: int
    positive: int  # `Federation.positive`, which follows from everyone's samples


class Part(NamedTuple):
    """What a request says of the clients of an actor, one row each; of arrays."""

    ids: np.ndarray
    parts: Tree
    scored: np.ndarray | None
    next_ids: np.ndarray | None  # of the first of its shards: while that trains, there is time for those of others


class SavedRows(NamedTuple):
    """Rows of a store, and how often their clients have trained; all others have never."""

    ids: np.ndarray
    trained: np.ndarray
    rows: Tree


class RowsOfSome(MemoryStore):
    """Rows of some of the clients in memory; nobody asks for those of others."""

    def __init__(self, initial_rows: InitialRows, clients: int, ids: np.ndarray) -> None:
        super().__init__(initial_rows, len(ids))
        self.trained = np.zeros(clients, np.int64)
        self.place = np.full(clients, -1)
        self.place[ids] = np.arange(len(ids))

    def save(self) -> SavedRows:
        """Everything that is here."""
        ids, rows = self._changed()
        return SavedRows(ids, self.trained[ids], to_numpy(rows))

    def load(self, saved: SavedRows) -> None:
        """Return to what was saved."""
        self.trained[:] = 0
        self.trained[saved.ids] = saved.trained
        self._write(saved.ids, on_device(saved.rows, self.device))

    def _read(self, ids: np.ndarray) -> Tree:
        return super()._read(self.place[ids])

    def _write(self, ids: np.ndarray, rows: Tree) -> None:
        super()._write(self.place[ids], rows)


class Messages(logging.Handler):
    """Keeps what is logged, so that the driver can say it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[int, str]]:
        """What was logged since the last call."""
        found, self.found = self.found, []
        return found


class Worker:
    """The clients of some shards, which share their executors. It serves one run at a time."""

    def __init__(self) -> None:
        self.settings, self.messages = ExitStack(), Messages()
        self.clients: dict[int, LocalClients] = {}  # by shard
        self.executors: list[Executor] = []  # the last two: that of training, and one that a callback asks for
        self.level_before = log.level
        gc.freeze()  # modules stay until the end; without them a collection takes a tenth of the time

    def do(self, name: str, *args: Any) -> tuple[Any, list[tuple[int, str]]]:
        """The result of one of the functions below, and what it logged."""
        try:
            with torch.no_grad():
                found = getattr(self, name)(*args)
        except UserError:
            raise
        except Exception as error:
            sentence = None if is_out_of_memory(error) else describe_failure(error, type(self.alg))
            if sentence is None:
                raise
            raise UserError(f"{sentence}.") from None  # here, since the driver does not see the lines of the method
        return found, self.messages.taken()

    def process(self) -> int:
        """The number of this process."""
        return os.getpid()

    def start(self, setup: bytes, data: Federation, shards: Mapping[int, np.ndarray]) -> None:
        """Begin a run, whose clients in these shards have not trained yet; `data` has their samples."""
        self.clear()
        about: RunSetup = pickle.loads(setup)
        device = torch.device(about.device)
        log.addHandler(self.messages)
        log.setLevel(about.log_level)
        torch.set_num_threads(about.threads)
        self.settings.enter_context(deterministic(about.deterministic))
        self.settings.enter_context(precision(about.precision))
        data = data.to(device, data.dtype)
        vars(data)["positive"] = about.positive  # a cached property
        network = Network(about.make, about.head, on_device(about.sample, device), about.dtype, about.half)
        self.alg, self.population = about.alg, Task(data=data, network=network, **about.settings)
        self.task = replace(self.population, data=data.participants())
        self.task.init(root(about.seed, "init"))  # drawn here, because a module cannot draw under vmap
        self.clients = {shard: self._clients(about, ids) for shard, ids in shards.items()}
        self.shard = np.full(len(data.splits["train"]), -1)  # of every client that is here
        for shard, ids in shards.items():
            self.shard[ids] = shard

    def _clients(self, about: RunSetup, ids: np.ndarray) -> LocalClients:
        store = partial(RowsOfSome, ids=ids[ids < self.task.clients])
        best_store = store if about.keeps_best else None
        initial = InitialState(*on_device(tuple(about.initial), self.task.data.device))
        return LocalClients(self.alg, self.task, self.population, about.seed, initial, store, best_store, about.metric)

    def clear(self) -> None:
        """Forget the run."""
        self.settings.close()
        self.clients, self.executors = {}, []
        self.alg = self.task = self.population = None  # type: ignore[assignment]
        log.removeHandler(self.messages)
        log.setLevel(self.level_before)
        self.messages.taken()
        free_memory()

    def make_plan(
        self, mode: str, request: ClientRequest, sent: Tree, shard: int, part: Part, eval_clients: int, shards: int
    ) -> Plan:
        """Measure, and choose the execution plan for cohorts like this one, one per shard in a round."""
        request = replace(request, **on_device(sent, self.task.data.device))
        cohort = self.clients[shard].cohort(self._rows(request, part, np.arange(len(part.ids))))
        executor = choose_executor(self.alg, self.task, self.population, cohort, eval_clients, mode, shards=shards)
        self.executors = [executor]
        return executor.plan

    def ask(self, plan: Plan, request: ClientRequest, sent: Tree, part: Part) -> tuple[dict[str, Tree], Plan]:
        """The replies of the clients of this actor, and the plan, which has changed if memory was short. `sent` is what
        goes to all clients."""
        executor, request = self._executor(plan), replace(request, **on_device(sent, self.task.data.device))
        shards = self.shard[part.ids]
        places = {shard: np.flatnonzero(shards == shard) for shard in np.unique(shards).tolist()}
        replies = []
        for shard, at in places.items():
            replies.append(vars(self.clients[shard].ask(self._rows(request, part, at), executor)))
            part = part._replace(next_ids=None)
        return joined(replies, list(places.values())), executor.plan

    def _executor(self, plan: Plan) -> Executor:
        """The executor for a plan. One that has more clients or samples at once is dropped, because memory is short."""
        found = next((one for one in self.executors if essence(one.plan) == essence(plan)), None)
        if found is not None and (found.plan.chunk, found.plan.rows) == (plan.chunk, plan.rows):
            return found
        self.executors = [one for one in self.executors if one is not found][-1:]
        found = None
        free_memory()
        self.executors.append(make_executor(self.alg, self.task, plan, self.population))
        return self.executors[-1]

    def _rows(self, request: ClientRequest, part: Part, at: np.ndarray) -> ClientRequest:
        """The request to some of the clients of this actor."""
        parts = tree_map(lambda v: to_device(self.task.data.device, v[at]), part.parts)
        scored = None if part.scored is None else part.scored[at]
        return replace(request, ids=part.ids[at], parts=parts, scored=scored, next_ids=part.next_ids)

    # -- private state ------------------------------------------------------------------------------------------------

    def _store(self, shard: int, kind: str) -> RowsOfSome:
        found = getattr(self.clients[shard], kind)
        assert isinstance(found, RowsOfSome)
        return found

    def read(self, kind: str, ids: Mapping[int, np.ndarray]) -> dict[int, Tree]:
        """Rows of clients that have trained, by shard; `kind` is store or best_store."""
        return {shard: to_numpy(self._store(shard, kind)._read(some)) for shard, some in ids.items()}

    def write(self, kind: str, found: Mapping[int, tuple[SavedRows, np.ndarray]]) -> None:
        """Replace rows of some clients, by shard; with them comes how often each client has trained."""
        for shard, (some, trained) in found.items():
            store = self._store(shard, kind)
            store.trained[:] = trained
            store._write(some.ids, on_device(some.rows, store.device))

    def keep_best(self) -> None:
        """Keep the private state as it is now as that of the best round."""
        for clients in self.clients.values():
            clients.keep_best()

    def save(self) -> dict[str, dict[int, SavedRows]]:
        """Everything that clients keep, by kind of store and shard."""
        kinds = [kind for kind in ("store", "best_store") if all(getattr(c, kind) for c in self.clients.values())]
        return {kind: {shard: self._store(shard, kind).save() for shard in self.clients} for kind in kinds}

    def load(self, saved: Mapping[str, Mapping[int, SavedRows]]) -> None:
        """Return to what was saved."""
        for kind, found in saved.items():
            for shard, rows in found.items():
                self._store(shard, kind).load(rows)


def essence(plan: Plan) -> Plan:
    """What of a plan an executor depends on, and short memory does not change."""
    return replace(plan, chunk=1, rows=0, device="", threads=0, reason="", shards=0)


def joined(replies: list[dict[str, Tree]], places: list[np.ndarray]) -> dict[str, Tree]:
    """The replies of some groups of clients as those of all of them, of arrays; `places` are the rows of each group. An
    actor joins those of its shards, and the driver those of actors: a message has few arrays then, and each takes Ray
    some time whatever its size. A tensor that is there twice is there twice in the result, and is sent once."""
    rows, found = sum(map(len, places)), dict[tuple[int, ...], np.ndarray]()

    def of_all(*each: Any) -> Any:
        if each[0] is None:
            return None
        which = tuple(map(id, each))
        if which not in found:
            arrays = to_numpy(each)
            whole = found[which] = np.empty((rows, *arrays[0].shape[1:]), arrays[0].dtype)
            for some, at in zip(arrays, places, strict=True):
                whole[slice(None) if len(at) == rows else at] = some
        return found[which]

    names = [name for name in replies[0] if name != "ids"]
    return {name: tree_map(of_all, *(one[name] for one in replies)) for name in names}
