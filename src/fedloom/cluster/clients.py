"""The clients of a run as its server sees them when actors train them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fedloom.cluster.shards import shard_of_clients, shards_of_actors
from fedloom.cluster.worker import MOST_INLINE, Part, RunSetup, SavedRows, array_bytes, joined
from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.core.task import Task
from fedloom.core.tree import Tree, leaves, size_bytes, tree_map
from fedloom.device.transfer import to_device, to_numpy
from fedloom.engine.client_store import ClientStore, InitialRows, MemoryStore
from fedloom.engine.clients import ClientReplies, ClientRequest, InitialState, LocalClients, MakeStore
from fedloom.engine.cohort import Executor
from fedloom.engine.driver import Driver
from fedloom.engine.plan import Plan
from fedloom.metrics.registry import Metric

log = logging.getLogger("fedloom")

REPLACEMENTS = 3  # of actors, for one request
MOST_ROUNDS = 50  # that a new actor repeats
MOST_BYTES = 256 << 20  # that are kept for it; more where the state of all clients is larger
LOOKED_AT = 10  # first rounds, whose largest part of a shard the plan is made for


class Actors(Protocol):
    """Processes with a `Worker` each, numbered from 0; `fedloom.cluster.actors.RayActors` are such."""

    def __len__(self) -> int: ...

    def put(self, value: Any) -> Any:
        """A reference to a value, which can be an argument of `call`."""

    def get(self, reference: Any) -> Any:
        """The value that a reference of `put` stands for."""

    def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a function of `Worker` at some actors. Those that have ended are not among the results."""

    def replace(self, i: int) -> None:
        """Start another actor in place of one that has ended."""


class _Call(NamedTuple):
    """A call that changed what actors keep."""

    name: str
    arguments: dict[int, tuple[Any, ...]]
    size: int = 0  # bytes of the arguments
    joining: bool = False  # of clients that join, whose state nobody needs when others train


class RowsAtActors(ClientStore):
    """Private state of all clients, which their actors keep."""

    def __init__(self, initial_rows: InitialRows, clients: int, kind: str, at: ShardedClients) -> None:
        super().__init__(initial_rows, clients)
        self.kind, self.at = kind, at

    def _read(self, ids: np.ndarray) -> Tree:
        return self.at.read(self.kind, ids)

    def _write(self, ids: np.ndarray, rows: Tree) -> None:
        self.at.write(self.kind, ids, rows, self.trained)

    def _changed(self) -> tuple[np.ndarray, Tree]:
        ids = np.flatnonzero(self.trained)
        return ids, self.at.saved_rows(self.kind, ids)

    def committed(self) -> None:
        pass


class RowsInMainMemory(MemoryStore):
    """Rows of all clients in main memory, because together they may not fit a GPU; those that are read are there."""

    def __init__(self, initial_rows: InitialRows, clients: int, device: torch.device) -> None:
        super().__init__(lambda ids: _moved(initial_rows(ids), torch.device("cpu")), clients)
        self.read_device = device

    def read(self, ids: np.ndarray) -> Tree:
        return _moved(super().read(ids), self.read_device)


def _moved(tree: Tree, device: torch.device) -> Tree:
    return tree_map(lambda v: v.to(device), tree)


class ShardedClients(LocalClients):
    """Clients whose samples and private state are at actors, each of which has some of the shards.

    Shards are computed one by one, so the results are the same for any number of actors. What changes the state of
    actors is remembered since the last checkpoint, and repeated by an actor that replaces one that has ended.
    """

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
        *,
        actors: Actors,
        shards: int,
        pickled: Callable[[Any], bytes],
        threads: int = 1,
        deterministic: bool = False,
        precision: str = "float32",
    ) -> None:
        """
        Args:
            make_store: not used, since actors keep the state; of `make_best_store` only whether there is one.
            shards: parts of the clients, at least one per actor.
            pickled: turns anything into bytes, also functions and classes that have no name in a module.
            threads: of every actor, on a CPU.
            deterministic, precision: as the settings of a run are called.
        """
        self.actors = actors
        self.shard = shard_of_clients(population.data.splits["train"].sizes, task.clients, shards)
        self.owner = np.empty(shards, np.int64)
        for actor, mine in enumerate(shards_of_actors(shards, len(actors))):
            self.owner[mine] = actor
        self._log: list[_Call] = []  # since the last time that everything was saved, which is the first of them
        self._log_bytes = 0
        self._log_start: int | None = None  # the first round in it
        self._has_joining = False  # calls for clients that join are in the log
        kinds = [partial(RowsAtActors, kind=kind, at=self) for kind in ("store", "best_store")]
        best: MakeStore | None = kinds[1] if make_best_store is not None else None
        super().__init__(alg, task, population, seed, initial, kinds[0], best, metric)
        setup = RunSetup(
            alg=alg, **_recipe(population),
            initial=to_numpy(initial), seed=seed, metric=metric, keeps_best=best is not None,
            device=task.data.device.type, threads=threads, deterministic=deterministic, precision=precision,
            log_level=log.getEffectiveLevel(), positive=population.data.positive,
        )  # fmt: skip
        reference = actors.put(pickled(setup))
        by_actor = self._by_actor(np.arange(len(self.shard)))
        data = population.data.to(torch.device("cpu"), population.data.dtype)
        given = {actor: (reference, actors.put(_samples(data, mine)), mine) for actor, mine in by_actor.items()}
        self._start = _Call("start", given)
        self._call(*self._start[:2])

    # -- actors -------------------------------------------------------------------------------------------------------

    def _by_actor(self, ids: np.ndarray) -> dict[int, dict[int, np.ndarray]]:
        """These clients by actor and shard, in ascending order."""
        found: dict[int, dict[int, np.ndarray]] = {}
        for shard in np.unique(self.shard[ids]).tolist():
            found.setdefault(int(self.owner[shard]), {})[shard] = ids[self.shard[ids] == shard]
        return found

    def _by_owner(self, ids: np.ndarray) -> dict[int, np.ndarray]:
        """These clients by actor, in ascending order."""
        owner = self.owner[self.shard[ids]]
        return {actor: ids[owner == actor] for actor in np.unique(owner).tolist()}

    def _call(self, name: str, arguments: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """The results of all actors; those that have ended are replaced and asked again."""
        results: dict[int, Any] = {}
        left = arguments
        for _ in range(1 + REPLACEMENTS):
            results |= self.actors.call(name, left)
            left = {actor: given for actor, given in arguments.items() if actor not in results}
            if not left:
                return results
            self._replace(list(left))
        raise _keeps_ending(list(left))

    def _replace(self, ended: list[int]) -> None:
        """Start other actors, and repeat there what the last ones did since everything was saved."""
        who = f"Actor {ended[0]} of Ray has" if len(ended) == 1 else f"The actors {_listed(ended)} of Ray have"
        log.warning("%s ended, and the run goes on from the last round with a new one in its place.", who)
        for actor in ended:
            self.actors.replace(actor)
        for call in (self._start, *self._log):
            mine = {actor: call.arguments[actor] for actor in ended if actor in call.arguments}
            if mine and len(self.actors.call(call.name, mine)) < len(mine):
                raise _keeps_ending(ended)

    def _remember(self, call: _Call) -> None:
        self._log.append(call)
        self._log_bytes += call.size
        self._has_joining |= call.joining

    # -- requests -----------------------------------------------------------------------------------------------------

    def make_plan(self, driver: Driver, mode: str) -> Plan:
        """The execution plan, which the first actor makes by measuring a part of a cohort."""
        cohorts = [driver.sample(t) for t in range(min(LOOKED_AT, self.task.rounds))]
        parts = [ids for cohort in cohorts for mine in self._by_actor(cohort).values() for ids in mine.values()]
        largest = max(parts, key=len)[: 1 if self.alg.turns else None]
        shard = int(self.shard[largest[0]])
        first, request = int(self.owner[shard]), driver.first_request(largest)
        scored = int((self.shard[driver.eval_client_ids] == shard).sum())
        part = _part(request, largest, None)
        given = mode, _common(request), _sent(request), shard, part, max(1, scored), len(self.owner)
        plan: Plan = self._call("make_plan", {first: given})[first]
        return replace(
            plan, shards=len(self.owner), reason=f"for the largest of {len(self.owner)} shards; {plan.reason}"
        )

    def ask(self, request: ClientRequest, executor: Executor) -> ClientReplies:
        """Carry out a request."""
        trains = request.job == "train"
        if trains:
            self._shorten_log(request)
        sent, arguments = self._sent(request), {}
        for actor, mine in self._by_owner(request.ids).items():
            part = _part(request, mine, self._next(request, int(self.shard[mine].min())))
            arguments[actor] = executor.plan, _common(request), sent, part
        found = self._call("ask", arguments)
        if trains:
            size = size_bytes((request.shared, request.parts, request.stats))
            self._remember(_Call("ask", arguments, size, request.join_round is not None))
        if trains and request.join_round is None:
            self._log_start = request.t if self._log_start is None else self._log_start
            self.store.trained[request.ids] += 1
        self._follow_memory(executor, [plan for _, plan in found.values()])
        owner = self.owner[self.shard[request.ids]]
        replies = joined([mine for mine, _ in found.values()], [np.flatnonzero(owner == actor) for actor in found])
        return ClientReplies(**tree_map(lambda v: None if v is None else to_device(self.task.data.device, v), replies))

    def _sent(self, request: ClientRequest) -> Any:
        """What goes to all actors, or a reference to it."""
        sent = _sent(request)
        return self.actors.put(sent) if array_bytes(sent) > MOST_INLINE else sent

    def _next(self, request: ClientRequest, shard: int) -> np.ndarray | None:
        return None if request.next_ids is None else request.next_ids[self.shard[request.next_ids] == shard]

    def _follow_memory(self, executor: Executor, plans: list[Plan]) -> None:
        """Where the memory of an actor was short, all go on with as few clients and samples at once."""
        chunk, rows = min(plan.chunk for plan in plans), [plan.rows for plan in plans if plan.rows]
        if chunk < executor.plan.chunk or (rows and min(rows) != executor.plan.rows):
            executor.plan = replace(executor.plan, chunk=chunk, rows=min(rows, default=0))

    def _shorten_log(self, request: ClientRequest) -> None:
        """Forget what a new actor need not repeat, and save everything before it has to repeat too much."""
        if request.join_round:  # these clients go on from the calls of their first round, which no store has
            return
        if self._has_joining:
            self._log_bytes -= sum(call.size for call in self._log if call.joining)
            self._log, self._has_joining = [call for call in self._log if not call.joining], False
        state = self.bytes_per_client * self.task.clients * (1 if self.best_store is None else 2)
        many = self._log_start is not None and request.t - self._log_start >= MOST_ROUNDS
        if many or self._log_bytes > max(MOST_BYTES, state):
            self._save()

    # -- private state ------------------------------------------------------------------------------------------------

    def keep_best(self) -> None:
        """Keep the private state as it is now as that of the best round."""
        if self.best_store is not None:
            arguments: dict[int, tuple[Any, ...]] = dict.fromkeys(range(len(self.actors)), ())
            self._call("keep_best", arguments)
            self._remember(_Call("keep_best", arguments))
            self.best_store.trained = self.store.trained.copy()

    def read(self, kind: str, ids: np.ndarray) -> Tree:
        """Rows of clients that have trained, from the store or the best_store of their actors."""
        found = self._call("read", {actor: (kind, mine) for actor, mine in self._by_actor(ids).items()})
        rows = {shard: rows for mine in found.values() for shard, rows in mine.items()}
        return _moved(self._joined(ids, rows, kind), self.task.data.device)

    def write(self, kind: str, ids: np.ndarray, rows: Tree, trained: np.ndarray) -> None:
        """Replace rows of clients at their actors; `trained` is how often each client has trained."""
        arrays, arguments = to_numpy(rows), {}
        for actor in range(len(self.actors)):
            mine = {}
            for shard in np.flatnonzero(self.owner == actor).tolist():
                at = np.flatnonzero(self.shard[ids] == shard)
                known = np.where(self.shard[: len(trained)] == shard, trained, 0)
                mine[shard] = SavedRows(ids[at], trained[ids[at]], tree_map(lambda v: v[at], arrays)), known  # noqa: B023
            arguments[actor] = kind, self.actors.put(mine)
        self._call("write", arguments)
        self._remember(_Call("write", arguments, size_bytes(rows)))

    def saved_rows(self, kind: str, ids: np.ndarray) -> Tree:
        """Rows of all clients that have trained, in main memory, for a checkpoint. New actors then start from it."""
        if [call.name for call in self._log] != ["load"]:
            self._save()
        saved = [self.actors.get(mine) for (mine,) in self._log[0].arguments.values()]
        rows = {shard: found.rows for mine in saved for shard, found in mine[kind].items()}
        return self._joined(ids, rows, kind)

    def _save(self) -> None:
        """Put what the actors keep where a new actor finds it when one of them has ended, with all that it had."""
        saved = self._call("save", dict.fromkeys(range(len(self.actors)), ()))
        self._log = [_Call("load", {actor: (self.actors.put(mine),) for actor, mine in saved.items()})]
        self._log_bytes, self._log_start, self._has_joining = 0, None, False

    def _joined(self, ids: np.ndarray, by_shard: Mapping[int, Tree], kind: str) -> Tree:
        """The rows of some shards as one tree in main memory, in the order of the clients."""
        like = getattr(self, kind).like

        def merged(one: torch.Tensor, *each: np.ndarray) -> torch.Tensor:
            whole = np.empty((len(ids), *one.shape), to_numpy(one).dtype)
            for rows, at in zip(each, places, strict=True):
                whole[at] = rows
            return torch.from_numpy(whole)

        shards = [shard for shard in by_shard if len(leaves(by_shard[shard])) == len(leaves(like))]
        places = [np.flatnonzero(self.shard[ids] == shard) for shard in shards]
        return tree_map(merged, like, *(by_shard[shard] for shard in shards))

    def at_home(self) -> LocalClients:
        """The same clients in this process, with the private state that they have now."""
        store = partial(RowsInMainMemory, device=self.task.data.device)
        best_store = None if self.best_store is None else store
        clients = LocalClients(
            self.alg, self.task, self.population, self.seed, self.initial, store, best_store, self.metric
        )
        clients.store.restore(self.store.snapshot())
        if clients.best_store is not None and self.best_store is not None:
            clients.best_store.restore(self.best_store.snapshot())
        return clients


def _keeps_ending(actors: list[int]) -> UserError:
    return UserError(
        f"Ray ended the processes of actors {_listed(actors)} again and again, usually because memory is short; use "
        "fewer actors or a smaller model, and see Ray's messages in /tmp/ray/session_latest/logs."
    )


def _listed(actors: list[int]) -> str:
    return ", ".join(map(str, actors))


def _common(request: ClientRequest) -> ClientRequest:
    """The request without what is sent once to all actors, and what differs by client."""
    nothing: dict[str, Any] = {"shared": {}, "parts": {}, "global_params": None, "stats": {}}
    return replace(request, ids=request.ids[:0], scored=None, next_ids=None, then=None, **nothing)


def _sent(request: ClientRequest) -> Tree:
    """What goes to all actors."""
    return to_numpy({name: getattr(request, name) for name in ("shared", "global_params", "stats")})


def _part(request: ClientRequest, ids: np.ndarray, next_ids: np.ndarray | None) -> Part:
    one = request.only(ids)
    return Part(ids, to_numpy(one.parts), one.scored, next_ids)


def _recipe(task: Task) -> dict[str, Any]:
    """What a task is made from, besides its samples."""
    network: Any = task.network
    settings = {f.name: getattr(task, f.name) for f in fields(task) if f.name not in ("data", "network")}
    rows = task.data.splits["train"].flat[:2]
    sample = task.data.prepare(task.data.x[rows])
    both = torch.cat([sample, sample])[:2]
    return {
        "settings": settings, "make": network.make, "head": network.head_name, "sample": to_numpy(both),
        "dtype": task.dtype, "half": network.half,
    }  # fmt: skip


def _samples(data: Federation, shards: Mapping[int, np.ndarray]) -> Federation:
    """The samples of the clients of some shards."""
    return data.only(np.concatenate(list(shards.values())).tolist())
