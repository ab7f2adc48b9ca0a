"""Queries about a traced graph, for graph passes."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
VIEWS = {aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default}


def value_of(node: Any) -> Tensor | None:
    """The fake tensor that a node computes; None for anything else."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def same_layout(a: Node, b: Node) -> bool:
    """True if both compute tensors of the same shape, strides and type."""
    x, y = value_of(a), value_of(b)
    return x is not None and y is not None and x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


def is_view(node: Node) -> bool:
    """True if the result shares the memory of the first argument."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        annotated = any(value.alias_info is not None for value in node.target._schema.returns)
        return annotated or node.target is aten._unsafe_view.default
    source = node.args[0]  # one of several results
    return isinstance(source, Node) and is_view(source)


def memory_of(node: Node) -> Node:
    """The node whose memory a chain of views shares."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def written_by(node: Node) -> list[Node]:
    """The nodes that an operation overwrites."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    over = [
        given.get(a.name) for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return [
        v for values in over for v in (values if isinstance(values, list | tuple) else [values]) if isinstance(v, Node)
    ]


def used_inputs(module: GraphModule) -> list[bool]:
    """Which inputs the graph reads."""
    return [bool(node.users) for node in module.graph.nodes if node.op == "placeholder"]


def passed_through(module: GraphModule, first: int) -> list[bool]:
    """Which outputs are the corresponding inputs, from input `first` on, unchanged."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    return [new is mine for mine, new in zip(inputs[first:], output.args[0], strict=False)]


def count_operations(module: GraphModule) -> int:
    """Number of operations that compute something."""
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    return sum(node.target is not operator.getitem and not is_view(node) for node in calls)


def result_bytes(graph: Graph) -> int:
    """Memory of all intermediate results together."""
    made = (n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem and not is_view(n))
    values = (node.meta.get("val") for node in made)
    flat = (v for value in values for v in (value if isinstance(value, list | tuple) else [value]))
    return sum(v.numel() * v.element_size() for v in flat if isinstance(v, Tensor))


def peak_bytes(module: GraphModule) -> int:
    """The most memory that intermediate results take at any time."""
    last_use: dict[Node, int] = {}
    nodes = list(module.graph.nodes)
    for at, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last_use[source] = at
    live = peak = 0
    ends: dict[int, int] = {}
    for at, node in enumerate(nodes):
        if node.op == "call_function" and node.target not in VIEWS and (value := value_of(node)) is not None:
            size = value.numel() * value.element_size()
            live += size
            ends[last_use.get(node, at)] = ends.get(last_use.get(node, at), 0) + size
        peak = max(peak, live)
        live -= ends.get(at, 0)
    return peak
