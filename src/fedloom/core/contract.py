"""The contract between methods and engines.

A method is a frozen dataclass of hyper-parameters with pure functions over explicit state. It never sees an engine, a
device, a loop over clients or batches, or a file. Every client function is written for ONE client; an engine calls it
for one client after another, or under `vmap` for a whole cohort. So client functions must not branch in Python on
tensor values (use `where`), index with booleans, or call `.item()`.

A round, as every engine runs it::

    shared, parts = download(server, ids)              once; parts are stacked, a row per client of the cohort
    work = begin(down, own)                            per client; down = constants + shared + its row of parts
    for phase in phases:                               per client; enter, then step for every batch of every epoch
    report(work, down)                                 per client; numbers for the records, sent nowhere
    own, up = finish(work, down, own)                  per client; own is kept, up is sent
    server = aggregate(server, up)                     once; up is stacked over the cohort

Clients that come late, each as if it came alone, run the same round with `admit` before it and `welcome` in the place
of `aggregate`.

Evaluation asks for three models. PM_post: `model(work)` after the phases. PM_pre: begin with the newest server state,
then the `adapt` phases, then `model`; all of it thrown away. GM: `global_model(server)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from fedloom.core.keys import Key, fold, rng
from fedloom.core.network import Params
from fedloom.core.registry import Registry
from fedloom.core.tree import Tree, size_bytes

if TYPE_CHECKING:
    from fedloom.core.task import Task


class Draw(NamedTuple):
    """Host randomness for one client in one round, for `Phase.select`."""

    seed: int
    i: int
    t: int
    run: int = 0  # which one, where several go on together

    def rng(self, stream: str, *ids: int) -> np.random.Generator:
        return rng(stream, self.seed, *ids)


class Info(NamedTuple):
    """What a client knows besides its state."""

    id: Tensor  # i
    n: Tensor  # n_i, training samples
    counts: Tensor  # n_{i,c}, training samples per class
    t: Tensor  # round
    first: Tensor  # True until it has trained once
    key: Tensor  # random key of (seed, i, t)


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    mask: Tensor  # 1 for a sample, 0 for padding
    k: Tensor  # step index within the phase
    epoch: Tensor
    last: Tensor  # is it the last batch of its epoch?
    key: Tensor  # noise key of (seed, i, t, epoch, batch)

    def part(self, j: int) -> Batch:
        """One batch of a group (`Phase.group`), with noise of its own."""
        return self._replace(x=self.x[j], y=self.y[j], mask=self.mask[j], key=fold(self.key, j))


class Slot(NamedTuple):
    """A model copy in training: parameters, running statistics, momentum."""

    params: Params
    buffers: Params
    momentum: Params


Step = Callable[["Task", Tree, Batch, Tree, Info], Tree]
Enter = Callable[["Task", Tree, Tree, Info], Tree]


@dataclass(frozen=True)
class Phase:
    """Passes over a client's samples: `step(task, work, batch, down, info) -> work` for every batch."""

    step: Step
    epochs: int | Callable[[Task, Tree, Info], Tensor] = 1  # a function decides per client, inside the round
    enter: Enter | None = None  # (task, work, down, info) -> work, before the first batch
    select: str | Callable[[int, Draw], np.ndarray] = "train"  # a split, or positions among the n_i
    until: Callable[[Tree], Tensor] | None = None  # (work) -> done?, asked after every epoch
    steps: int | None = None  # exactly so many batches instead of whole epochs
    batch: int | None = None  # another batch size than the task's
    group: int = 1  # batches that a step gets at once; an incomplete group is dropped
    halve: bool = False  # a client too small for one group splits its samples evenly over one
    shuffle: bool = True
    train: bool = True  # False: a pass that evaluates or accumulates (keeps one-sample batches under BatchNorm)


@dataclass(frozen=True)
class Algorithm:
    """A method. Subclasses set the class variables, add fields for hyper-parameters and fill in the functions."""

    name: ClassVar[str] = ""  # the paper's, in lower case
    source: ClassVar[str] = ""  # authors and venue
    paper: ClassVar[str] = ""  # title
    year: ClassVar[int] = 0
    shared: ClassVar[str] = ""  # what is sent, in words
    private: ClassVar[str] = ""  # what stays at the client, in words
    # settings that go together where a paper and its authors' code differ: `variant=paper`, `variant=code`
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    turns: ClassVar[bool] = False  # the server steps after each client in turn
    partial: ClassVar[bool] = True  # a cohort may be a part of the clients
    needs_split: ClassVar[bool] = False  # body and head must both have parameters
    takes_diverged: ClassVar[bool] = False  # uploads with values that are no numbers reach `aggregate`, too
    needs_server_data: ClassVar[bool] = False
    pre_is_global: ClassVar[bool] = False  # PM_pre is GM itself, so it is scored once
    global_slot: ClassVar[str] = "w"  # the slot whose running statistics GM uses at a client

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            ALGORITHMS.add(cls.name, cls)

    def min_samples(self, task: Task) -> int:
        """Training samples a client needs."""
        return 1

    def check(self, task: Task) -> None:
        """Raise UserError, before training, for settings that do not fit the task."""

    def init_server(self, task: Task, key: Key) -> Tree:
        return {}

    def init_client(self, task: Task, key: Key, key_i: Tensor) -> Tree:
        """Private state before the first participation; `key` is the run's, `key_i` the client's."""
        return {}

    def constants(self, task: Task, key: Key) -> Tree:
        """Drawn from the seed on both sides, hence no traffic; part of `down`."""
        return {}

    def download(self, task: Task, server: Tree, ids: Tensor, t: int, key: Key) -> tuple[Tree, Tree]:
        """What all clients receive, and what each receives for itself (stacked in the order of ids)."""
        return server, {}

    def size_of_parts(self, parts: Tree) -> int:
        """Bytes of what clients receive for themselves, for a method whose parts hold more, to fill up the stack."""
        return size_bytes(parts)

    def begin(self, task: Task, down: Tree, own: Tree, info: Info) -> Tree:
        raise NotImplementedError

    def phases(self, task: Task) -> list[Phase]:
        raise NotImplementedError

    def finish(self, task: Task, work: Tree, down: Tree, own: Tree, info: Info) -> tuple[Tree, Tree]:
        raise NotImplementedError

    def aggregate(self, task: Task, server: Tree, up: Tree, info: Info, t: int, key: Key) -> Tree:
        return server

    def admit(self, task: Task, server: Tree, ids: Tensor, key: Key) -> Tree:
        """The server with what it keeps per client for these, too, whom it never saw; their ids follow the others'."""
        return server

    def welcome(self, task: Task, server: Tree, up: Tree, info: Info, t: int, key: Key) -> Tree:
        """The server after what newcomers sent, where only what it keeps for each of them alone may change."""
        return server

    def adapt(self, task: Task) -> list[Phase]:
        return []

    def report(self, task: Task, work: Tree, down: Tree, info: Info) -> dict[str, Tensor]:
        """Numbers of a client for the records, after its phases: scalars or vectors by name."""
        return {}

    def report_server(self, task: Task, server: Tree, info: Info) -> dict[str, Tensor]:
        """The same of the server, after aggregation: scalars, or a row per client of the cohort."""
        return {}

    def equilibrium(self, rounds: list[dict[str, Any]]) -> bool | None:
        """Has a game between server and clients come to rest, by the records up to this evaluated round? None for
        methods that play none. A method with a setting `stop_at_equilibrium` ends there if it is true."""
        return None

    def model(self, task: Task, work: Tree, down: Tree, info: Info) -> Any:
        """What is evaluated: a Slot, or anything that `logits` understands."""
        raise NotImplementedError

    def logits(self, task: Task, model: Any, x: Tensor) -> Tensor:
        return task.predict(model, x).logits

    def global_model(self, task: Task, server: Tree) -> Params | None:
        return None

    def server_test(self, task: Task) -> Tensor | None:
        """Which of the server's samples test the global model: those that the method does not use for anything else."""
        return task.data.server

    def score_server(self, task: Task, server: Tree, stats: Tree, key: Key) -> Tensor | None:
        """(correct, summed loss, samples) on the server's samples, for a method that tests there something else than
        `global_model`; `stats` are the running statistics for it, by slot."""
        return None


ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm", "fedloom.algorithms")
