"""Graph passes that save memory traffic: results are written over inputs or over results that are no longer needed."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fedloom.engine.graph.analysis import is_view, memory_of, same_layout
from fedloom.nn.kernels.matmul import MATMUL, SUBTRACT_MATMUL, depth_per_program

aten = torch.ops.aten
_IN_PLACE = {aten.sub.Tensor: aten.sub_.Tensor, aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
# operation -> its out= form, the name of that argument, positions of arguments that may be overwritten
_OUT_FORMS: dict[Any, tuple[Any, str, tuple[int, ...]]] = {
    aten.relu.default: (aten.relu.out, "out", (0,)),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input", (0,)),
    aten.add.Tensor: (aten.add.out, "out", (0, 1)),
    aten.mul.Tensor: (aten.mul.out, "out", (0, 1)),
    aten.sub.Tensor: (aten.sub.out, "out", (1, 0)),  # parameters minus the gradient: over the gradient
}


def write_to_inputs(module: GraphModule, first: int, counter: int) -> None:
    """Write the results over the inputs from `first` on instead of returning them, and increase the input `counter`."""
    graph = module.graph
    nodes = list(graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    (end,) = [node for node in nodes if node.op == "output"]
    read = dict.fromkeys(inputs, -1)  # position of the last read of an input or of a view of it
    for node in nodes:
        for source in map(memory_of, node.all_input_nodes):
            if source in read:
                read[source] = max(read[source], place[node])
    results = list(zip(inputs[first:], end.args[0], strict=False))
    with graph.inserting_before(end):
        for mine, new in results:
            if new is not mine and memory_of(new) in read:  # it is an input that will be overwritten, too
                end.replace_input_with(new, graph.call_function(aten.clone.default, (new,)))
    for mine, new in zip(inputs[first:], list(end.args[0]), strict=False):
        if new is mine:
            continue
        if new.target in _IN_PLACE and new.args[0] is mine and read[mine] == place[new] and len(new.users) == 1:
            new.target = _IN_PLACE[new.target]
        else:
            with graph.inserting_before(end):
                graph.call_function(aten.copy_.default, (mine, new))
    with graph.inserting_before(end):
        graph.call_function(aten.add_.Tensor, (inputs[counter], 1))
    end.args = ((),)
    module.recompile()


def fuse_matmul_updates(module: GraphModule) -> None:
    """Graph pass: `w -= alpha * (a @ b)` becomes one fused kernel, so the gradient is never written to memory."""
    for node in module.graph.find_nodes(op="call_function", target=aten.sub_.Tensor):
        mine, new = node.args
        if not isinstance(new, Node) or new.target is not MATMUL or len(new.users) > 1 or not same_layout(mine, new):
            continue
        factors, tiles = new.args[:2], list[int](new.args[2])  # type: ignore[arg-type]
        a, b = (factor.meta["val"] for factor in factors)  # type: ignore[union-attr]
        if a.shape[2] <= tiles[2]:
            tiles[1] = min(64, tiles[1])  # the weights are loaded before the only step and take registers
        # the product moves to the update, where some inputs are already overwritten
        whole = depth_per_program(a, b, tiles) >= a.shape[2]
        if whole and all(memory_of(factor).op != "placeholder" for factor in factors):  # type: ignore[arg-type]
            node.target, node.args = SUBTRACT_MATMUL, (mine, *factors, float(node.kwargs.get("alpha", 1)), tiles)
            node.kwargs = {}
            module.graph.erase_node(new)
    module.recompile()


def reuse_buffers(module: GraphModule) -> None:
    """Let elementwise operations write over an argument of the same layout that is an intermediate result and is not
    read later, directly or through a view. Values stay the same to the bit."""
    nodes = list(module.graph.nodes)
    owner: dict[Node, Node] = {}  # the node whose memory a value is in
    last: dict[Node, Node] = {}  # the last reader of that memory
    for node in nodes:
        owner[node] = owner[node.args[0]] if is_view(node) else node
        for source in node.all_input_nodes:
            last[owner[source]] = node
    for node in nodes:
        form, name, places = _OUT_FORMS.get(node.target, (None, "", ()))
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
    """True if the elements fill their memory without overlap or gaps."""
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != extent:
            return False
        extent *= size
    return True
