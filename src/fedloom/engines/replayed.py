"""What a method does once per round for a stacked cohort, from traces: without vmap, autograd and trees on the way."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fedloom.core.tree import Tree, tree_flatten, tree_unflatten
from fedloom.engines.trace import trace
from fedloom.kernels.pooling import replace_pooling

log = logging.getLogger("fedloom")

AFTER = 50  # calls with the same shapes, after which the next is traced; a trace costs as much as it saves in 50 to 100
PROGRAMS = 64  # at most
SHAPES = 1 << 12  # that are counted


class Program(NamedTuple):
    inputs: Any  # how arguments are nested
    outputs: Any
    run: Callable[..., Sequence[Tensor]] | None  # None: it cannot be traced


class Replayed:
    """Calls functions of tensors, and those that are called often from a trace. Results are the same to the bit."""

    def __init__(self, on: bool) -> None:
        self.on = on
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
            if self.calls[key] <= AFTER or len(self.programs) == PROGRAMS:
                if len(self.calls) > SHAPES:
                    self.calls.clear()
                return f(*args)
            self.programs[key] = _program(name, f, flat, spec)
        program = self.programs[key]
        if program.run is None or program.inputs != spec:
            return f(*args)
        return tree_unflatten(program.run(*flat), program.outputs)

    def clear(self) -> None:
        self.programs.clear()


def _program(name: Hashable, f: Callable[..., Tree], flat: list[Tensor], spec: Any) -> Program:
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
        run = program.forward
        # some kernels cannot be traced, and it shows only when they run
        torch.testing.assert_close(list(run(*flat)), flattened(*flat), rtol=0, atol=0, equal_nan=True)
    except Exception:  # any operation may lack what tracing needs
        log.info("%s cannot be traced.", name, exc_info=True)
        return Program(spec, None, None)
    return Program(spec, outputs[0], run)
