"""The step of one client as a flat program: traced once for full batches, without autograd on the way, and with results
written over what nobody reads again. A CPU spends much of a small client's step on memory that is new to its caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fedloom.core.contract import Batch, Info, Phase
from fedloom.core.federation import channels_last
from fedloom.core.task import Task
from fedloom.core.tree import Tree, tree_flatten, tree_unflatten
from fedloom.engines.trace import is_view, trace
from fedloom.engines.workers import proceed

aten = torch.ops.aten
# operation -> the form that writes its result elsewhere, what that form calls the place, arguments to write over
_OVER: dict[Any, tuple[Any, str, tuple[int, ...]]] = {
    aten.relu.default: (aten.relu.out, "out", (0,)),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input", (0,)),
    aten.add.Tensor: (aten.add.out, "out", (0, 1)),
    aten.mul.Tensor: (aten.mul.out, "out", (0, 1)),
    aten.sub.Tensor: (aten.sub.out, "out", (1, 0)),  # parameters minus the gradient: over the gradient
}


def laid_out(x: Tensor) -> Tensor:
    """As single clients compute with it: on a CPU, weights of convolutions lie as images do (see `Federation`)."""
    return channels_last(x) if x.dim() == 4 and x.device.type == "cpu" else x.contiguous()


class ClientStep:
    def __init__(self, task: Task, phase: Phase, work: Tree, batch: Batch, down: Tree, info: Info) -> None:
        """`batch` is a full one. What the trace gives is compared to the step: some kernels, such as oneDNN's LSTM,
        cannot be traced in their backward pass, and it shows only when they run."""
        self.task, self.phase, self.shape = task, phase, batch.x.shape
        state, self.work_spec = tree_flatten(work)
        rest, self.rest_spec = tree_flatten((down, info))
        # a tensor that comes in twice (work begins with what came down) would be taken for one input
        inputs = [*batch, *(v.clone() for v in (*state, *rest))]
        self.program = trace(self._step, inputs)
        write_over(self.program)
        torch.testing.assert_close(list(self.program(*inputs)), self._step(*inputs), rtol=0, atol=0, equal_nan=True)

    def _step(self, *flat: Tensor) -> list[Tensor]:
        cut = len(Batch._fields) + self.work_spec.num_leaves
        batch, work = Batch(*flat[: len(Batch._fields)]), tree_unflatten(flat[len(Batch._fields) : cut], self.work_spec)
        down, info = tree_unflatten(flat[cut:], self.rest_spec)
        leaves, spec = tree_flatten(self.phase.step(self.task, work, batch, down, info))
        if spec != self.work_spec:
            raise TypeError(f"the step of a phase must return work as it got it: {self.work_spec}, not {spec}")
        return [laid_out(v) for v in leaves]  # the program relies on the layout of its inputs

    def run(self, work: Tree, batches: Iterable[Batch], down: Tree, info: Info) -> Tree:
        state, rest = ([laid_out(v) for v in tree_flatten(tree)[0]] for tree in (work, (down, info)))
        for batch in batches:
            proceed()
            state = (self.program.forward if batch.x.shape == self.shape else self._step)(*batch, *state, *rest)
        return tree_unflatten(state, self.work_spec)


def write_over(module: GraphModule) -> None:
    """Let elementwise operations write over an argument of the same shape and layout that was made on the way and that
    no later operation reads, itself or through a view. Values stay the same to the bit."""
    nodes = list(module.graph.nodes)
    owner: dict[Node, Node] = {}  # whose memory a node's value lies in
    last: dict[Node, Node] = {}  # who reads that memory last
    for node in nodes:
        owner[node] = owner[node.args[0]] if is_view(node) else node
        for source in node.all_input_nodes:
            last[owner[source]] = node
    for node in nodes:
        form, name, places = _OVER.get(node.target, (None, "", ()))
        for over in (node.args[k] for k in places if k < len(node.args)):
            if isinstance(over, Node) and _is_free(node, over, owner, last):
                node.target, node.kwargs = form, {**node.kwargs, name: over}
                break
    module.graph.lint()
    module.recompile()


def _is_free(node: Node, over: Node, owner: dict[Node, Node], last: dict[Node, Node]) -> bool:
    mine = owner[over]
    if mine.op != "call_function" or last[mine] is not node:
        return False
    if any(other is not over and owner[other] is mine for other in node.all_input_nodes):
        return False
    x, y = node.meta["val"], over.meta["val"]
    return x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype and _is_dense(y)


def _is_dense(x: Tensor) -> bool:
    """Every element has a place of its own, and there are no others."""
    room = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != room:
            return False
        room *= size
    return True
