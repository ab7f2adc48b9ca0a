"""The contract between algorithms and the engine.

An algorithm is a frozen dataclass of hyper-parameters with pure functions over explicit state. It never sees an engine,
a device, a loop over clients or batches, or a file. Every client function is written for ONE client; the engine calls
it for one client after another, or under `vmap` for a whole cohort. So client functions must not branch in Python on
tensor values (use `where`), index with booleans, or call `.item()`.

A round, as every executor runs it::

    shared, parts = download(server, ids)              once; parts are stacked, one row per client of the cohort
    work = begin(down, state)                          per client; down = constants + shared + its row of parts
    for phase in phases:                               per client; enter, then step for every batch of every epoch
    report(work, down)                                 per client; numbers for the records, not sent to the server
    state, up = finish(work, down, state)              per client; state is kept by the client, up is uploaded
    server = aggregate(server, up)                     once; up is stacked over the cohort

A client that joins after training runs the same round, with `admit` before it and `welcome` in place of `aggregate`.

Evaluation scores three models. PM_post: `model(work)` after the phases. PM_pre: begin with the newest server state,
then the `adapt` phases, then `model`; the result is not kept. GM: `global_model(server)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from fedloom.core.keys import Key, fold, rng
from fedloom.core.kinds import KINDS, Kind
from fedloom.core.optimizers import Moments
from fedloom.core.registry import Registry
from fedloom.core.tree import Params, Tree, size_bytes

if TYPE_CHECKING:
    from fedloom.core.task import Task


class Draw(NamedTuple):
    """Random draws on the host for one client in one round; the argument of `Phase.select`."""

    seed: int
    i: int  # client id
    t: int  # round
    run: int = 0  # index of the run, where several runs are stacked

    def rng(self, stream: str, *ids: int) -> np.random.Generator:
        """A NumPy generator of a named stream, keyed by the seed and the given ids."""
        return rng(stream, self.seed, *ids)


class Info(NamedTuple):
    """What a client knows besides its state. At the server (`aggregate`), stacked, and without `counts`."""

    id: Tensor  # i
    n: Tensor  # n_i, number of training samples
    counts: Tensor  # n_{i,c}, training samples per class or label; stays at the client, so it is empty at the server
    t: Tensor  # round
    first: Tensor  # True until the client has trained once
    key: Tensor  # random key of (seed, i, t)


class Batch(NamedTuple):
    """A batch of one client's samples, padded to the full batch size."""

    x: Tensor
    y: Tensor  # class, (b,) or at every position (b, t); labels (b, l) or numbers (b,) in floating point
    mask: Tensor  # 1 for a sample, 0 for padding
    k: Tensor  # step index within the phase
    epoch: Tensor
    last: Tensor  # True for the last batch of an epoch
    key: Tensor  # random key of (seed, i, t, epoch, batch), for dropout and the like

    @property
    def weight(self) -> Tensor:
        """1 for every prediction that counts: for every sample (b,) or, for sequences, at every position (b, t)."""
        if self.y.dim() == 1 or self.y.is_floating_point():
            return self.mask
        return self.mask[:, None] * (self.y >= 0)

    def part(self, j: int) -> Batch:
        """The j-th batch of a group (`Phase.group`), with a random key derived from the group's."""
        return self._replace(x=self.x[j], y=self.y[j], mask=self.mask[j], key=fold(self.key, j))


class Slot(NamedTuple):
    """A model copy in training: parameters, running statistics (buffers) and the optimiser's moments."""

    params: Params
    buffers: Params
    moments: Moments


class Output(NamedTuple):
    """What a forward pass returns."""

    logits: Tensor
    features: Tensor  # the input of the head
    buffers: Params  # running statistics after this pass


Step = Callable[["Task", Tree, Batch, Tree, Info], Tree]
Enter = Callable[["Task", Tree, Tree, Info], Tree]


@dataclass(frozen=True)
class Phase:
    """Passes over a client's samples: `step(task, work, batch, down, info) -> work` for every batch."""

    step: Step
    epochs: int | Callable[[Task, Tree, Info], Tensor] = 1  # a function decides per client, inside the round
    enter: Enter | None = None  # (task, work, down, info) -> work, called before the first batch
    select: str | Callable[[int, Draw], np.ndarray] = "train"  # a split, or positions among the n_i samples
    until: Callable[[Tree], Tensor] | None = None  # (work) -> True to stop; asked after every epoch
    steps: int | None = None  # exactly so many batches instead of whole epochs
    batch: int | None = None  # batch size, if it is not the task's
    group: int = 1  # batches that one step receives; an incomplete group is dropped
    halve: bool = False  # a client with too few samples for one group splits them evenly over one group
    shuffle: bool = True
    train: bool = True  # False: a pass that evaluates or accumulates (keeps one-sample batches under BatchNorm)


@dataclass(frozen=True)
class Algorithm:
    """Base class of all methods. Subclasses set the class variables, add fields for hyper-parameters, define
    functions.

    Arguments that recur: `task`, model, data and local settings; `server`, the server's state; `down`, constants and
    what the client received (shared part and its own part); `state`, the client's private state; `work`, its working
    state within a round; `up`, uploads, stacked at the server; `info`, see `Info`; `t`, the round from 0; `key`, the
    run's random key. PM_post, PM_pre and GM are the models that are evaluated: personal after training, personal before
    the next training, global. See docs/contract.md.
    """

    name: ClassVar[str] = ""  # the paper's name of the method, in lower case
    source: ClassVar[str] = ""  # authors and venue
    paper: ClassVar[str] = ""  # title
    year: ClassVar[int] = 0
    shared: ClassVar[str] = ""  # what is sent, in words
    private: ClassVar[str] = ""  # what stays at the client, in words
    # entries of what `finish` returns for the server, with their meaning; a site sends nothing else
    uploads: ClassVar[Mapping[str, str]] = MappingProxyType({})
    # named sets of settings, where a paper and its authors' code differ: `variant=paper`, `variant=code`
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    turns: ClassVar[bool] = False  # the server aggregates after each client in turn
    partial: ClassVar[bool] = True  # a cohort may be a subset of the clients
    needs_split: ClassVar[bool] = False  # body and head must both have parameters
    averages: ClassVar[bool] = False  # `aggregate` is built on `task.average`, so that it can be a median
    server_step: ClassVar[str] = ""  # why the server's step cannot be that of another optimiser, in words
    no_privacy: ClassVar[str] = ""  # why clipping and noise (`dp_clip`) cannot protect what is uploaded, if so
    takes_diverged: ClassVar[bool] = False  # uploads with non-finite values reach `aggregate`, too
    needs_server_data: ClassVar[bool] = False
    targets: ClassVar[tuple[Kind, ...]] = KINDS  # what a model may predict: one of classes, labels, a number
    pre_is_global: ClassVar[bool] = False  # PM_pre is GM itself, so it is scored once
    global_slot: ClassVar[str] = "w"  # the slot whose running statistics GM uses at a client

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            ALGORITHMS.add(cls.name, cls)

    # -- before training ------------------------------------------------------------------------------------------

    def min_samples(self, task: Task) -> int:
        """Training samples that every client needs."""
        return 1

    def check(self, task: Task) -> None:
        """Raise UserError, before training, for settings that do not fit the task."""

    def depends_on_rounds(self, task: Task) -> str:
        """What of the method depends on `task.rounds`, in words, so that a run cannot be given more of them later; ""
        if nothing does."""
        return ""

    def init_server(self, task: Task, key: Key) -> Tree:
        """The server's state before the first round."""
        return {}

    def init_client(self, task: Task, key: Key, key_i: Tensor) -> Tree:
        """A client's private state before its first participation; `key` is the run's, `key_i` the client's."""
        return {}

    def constants(self, task: Task, key: Key) -> Tree:
        """Values that server and clients both draw from the seed, so they are not sent; part of `down`."""
        return {}

    # -- a round --------------------------------------------------------------------------------------------------

    def download(self, task: Task, server: Tree, ids: Tensor, t: int, key: Key) -> tuple[Tree, Tree]:
        """What all clients receive, and what each receives individually (stacked in the order of ids)."""
        return server, {}

    def size_of_parts(self, parts: Tree) -> int:
        """Bytes of the individual downloads, for a method whose parts contain padding that is not sent."""
        return size_bytes(parts)

    def begin(self, task: Task, down: Tree, state: Tree, info: Info) -> Tree:
        """The client's working state (`work`) at the start of a round."""
        raise NotImplementedError

    def phases(self, task: Task) -> list[Phase]:
        """The passes of local training, in order."""
        raise NotImplementedError

    def finish(self, task: Task, work: Tree, down: Tree, state: Tree, info: Info) -> tuple[Tree, Tree]:
        """The client's new private state, and its upload."""
        raise NotImplementedError

    def reference(self, task: Task, up: Mapping[str, Tree], down: Tree) -> Mapping[str, Tree]:
        """What the entries of a client's upload are measured from, by name, to see how large its update is; an entry
        that is not named is an update itself. By default, the downloads of the same names."""
        return {name: down[name] for name in up if name in down}

    def aggregate(self, task: Task, server: Tree, up: Tree, info: Info, t: int, key: Key) -> Tree:
        """The server's new state from the stacked uploads. `task.average` averages them as the user wants it;
        `task.data.server_signal` has the server's samples that it may learn from."""
        return server

    # -- clients that join after training -------------------------------------------------------------------------

    def admit(self, task: Task, server: Tree, ids: Tensor, key: Key) -> Tree:
        """The server state extended by what it keeps for each of these new clients; their ids follow all others."""
        return server

    def welcome(self, task: Task, server: Tree, up: Tree, info: Info, t: int, key: Key) -> Tree:
        """The server state after new clients uploaded; only what it keeps for them individually may change."""
        return server

    # -- evaluation and records -----------------------------------------------------------------------------------

    def adapt(self, task: Task) -> list[Phase]:
        """Passes that adapt a client's model before it is evaluated as PM_pre."""
        return []

    def model(self, task: Task, work: Tree, down: Tree, info: Info) -> Any:
        """The model that is evaluated: a Slot, or anything that `logits` accepts."""
        raise NotImplementedError

    def logits(self, task: Task, model: Any, x: Tensor) -> Tensor:
        """Predictions of a model, for methods that do not predict by the head alone."""
        return task.predict(model, x).logits

    def global_model(self, task: Task, server: Tree) -> Params | None:
        """The parameters of the global model; None for methods without one."""
        return None

    def score_server(self, task: Task, server: Tree, stats: Tree, key: Key) -> Tensor | None:
        """The sum of `task.score` over `task.data.server_test`, for a method that tests something else there than
        `global_model`; `stats` are running statistics by slot."""
        return None

    def report(self, task: Task, work: Tree, down: Tree, info: Info) -> dict[str, Tensor]:
        """Numbers of a client for the records, after its phases: scalars or vectors by name."""
        return {}

    def report_server(self, task: Task, server: Tree, info: Info) -> dict[str, Tensor]:
        """Numbers of the server for the records, after aggregation: scalars, or one row per client of the cohort."""
        return {}

    def report_round(self, rounds: list[dict[str, Any]]) -> dict[str, Any]:
        """Columns that the method adds to the row of an evaluated round; `rounds` are all rows up to it."""
        return {}

    def should_stop(self, rounds: list[dict[str, Any]]) -> bool:
        """True to end the run after the last of these evaluated rounds."""
        return False


ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm", "fedloom.algorithms")
