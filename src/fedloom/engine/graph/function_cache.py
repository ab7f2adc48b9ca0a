"""Functions of tensors that are called in every round, replayed from traced graphs (on a GPU: from CUDA graphs),
without vmap, autograd and pytree handling."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from fedloom.core.tree import Tree, size_bytes, tree_flatten, tree_unflatten
from fedloom.device.cuda_graph import capture_graph, side_stream_warmup
from fedloom.device.memory import available_memory
from fedloom.device.transfer import clone_tensors, copy_tensors
from fedloom.engine.graph.analysis import result_bytes
from fedloom.engine.graph.tracing import trace
from fedloom.nn.kernels.pooling import replace_pooling

log = logging.getLogger("fedloom")

CALLS_BEFORE_TRACE = 50  # with the same shapes; a trace takes as long as it saves in 50 to 100 calls
CALLS_BEFORE_CAPTURE = 10  # a CUDA graph saves more
MAX_GRAPHS = 64
MAX_COUNTED = 1 << 12  # signatures whose calls are counted
MAX_COPIED_BYTES = 1 << 28  # into and out of a CUDA graph


class Traced(NamedTuple):
    """A traced function."""

    inputs: Any  # tree structure of the arguments
    outputs: Any  # tree structure of the result
    run: Callable[..., Sequence[Tensor]] | None  # None if it cannot be traced


class CapturedFunction:
    """A traced function as a CUDA graph. Arguments are copied to its static inputs, except those that are static."""

    def __init__(self, module: GraphModule, flat: list[Tensor], static: list[bool], memory_pool: Any) -> None:
        self.module = module
        self.copied = [place for place, is_static in enumerate(static) if not is_static]
        self.pointers = {place: flat[place].data_ptr() for place, is_static in enumerate(static) if is_static}
        pairs = zip(flat, static, strict=True)
        self.inputs = [v if is_static else torch.empty_like(v).copy_(v) for v, is_static in pairs]
        side_stream_warmup(lambda: module(*self.inputs))
        self.graph, self.outputs = capture_graph(lambda: list(module(*self.inputs)), memory_pool)

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        if any(flat[place].data_ptr() != at for place, at in self.pointers.items()):  # other tensors than at capture
            return list(self.module(*flat))
        copy_tensors([self.inputs[place] for place in self.copied], [flat[place] for place in self.copied])
        self.graph.replay()
        return clone_tensors(self.outputs)


class FunctionCache:
    """Calls functions of tensors; those that are called often are traced and replayed. Results are the same to the bit.

    With a memory pool for CUDA graphs, traced functions are captured. `static` are tensors that never move.
    """

    def __init__(self, enabled: bool, memory_pool: Any = None, static: Sequence[Tensor] = ()) -> None:
        self.enabled, self.memory_pool, self.static = enabled, memory_pool, {v.data_ptr() for v in static}
        self.calls: Counter[Hashable] = Counter()
        self.traced: dict[Hashable, Traced] = {}

    def __call__(self, name: Hashable, f: Callable[..., Tree], *args: Tree) -> Tree:
        """f(*args). Functions with the same name must compute the same and depend on nothing but their arguments."""
        if not self.enabled:
            return f(*args)
        flat, spec = tree_flatten(args)
        key = name, *((v.shape, v.stride(), v.dtype) for v in flat)
        if key not in self.traced:
            self.calls[key] += 1
            if self.calls[key] <= self._calls_before() or len(self.traced) == MAX_GRAPHS:
                if len(self.calls) > MAX_COUNTED:
                    self.calls.clear()
                return f(*args)
            self.traced[key] = self._trace(name, f, flat, spec)
        traced = self.traced[key]
        if traced.run is None or traced.inputs != spec:
            return f(*args)
        return tree_unflatten(traced.run(*flat), traced.outputs)

    def _calls_before(self) -> int:
        return CALLS_BEFORE_TRACE if self.memory_pool is None else CALLS_BEFORE_CAPTURE

    def clear(self) -> None:
        """Forget all traced functions."""
        self.traced.clear()

    def _trace(self, name: Hashable, f: Callable[..., Tree], flat: list[Tensor], spec: Any) -> Traced:
        outputs: list[Any] = []

        def flattened(*inputs: Tensor) -> list[Tensor]:
            found, how = tree_flatten(f(*tree_unflatten(inputs, spec)))
            outputs.append(how)
            return found

        try:
            with FakeTensorMode(allow_non_fake_inputs=True):  # a tensor that is passed twice is two inputs
                inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in flat]
            module = trace(flattened, inputs)
            if any(v.is_cuda for v in flat):
                replace_pooling(module)
            # some kernels cannot be traced, which only shows when they run
            found = list(module(*flat))
            torch.testing.assert_close(found, flattened(*flat), rtol=0, atol=0, equal_nan=True)
            run = self._capture(module, flat, found) or module.forward
        except Exception:  # any operation may lack what tracing needs
            log.info("%s cannot be traced.", name, exc_info=True)
            return Traced(spec, None, None)
        return Traced(spec, outputs[0], run)

    def _capture(self, module: GraphModule, flat: list[Tensor], found: list[Tensor]) -> CapturedFunction | None:
        """A CUDA graph, unless it would be empty, take too much memory, or need an input in another layout."""
        static = [v.data_ptr() in self.static for v in flat]
        copied = [v for v, is_static in zip(flat, static, strict=True) if not is_static]
        same = (v.is_cuda and torch.empty_like(v, device="meta").stride() == v.stride() for v in copied)
        if self.memory_pool is None or not all(same):
            return None
        size = result_bytes(module.graph)
        if not size or size_bytes((copied, found)) > MAX_COPIED_BYTES or size > available_memory(flat[0].device) // 8:
            return None
        return CapturedFunction(module, flat, static, self.memory_pool)
