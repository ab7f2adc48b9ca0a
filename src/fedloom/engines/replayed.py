"""What a method does once per round for a stacked cohort, from traces: without vmap, autograd and trees on the way.

On a GPU these are captured graphs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from fedloom.core.capture import aside, captured
from fedloom.core.memory import free_memory
from fedloom.core.transfer import copies, copy_all
from fedloom.core.tree import Tree, size_bytes, tree_flatten, tree_unflatten
from fedloom.engines.lanes import bytes_on_the_way
from fedloom.engines.trace import trace
from fedloom.kernels.pooling import replace_pooling

log = logging.getLogger("fedloom")

AFTER = 50  # calls with the same shapes, after which the next is traced; a trace costs as much as it saves in 50 to 100
SOONER = 5  # times, where it is captured, which saves more
PROGRAMS = 64  # at most
SHAPES = 1 << 12  # that are counted
COPIED = 1 << 28  # bytes into and out of a captured graph, at most


class Program(NamedTuple):
    inputs: Any  # how arguments are nested
    outputs: Any
    run: Callable[..., Sequence[Tensor]] | None  # None: it cannot be traced


class Graph:
    """A captured program. What it is given is copied to where it reads it, but for what stays where it is."""

    def __init__(self, program: GraphModule, flat: list[Tensor], stays: list[bool], pool: Any) -> None:
        self.program = program
        self.moves = [place for place, still in enumerate(stays) if not still]
        self.still = {place: flat[place].data_ptr() for place, still in enumerate(stays) if still}
        self.inputs = [v if still else torch.empty_like(v).copy_(v) for v, still in zip(flat, stays, strict=True)]
        aside(lambda: program(*self.inputs))
        self.graph, self.outputs = captured(lambda: list(program(*self.inputs)), pool)

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        if any(flat[place].data_ptr() != at for place, at in self.still.items()):  # other clients have other samples
            return list(self.program(*flat))
        copy_all([self.inputs[place] for place in self.moves], [flat[place] for place in self.moves])
        self.graph.replay()
        return copies(self.outputs)


class Replayed:
    """Calls functions of tensors, and those that are called often from a trace. Results are the same to the bit. Traces
    are captured where there is a pool for graphs' memory; `still` are tensors that stay where they are."""

    def __init__(self, on: bool, pool: Any = None, still: Sequence[Tensor] = ()) -> None:
        self.on, self.pool, self.still = on, pool, {v.data_ptr() for v in still}
        self.calls: Counter[Hashable] = Counter()
        self.programs: dict[Hashable, Program] = {}

    def __call__(self, name: Hashable, f: Callable[..., Tree], *args: Tree) -> Tree:
        """f(*args). Functions of one name do the same, and depend on nothing that changes but their arguments."""
        if not self.on:
            return f(*args)
        flat, spec = tree_flatten(args)
        key = name, *((v.shape, v.stride(), v.dtype) for v in flat)
        if key not in self.programs:
            self.calls[key] += 1
            if self.calls[key] <= self._after() or len(self.programs) == PROGRAMS:
                if len(self.calls) > SHAPES:
                    self.calls.clear()
                return f(*args)
            self.programs[key] = self._program(name, f, flat, spec)
        program = self.programs[key]
        if program.run is None or program.inputs != spec:
            return f(*args)
        return tree_unflatten(program.run(*flat), program.outputs)

    def _after(self) -> int:
        return AFTER if self.pool is None else AFTER // SOONER

    def clear(self) -> None:
        self.programs.clear()

    def _program(self, name: Hashable, f: Callable[..., Tree], flat: list[Tensor], spec: Any) -> Program:
        outputs: list[Any] = []

        def flattened(*inputs: Tensor) -> list[Tensor]:
            found, how = tree_flatten(f(*tree_unflatten(inputs, spec)))
            outputs.append(how)
            return found

        try:
            with FakeTensorMode(allow_non_fake_inputs=True):  # a tensor that comes in twice is two inputs
                inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in flat]
            program = trace(flattened, inputs)
            if any(v.is_cuda for v in flat):
                replace_pooling(program)
            # some kernels cannot be traced, and it shows only when they run
            found = list(program(*flat))
            torch.testing.assert_close(found, flattened(*flat), rtol=0, atol=0, equal_nan=True)
            run = self._captured(program, flat, found) or program.forward
        except Exception:  # any operation may lack what tracing needs
            log.info("%s cannot be traced.", name, exc_info=True)
            return Program(spec, None, None)
        return Program(spec, outputs[0], run)

    def _captured(self, program: GraphModule, flat: list[Tensor], found: list[Tensor]) -> Graph | None:
        """Unless there is nothing to do, it costs too much memory, or a copy of an input would have another layout."""
        stays = [v.data_ptr() in self.still for v in flat]
        moving = [v for v, still in zip(flat, stays, strict=True) if not still]
        same = (v.is_cuda and torch.empty_like(v, device="meta").stride() == v.stride() for v in moving)
        if self.pool is None or not all(same):
            return None
        room = bytes_on_the_way(program.graph)
        if not room or size_bytes((moving, found)) > COPIED or room > free_memory(flat[0].device) // 8:
            return None
        return Graph(program, flat, stays, self.pool)
