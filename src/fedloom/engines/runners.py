"""How the steps of a phase are carried out for a stacked cohort: eagerly, from a trace, or from a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedloom.core.autodiff import vmap
from fedloom.core.capture import aside, captured
from fedloom.core.contract import Batch, Info, Phase
from fedloom.core.task import Task
from fedloom.core.transfer import copies, copy_all
from fedloom.core.tree import Tree, tree_flatten, tree_unflatten
from fedloom.engines.cohort import Cohort
from fedloom.engines.lanes import MOST_BYTES, Lanes, bytes_on_the_way
from fedloom.engines.plan import Plan
from fedloom.engines.schedule import Window
from fedloom.engines.trace import join_updates, join_writes, operations, overwrite, passed_through, trace, used_inputs
from fedloom.kernels.convolution import convolutions
from fedloom.kernels.embedding import replace_embeddings
from fedloom.kernels.pooling import replace_pooling
from fedloom.kernels.products import replace_products
from fedloom.kernels.ready import get_ready
from fedloom.kernels.samples import tables, take_samples, width
from fedloom.kernels.sums import replace_sums

Flat = list[Tensor]
BUNDLES = {32: 64, 8: 256}  # steps that are launched at once, and the most operations that a program of them has


def flat_rest(cohort: Cohort) -> tuple[Flat, Flat]:
    """What a step gets besides state and batch: with a row per client, and shared by all."""
    return tree_flatten((cohort.parts, cohort.info))[0], tree_flatten(cohort.shared)[0]


class StackedStep:
    """A phase's step for many clients, from flat list to flat list, so that it can be traced.

    The inputs are: the six tables of a window at one step, the state, the rest that has a row per client (parts and
    info), what all clients share, and the pool of samples.
    """

    def __init__(self, task: Task, phase: Phase, work: Tree, cohort: Cohort, plan: Plan) -> None:
        self.task, self.phase, self.ways = task, phase, plan.convolutions
        _, self.work_spec = tree_flatten(work)
        _, self.side_spec = tree_flatten((cohort.parts, cohort.info))
        _, self.shared_spec = tree_flatten(cohort.shared)
        self.state_size = self.work_spec.num_leaves
        self.side_size = self.side_spec.num_leaves
        self.down_dims = {**dict.fromkeys(cohort.shared), **dict.fromkeys(cohort.parts, 0)}

    def __call__(self, *flat: Tensor) -> Flat:
        rows, *tables = flat[:6]
        x, y = flat[-2:]
        return self.on(x[rows], y[rows], tables, flat[6:-2])

    def on(self, x: Tensor, y: Tensor, tables: Sequence[Tensor], rest: Sequence[Tensor]) -> Flat:
        """The same from samples that are taken already."""
        cut = self.state_size
        work = tree_unflatten(rest[:cut], self.work_spec)
        parts, info = tree_unflatten(rest[cut : cut + self.side_size], self.side_spec)
        shared = tree_unflatten(rest[cut + self.side_size :], self.shared_spec)
        batch = Batch(self.task.data.prepare(x), y, *tables)

        def one(work: Tree, batch: Batch, down: Tree, info: Info) -> Tree:
            return self.phase.step(self.task, work, batch, down, info)

        dims = (0, 0, self.down_dims, 0)
        with convolutions(self.ways):
            leaves, spec = tree_flatten(vmap(one, in_dims=dims)(work, batch, {**shared, **parts}, info))
        if spec != self.work_spec:
            raise TypeError(f"the step of a phase must return work as it got it: {self.work_spec}, not {spec}")
        return [v.contiguous() for v in leaves]  # a trace relies on the layout of its inputs


class Runner(Protocol):
    def start(self, state: Flat, sides: Flat, shared: Flat) -> None: ...
    def load(self, window: Window) -> None:
        """Put it where the next steps read it."""

    def advance(self, window: Window, first: int, last: int, prefix: int) -> None: ...
    def rows(self, first: int, last: int) -> Flat: ...
    @property
    def moves(self) -> list[bool]: ...
    @property
    def operations(self) -> int:
        """Of a step, where there is a program for it."""


class Functional:
    """State in, state out; nothing is written in place."""

    def __init__(self, step: StackedStep, traced: bool) -> None:
        self.step, self.traced = step, traced
        self.programs: dict[int, tuple[Callable[..., Flat], list[bool]]] = {}
        self.moves = [True] * step.state_size
        self.operations = 0

    def start(self, state: Flat, sides: Flat, shared: Flat) -> None:
        self.state, self.sides = state, sides
        self.shared = [*shared, self.step.task.data.x, self.step.task.data.y]

    def load(self, window: Window) -> None:
        pass  # they read it where it is

    def rows(self, first: int, last: int) -> Flat:
        return [s[first:last] for s in self.state]

    def advance(self, window: Window, first: int, last: int, prefix: int) -> None:
        state, sides = (_resize(v, prefix) for v in (self.state, self.sides))
        run, used = self._program(prefix, window, state, sides)
        for w in range(first, last):
            tables = [v[w, :prefix] if u else v for v, u in zip(window, used, strict=True)]
            state = run(*tables, *state, *sides, *self.shared)
        self.state, self.sides = list(state), sides

    def _program(self, prefix: int, window: Window, state: Flat, sides: Flat) -> tuple[Callable[..., Flat], list[bool]]:
        if not self.traced:
            return self.step, [True] * len(window)
        if prefix not in self.programs:
            module = trace(self.step, [*(v[0, :prefix] for v in window), *state, *sides, *self.shared])
            self.moves = [not same for same in passed_through(module, len(window))]
            self.operations = operations(module)
            self.programs[prefix] = module.forward, used_inputs(module)[: len(window)]
        return self.programs[prefix]


def _resize(tensors: Flat, rows: int) -> Flat:
    """The first rows; where there are fewer, the first one is repeated behind them (nobody reads those)."""
    if tensors and len(tensors[0]) < rows:
        return [torch.cat([t, t[:1].expand(rows - len(t), *t.shape[1:])]) for t in tensors]
    return [t[:rows] for t in tensors]


class Graphs(NamedTuple):
    by_steps: dict[int, torch.cuda.CUDAGraph]  # the longest first
    program: Any  # whose constants they read


class Captured:
    """CUDA graphs over static memory: a step costs one launch. One graph per prefix size, all over the same state."""

    def __init__(self, step: StackedStep, plan: Plan, window_length: int, pool: Any) -> None:
        self.step, self.capacity, self.compiled = step, plan.chunk, plan.compiled
        self.window_length, self.pool = window_length, pool
        self.graphs: dict[int, Graphs] = {}
        self.state: Flat = []
        self.moves = [True] * step.state_size
        self.operations = 0

    def start(self, state: Flat, sides: Flat, shared: Flat) -> None:
        if not self.state:
            self.state = [_room(v, self.capacity) for v in state]
            self.sides = [_room(v, self.capacity) for v in sides]
            self.shared = [v.clone() for v in shared]
            self.at = torch.zeros(1, dtype=torch.int64, device=self.step.task.data.device)
            self.table: Tensor | None = None
            self.loaded: Window | None = None
        rows = zip([*self.state, *self.sides], [*state, *sides], strict=True)
        copy_all([*(mine[: len(new)] for mine, new in rows), *self.shared], [*state, *sides, *shared])

    def rows(self, first: int, last: int) -> Flat:
        return copies([s[first:last] for s in self.state])

    def advance(self, window: Window, first: int, last: int, prefix: int) -> None:
        self.load(window)
        if prefix not in self.graphs:
            self.graphs[prefix] = self._capture(prefix)
        graphs = self.graphs[prefix]
        self.at.fill_(first)
        left = last - first
        for size, graph in graphs.by_steps.items():
            for _ in range(left // size):
                graph.replay()
            left %= size

    def load(self, window: Window) -> None:
        if self.table is None:
            self.shape = list(window.rows.shape[2:])
            self.table = window.rows.new_zeros(self.window_length, self.capacity, width(self.shape))
        if self.loaded is not window:
            self.table[: len(window.k), : window.k.shape[1]] = tables(*window)
            self.loaded = window

    def program(self, prefix: int) -> tuple[GraphModule, Flat]:
        """A step of the first clients that writes over its inputs, and these."""
        assert self.table is not None
        data = self.step.task.data
        sides, state = ([v[:prefix] for v in rows] for rows in (self.sides, self.state))
        inputs = [self.table, self.at, *state, *sides, *self.shared, data.x, data.y]

        def step(table: Tensor, at: Tensor, *flat: Tensor) -> Flat:
            x, y, mask, more = take_samples(table, at, *flat[-2:], prefix, self.shape, data.dtype)
            k, epoch, last, key = more
            return self.step.on(x, y, (mask, k, epoch, last > 0, key), flat[:-2])

        program = trace(step, inputs)
        replace_products(program)
        self.moves = [not same for same in passed_through(program, 2)]
        self.operations = operations(program)
        plain = not self._compiles(prefix)  # the compiler has its own way with what follows
        if plain:
            replace_pooling(program)
            replace_sums(program)
            replace_embeddings(program)
        overwrite(program, 2, 1)
        if plain:
            join_updates(program)
            join_writes(program, 1)
        return program, inputs

    def _compiles(self, prefix: int) -> bool:
        """Small prefixes gain little: what they wait for is the length of the program, not its memory."""
        return self.compiled and 2 * prefix > self.capacity

    def _capture(self, prefix: int) -> Graphs:
        program, inputs = self.program(prefix)
        state = inputs[2 : 2 + len(self.state)]
        get_ready(program)
        run: Callable[..., Any] = _compiled(program, inputs) if self._compiles(prefix) else program
        if not self._compiles(prefix) and bytes_on_the_way(program.graph) <= MOST_BYTES:
            run = Lanes(program)
        kept = [v.clone() for v in (self.at, *state)]

        def go(steps: int) -> None:
            for _ in range(steps):
                run(*inputs)

        def first() -> None:
            self.at.zero_()
            run(*inputs)

        aside(first, times=2)
        bundles = [steps for steps, most in BUNDLES.items() if len(program.graph.nodes) <= most]
        by_steps = {steps: captured(partial(go, steps), self.pool)[0] for steps in (*bundles, 1)}
        copy_all([self.at, *state], kept)
        return Graphs(by_steps, run)


def _compiled(program: GraphModule, inputs: Flat) -> Callable[..., Any]:
    import torch._inductor as inductor  # takes seconds

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice to the authors of the program
        return inductor.compile(program, list(inputs))


def _room(like: Tensor, rows: int) -> Tensor:
    return like.new_zeros((rows, *like.shape[1:]))
