"""The steps of a phase for a stacked cohort as CUDA graphs."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedloom.device.cuda_graph import capture_graph, side_stream_warmup
from fedloom.device.transfer import clone_tensors, copy_tensors
from fedloom.engine.batching import Window
from fedloom.engine.graph.analysis import count_operations, passed_through, result_bytes
from fedloom.engine.graph.in_place import fuse_matmul_updates, write_to_inputs
from fedloom.engine.graph.multi_stream import MAX_RESULT_BYTES, MultiStreamGraph
from fedloom.engine.graph.stacked_step import Flat, StackedStep
from fedloom.engine.graph.tracing import trace
from fedloom.engine.plan import Plan
from fedloom.nn.kernels.batch_gather import gather_batch, pack_table, table_width
from fedloom.nn.kernels.dispatch import use_custom_kernel
from fedloom.nn.kernels.passes import insert_kernels
from fedloom.nn.kernels.warmup import compile_kernels

STEPS_PER_GRAPH = {32: 64, 8: 256}  # steps that one CUDA graph contains, and the most nodes of a step's graph for it


class CapturedSteps(NamedTuple):
    """CUDA graphs of one or several steps."""

    by_steps: dict[int, torch.cuda.CUDAGraph]  # by number of steps, the largest first
    graph: Any  # kept alive because the CUDA graphs read its constants


class CudaGraphRunner:
    """CUDA graphs over static memory, one per prefix size: a step is one launch."""

    def __init__(self, step: StackedStep, plan: Plan, window_length: int, memory_pool: Any) -> None:
        self.step, self.capacity, self.compiled = step, plan.chunk, plan.compiled
        self.window_length, self.memory_pool = window_length, memory_pool
        self.captured: dict[int, CapturedSteps] = {}  # by prefix
        self.state: Flat = []
        self.changes = [True] * step.state_size
        self.operations = 0

    def start(self, state: Flat, rows: Flat, shared: Flat) -> None:
        if not self.state:
            self.state = [_zeros(v, self.capacity) for v in state]
            self.row_inputs = [_zeros(v, self.capacity) for v in rows]
            self.shared = [v.clone() for v in shared]
            self.at = torch.zeros(1, dtype=torch.int64, device=self.step.task.data.device)
            self.table: Tensor | None = None
            self.loaded: Window | None = None
        pairs = zip([*self.state, *self.row_inputs], [*state, *rows], strict=True)
        copy_tensors([*(mine[: len(new)] for mine, new in pairs), *self.shared], [*state, *rows, *shared])

    def rows(self, first: int, last: int) -> Flat:
        return clone_tensors([s[first:last] for s in self.state])

    def advance(self, window: Window, first: int, last: int, prefix: int) -> None:
        self.load(window)
        if prefix not in self.captured:
            self.captured[prefix] = self._capture(prefix)
        self.at.fill_(first)
        left = last - first
        for size, graph in self.captured[prefix].by_steps.items():
            for _ in range(left // size):
                graph.replay()
            left %= size

    def load(self, window: Window) -> None:
        if self.table is None:
            self.shape = list(window.rows.shape[2:])
            self.table = window.rows.new_zeros(self.window_length, self.capacity, table_width(self.shape))
        if self.loaded is not window:
            self.table[: len(window.k), : window.k.shape[1]] = pack_table(*window)
            self.loaded = window

    def traced_step(self, prefix: int) -> tuple[GraphModule, Flat]:
        """The graph of a step for the first `prefix` clients, which overwrites its inputs; and these inputs."""
        assert self.table is not None
        data = self.step.task.data
        rows, state = ([v[:prefix] for v in tensors] for tensors in (self.row_inputs, self.state))
        inputs = [self.table, self.at, *state, *rows, *self.shared, data.x, data.y]

        def step(table: Tensor, at: Tensor, *flat: Tensor) -> Flat:
            x, y, mask, more = gather_batch(table, at, *flat[-2:], prefix, self.shape, data.dtype)
            k, epoch, last, key = more
            return self.step.on_batch(x, y, (mask, k, epoch, last > 0, key), flat[:-2])

        use_custom_kernel("batch_gather")
        module = trace(step, inputs)
        compiled = self._compiles(prefix)
        self.changes = [not same for same in passed_through(module, 2)]
        self.operations = count_operations(module)
        insert_kernels(module, compiled)
        write_to_inputs(module, 2, 1)
        if not compiled:  # torch's compiler fuses updates itself
            fuse_matmul_updates(module)
        return module, inputs

    def _compiles(self, prefix: int) -> bool:
        """True if torch's compiler is used; small prefixes are bound by the number of kernels, not by memory."""
        return self.compiled and 2 * prefix > self.capacity

    def _capture(self, prefix: int) -> CapturedSteps:
        module, inputs = self.traced_step(prefix)
        state = inputs[2 : 2 + len(self.state)]
        compile_kernels(module)
        run: Callable[..., Any] = _compiled(module, inputs) if self._compiles(prefix) else module
        if not self._compiles(prefix) and result_bytes(module.graph) <= MAX_RESULT_BYTES:
            run = MultiStreamGraph(module)
        kept = [v.clone() for v in (self.at, *state)]

        def go(steps: int) -> None:
            for _ in range(steps):
                run(*inputs)

        def first_step() -> None:
            self.at.zero_()
            run(*inputs)

        side_stream_warmup(first_step, times=2)
        sizes = [steps for steps, most in STEPS_PER_GRAPH.items() if len(module.graph.nodes) <= most]
        by_steps = {steps: capture_graph(partial(go, steps), self.memory_pool)[0] for steps in (*sizes, 1)}
        copy_tensors([self.at, *state], kept)
        return CapturedSteps(by_steps, run)


def _compiled(module: GraphModule, inputs: Flat) -> Callable[..., Any]:
    import torch._inductor as inductor  # takes seconds to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice that users cannot follow
        return inductor.compile(module, list(inputs))


def _zeros(like: Tensor, rows: int) -> Tensor:
    return like.new_zeros((rows, *like.shape[1:]))
