"""The steps of a phase for a stacked cohort, carried out eagerly or from a traced graph."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedloom.core.algorithm import Batch, Info, Phase
from fedloom.core.autodiff import vmap
from fedloom.core.federation import gather_rows
from fedloom.core.task import Task
from fedloom.core.tree import Tree, tree_flatten, tree_unflatten
from fedloom.engine.batching import Window
from fedloom.engine.cohort import Cohort
from fedloom.engine.graph.analysis import count_operations, passed_through, used_inputs
from fedloom.engine.graph.cpu_passes import fuse_bmm_updates, fuse_cross_entropy
from fedloom.engine.graph.tracing import trace
from fedloom.engine.plan import Plan
from fedloom.nn.kernels.convolution import convolutions

Flat = list[Tensor]


def flat_inputs(cohort: Cohort) -> tuple[Flat, Flat]:
    """What a step receives besides state and batch: tensors with one row per client, and tensors shared by all."""
    return tree_flatten((cohort.parts, cohort.info))[0], tree_flatten(cohort.shared)[0]


class StackedStep:
    """A phase's step for many clients, from a flat list of tensors to a flat list, so that it can be traced.

    The inputs are: the six columns of a window at one step, the state, what else has one row per client (parts and
    info), what all clients share, and all samples.
    """

    def __init__(self, task: Task, phase: Phase, work: Tree, cohort: Cohort, plan: Plan) -> None:
        self.task, self.phase, self.conv_algos = task, phase, plan.convolutions
        _, self.work_spec = tree_flatten(work)
        _, self.row_spec = tree_flatten((cohort.parts, cohort.info))
        _, self.shared_spec = tree_flatten(cohort.shared)
        self.state_size = self.work_spec.num_leaves
        self.row_size = self.row_spec.num_leaves
        self.down_dims = {**dict.fromkeys(cohort.shared), **dict.fromkeys(cohort.parts, 0)}

    def __call__(self, *flat: Tensor) -> Flat:
        rows, *tables = flat[:6]
        x, y = flat[-2:]
        return self.on_batch(gather_rows(x, rows), gather_rows(y, rows), tables, flat[6:-2])

    def on_batch(self, x: Tensor, y: Tensor, tables: Sequence[Tensor], rest: Sequence[Tensor]) -> Flat:
        """The step on samples that are already gathered."""
        cut = self.state_size
        work = tree_unflatten(rest[:cut], self.work_spec)
        parts, info = tree_unflatten(rest[cut : cut + self.row_size], self.row_spec)
        shared = tree_unflatten(rest[cut + self.row_size :], self.shared_spec)
        batch = Batch(self.task.data.prepare(x), y, *tables)

        def one(work: Tree, batch: Batch, down: Tree, info: Info) -> Tree:
            return self.phase.step(self.task, work, batch, down, info)

        dims = (0, 0, self.down_dims, 0)
        with convolutions(self.conv_algos):
            leaves, spec = tree_flatten(vmap(one, in_dims=dims)(work, batch, {**shared, **parts}, info))
        if spec != self.work_spec:
            raise TypeError(f"Phase.step must return work of the structure {self.work_spec}, not {spec}")
        return [v.contiguous() for v in leaves]  # a traced graph relies on the layout of its inputs


class StepRunner(Protocol):
    """Carries out the steps of a phase."""

    changes: list[bool]  # which tensors of the state a step changes
    operations: int  # of a step's graph; 0 where there is none

    def start(self, state: Flat, rows: Flat, shared: Flat) -> None:
        """Begin with this state; `rows` and `shared` are those of `flat_inputs`."""

    def load(self, window: Window) -> None:
        """Copy batches to where the next steps read them."""

    def advance(self, window: Window, first: int, last: int, prefix: int) -> None:
        """Carry out the steps from `first` to `last` of a window for the first `prefix` clients."""

    def rows(self, first: int, last: int) -> Flat:
        """The state of some clients."""


class PrefixGraph(NamedTuple):
    """A step for some number of clients."""

    run: Callable[..., Flat]
    reads: list[bool]  # which columns of a window it reads
    overwrites: list[int]  # positions of the state that it writes over


class FunctionalRunner:
    """From state to state, eagerly or from traced graphs; what it is started with is not changed."""

    def __init__(self, step: StackedStep, traced: bool) -> None:
        self.step, self.traced = step, traced
        self.graphs: dict[int, PrefixGraph] = {}
        self.changes = [True] * step.state_size
        self.operations = 0

    def start(self, state: Flat, rows: Flat, shared: Flat) -> None:
        self.state, self.row_inputs = state, rows
        self.owned: set[int] = set()  # positions of the state that may be overwritten
        self.shared = [*shared, self.step.task.data.x, self.step.task.data.y]

    def load(self, window: Window) -> None:
        """Does nothing: batches are read where they are."""

    def rows(self, first: int, last: int) -> Flat:
        return [s[first:last] for s in self.state]

    def advance(self, window: Window, first: int, last: int, prefix: int) -> None:
        state, rows = (_resize(v, prefix) for v in (self.state, self.row_inputs))
        run, reads, overwrites = self._graph(prefix, window, state, rows)
        state = [v.clone() if at in overwrites and at not in self.owned else v for at, v in enumerate(state)]
        self.owned.update(overwrites)
        for w in range(first, last):
            tables = [v[w, :prefix] if read else v for v, read in zip(window, reads, strict=True)]
            state = run(*tables, *state, *rows, *self.shared)
        self.state, self.row_inputs = list(state), rows

    def _graph(self, prefix: int, window: Window, state: Flat, rows: Flat) -> PrefixGraph:
        if not self.traced:
            return PrefixGraph(self.step, [True] * len(window), [])
        if prefix not in self.graphs:
            module = trace(self.step, [*(v[0, :prefix] for v in window), *state, *rows, *self.shared])
            self.changes = [not same for same in passed_through(module, len(window))]
            self.operations = count_operations(module)
            overwrites = []
            if not self.shared[-1].is_cuda:
                fuse_cross_entropy(module)
                overwrites = fuse_bmm_updates(module, len(window), self.step.state_size)
            self.graphs[prefix] = PrefixGraph(module.forward, used_inputs(module)[: len(window)], overwrites)
        return self.graphs[prefix]


def _resize(tensors: Flat, rows: int) -> Flat:
    """The first rows; where there are fewer, padded with the first one (padding is never read)."""
    if tensors and len(tensors[0]) < rows:
        return [torch.cat([t, t[:1].expand(rows - len(t), *t.shape[1:])]) for t in tensors]
    return [t[:rows] for t in tensors]
