"""Graph passes for a CPU: the same values up to rounding, from operations that take less time there."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fedloom.engine.graph.analysis import is_view, memory_of, same_layout, value_of

aten = torch.ops.aten
VECTOR_BYTES = {"AVX512": 64}.get(torch.backends.cpu.get_cpu_capability(), 32)  # of a register
MIN_ROWS = 200  # of logits; fewer take less time than the operations that are added


def fuse_cross_entropy(module: GraphModule) -> None:
    """The gradient of the cross entropy to logits with few classes.

    torch's softmax over the last axis computes number by number if a row is shorter than a register. Here rows are
    transposed first, so that the softmax is over the first axis: two to three times as fast for ten classes. The
    gradient is `(softmax - onehot) * weight`; the loss itself is not needed for a step.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default):
        found = _one_hot_loss(module, node)
        if found is None:
            continue
        logits, axis, labels, weights = found
        shape = list(logits.meta["val"].shape)
        with graph.inserting_before(node):
            rows = graph.call_function(aten.reshape.default, (logits, [-1, shape[-1]]))
            columns = graph.call_function(aten.transpose.int, (rows, 0, 1))
            together = graph.call_function(aten.clone.default, (columns,), {"memory_format": torch.contiguous_format})
            softmax = graph.call_function(aten._softmax.default, (together, 0, False))
            of_rows = graph.call_function(
                aten.neg.default, (graph.call_function(aten.reshape.default, (weights, [-1])),)
            )
            scaled = graph.call_function(aten.mul_.Tensor, (softmax, of_rows))
            back = graph.call_function(aten.transpose.int, (scaled, 0, 1))
            apart = graph.call_function(aten.clone.default, (back,), {"memory_format": torch.contiguous_format})
            same = graph.call_function(aten.view.default, (apart, shape))
            new = graph.call_function(aten.scatter_add_.default, (same, axis, labels, weights))
        new.meta = node.meta
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _one_hot_loss(module: GraphModule, node: Node) -> tuple[Node, int, Node, Node] | None:
    """(logits, their last axis, labels, weight of each row), if this gradient is that of a weighted cross entropy whose
    value nobody reads."""
    g, of_logits, axis, _ = node.args
    assert isinstance(g, Node)
    assert isinstance(of_logits, Node)
    if of_logits.target is not aten._log_softmax.default or list(of_logits.users) != [node]:
        return None
    logits, x = of_logits.args[0], value_of(node)
    if not isinstance(logits, Node) or x is None or axis not in (-1, x.dim() - 1):
        return None
    if x.shape[-1] * x.element_size() >= VECTOR_BYTES or x.shape[:-1].numel() < MIN_ROWS or not x.is_contiguous():
        return None
    if g.target is not aten.scatter_add.default or list(g.users) != [node] or not _is_zero(module, g.args[0]):
        return None
    _, along, labels, weights = g.args
    if not isinstance(labels, Node) or not isinstance(weights, Node) or along not in (-1, x.dim() - 1):
        return None
    one_per_row = (*x.shape[:-1], 1)
    if any(value is None or value.shape != one_per_row for value in (value_of(labels), value_of(weights))):
        return None
    return logits, x.dim() - 1, labels, weights


def _is_zero(module: GraphModule, node: Any) -> bool:
    """True for a constant that is zero everywhere."""
    return isinstance(node, Node) and node.op == "get_attr" and not getattr(module, str(node.target)).any()


def fuse_bmm_updates(module: GraphModule, first: int, count: int) -> list[int]:
    """`w - alpha * (a @ b)` is computed in the memory of w, if w is one of the `count` inputs from `first` on and this
    is the result that replaces it. Returns the positions, from `first` on, of those that the graph then overwrites."""
    graph = module.graph
    place = {node: at for at, node in enumerate(graph.nodes)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (end,) = [node for node in graph.nodes if node.op == "output"]
    results = list(end.args[0])
    overwritten = []
    for at, (mine, new) in enumerate(zip(inputs[first : first + count], results, strict=True)):
        if new.target is not aten.sub.Tensor or new.args[0] is not mine or list(new.users) != [end]:
            continue
        product = new.args[1]
        if not isinstance(product, Node) or product.target is not aten.bmm.default or list(product.users) != [new]:
            continue
        if not same_layout(mine, product) or results.count(new) > 1:
            continue
        if any(memory_of(other) is mine for other in (*results, *product.all_input_nodes)):
            continue  # what it was is a factor, or a result, too
        if any(place[reader] > place[new] for reader in _readers(mine)):
            continue
        with graph.inserting_before(new):
            factors = (mine, *product.args)
            scale = {"beta": 1, "alpha": -new.kwargs.get("alpha", 1)}
            fused = graph.call_function(aten.baddbmm_.default, factors, scale)
        fused.meta = new.meta
        new.replace_all_uses_with(fused)
        graph.erase_node(new)
        graph.erase_node(product)
        overwritten.append(at)
    graph.lint()
    module.recompile()
    return overwritten


def _readers(node: Node) -> list[Node]:
    """The operations that read a tensor, also through views of it."""
    found = []
    for user in node.users:
        found += _readers(user) if is_view(user) else [user]
    return found
