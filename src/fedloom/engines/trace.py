"""A stacked step as a flat program: traced once, simplified, replayed without autograd and vmap on the way.

Tracing runs the step on fake tensors and writes down the operations. The replay is bit-equal to the step and takes a
half to a third of the time on a CPU, where the step is bound by the overhead per operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fedloom.kernels.products import PRODUCTS, SUBTRACT, span_of
from fedloom.kernels.updates import UPDATE

aten = torch.ops.aten
_VIEWS = {aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default}
_IN_PLACE = {aten.sub.Tensor: aten.sub_.Tensor, aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
_STEPS: dict[Any, int] = {aten.sub_.Tensor: 1, aten.add_.Tensor: -1, aten.copy_.default: 0}
_FILLS: dict[Any, int] = {
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
}
_PRODUCTS = {aten.mm.default, aten.bmm.default}
_POOL_BACK, _RELU_BACK = aten.max_pool2d_with_indices_backward.default, aten.threshold_backward.default
SMALL = 1 << 18  # elements of a constant that is worth keeping
LITTLE = 1 << 20  # elements of a tensor that is not worth a kernel of its own
MANY, FEW = 32, 64  # tensors that one kernel writes; rows of a gradient that it sums on the way
_CREATES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    aten.full.default,
}


def trace(f: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> GraphModule:
    module = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    _simplify(module)
    _pool_first(module)
    return module


def _simplify(module: GraphModule) -> None:
    """Drop what changes nothing (views of the same shape, twice transposed, times one, plus zeros), compute constants
    once and merge equal operations. Values stay the same to the bit, but for what zeros hide (see `_note_zeros`)."""
    graph = module.graph
    seen: dict[Any, Node] = {}
    zeros: set[Node] = set()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for node in calls:
        node.target = _without_writing(node) or node.target
    pure = not any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in calls)
    for node in calls:
        if pure:
            _note_zeros(node, zeros)
        key = _identity(node) if pure else None
        same = _same_as(node) or _summand(node, zeros) or (node if key is None else seen.setdefault(key, node))
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif pure and (constant := _constant(node)) is not None:
            name = f"_constant_{node.name}"
            module.register_buffer(name, constant, persistent=False)
            with graph.inserting_before(node):
                node.replace_all_uses_with(fresh := graph.get_attr(name))
            fresh.meta = node.meta
            seen[key] = fresh
            if node in zeros:
                zeros.add(fresh)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _note_zeros(node: Node, zeros: set[Node]) -> None:
    """Note a node whose value is zeros; a product of matrices with zeros becomes such.

    Zeros times infinity or NaN would be NaN, which is lost here. An LSTM's first step is the case in point, as it is
    given zeros: gradients that are not finite reach its biases and input weights all the same. And -0 + 0 stays -0.
    """
    if node.target in _PRODUCTS and not zeros.isdisjoint(node.all_input_nodes):
        node.target, node.args = aten.new_zeros.default, (node.args[0], list(_value(node).shape))  # type: ignore[union-attr]
    if _FILLS.get(node.target) == 0 or (is_view(node) and node.all_input_nodes[0] in zeros):
        zeros.add(node)


def _summand(node: Node, zeros: set[Node]) -> Node | None:
    """What zeros are added to, if they are."""
    if node.target is not aten.add.Tensor:
        return None
    a, b = node.args
    if b in zeros and isinstance(a, Node) and _like(node, a):
        return a
    plain = node.kwargs.get("alpha", 1) == 1
    return b if a in zeros and isinstance(b, Node) and plain and _like(node, b) else None


def _pool_first(module: GraphModule) -> None:
    """Where the largest of positive parts is taken, take the positive part of the largest, which are fewer. Of windows
    without a positive pixel another one may be the largest, but none of theirs has a gradient."""
    for pool in module.graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices.default):
        seen = pool.args[0]
        relu = seen.args[0] if seen.target is aten.view.default else seen
        backward = [node for node in seen.users if node.target is _POOL_BACK and node.args[1] is seen]
        masks = [node for node in relu.users if node.target is _RELU_BACK and node.args[2] == 0]
        sources = [m.args[0].args[0] if m.args[0].target is aten.view.default else m.args[0] for m in masks]
        readers = {pool, seen, *backward, *masks} - {relu}
        fits = relu.target is aten.relu.default and _like(relu, relu.args[0]) and {*relu.users, *seen.users} <= readers
        values = next((node for node in pool.users if node.args[1] == 0), None)
        if not fits or values is None or sources != backward or any(len(node.users) > 1 for node in backward):
            continue
        seen.replace_input_with(relu, relu.args[0])
        raw = relu.args[0] if seen is relu else seen
        pool.replace_input_with(relu, raw)
        with module.graph.inserting_after(values):
            positive = module.graph.call_function(aten.relu.default, (values,))
        positive.meta = values.meta
        values.replace_all_uses_with(positive, delete_user_cb=lambda user: user is not positive)  # noqa: B023
        for mask, back in zip(masks, backward, strict=True):
            with module.graph.inserting_before(back):
                slope = module.graph.call_function(_RELU_BACK, (back.args[0], positive, 0))
            slope.meta = back.args[0].meta
            back.args = (slope, raw, *back.args[2:])
            mask.replace_all_uses_with(mask.args[0])
            module.graph.erase_node(mask)
    module.graph.eliminate_dead_code()
    module.recompile()


def _without_writing(node: Node) -> Any:
    """What gives the value that an operation in place leaves in its argument, where nobody else sees that argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return None
    space, _, name = node.target._schema.name.partition("::")
    seen = node.all_input_nodes[:1]
    if torch.Tag.inplace_view not in node.target.tags:  # it writes values, which are seen through other views, too
        while seen and is_view(seen[-1]):
            seen.append(seen[-1].all_input_nodes[0])
    if not seen or not name.endswith("_") or any(len(v.users) > 1 for v in seen) or seen[-1].op != "call_function":
        return None
    packet = getattr(getattr(torch.ops, space), name[:-1], None)
    return getattr(packet, node.target._overloadname, None)


def _constant(node: Node) -> Tensor | None:
    """The value of a node that depends on no other's, but perhaps on the shape of one."""
    if node.target in _CREATES:
        return node.target(*node.args, **node.kwargs)
    like = _value(node)
    if node.target not in _FILLS or like is None or like.numel() > SMALL:
        return None
    return torch.full(like.shape, _FILLS[node.target], dtype=like.dtype, device=like.device)


def _value(node: Any) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def _same_as(node: Node) -> Node | None:
    """The earlier node that this one merely repeats, if there is one."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is aten.mul.Scalar and node.args[1] == 1:
        return source if _like(node, source) else None
    if node.target in _VIEWS:
        return source if _like(node, source) else None
    if node.target is aten.permute.default and list(node.args[1]) == list(range(len(node.args[1]))):  # type: ignore[arg-type]
        return source
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        rank = len(_value(node).shape)  # type: ignore[union-attr]
        if {a % rank for a in node.args[1:]} == {a % rank for a in source.args[1:]}:  # type: ignore[operator]
            return source.args[0]  # type: ignore[return-value]
    return None


def _like(a: Node, b: Node) -> bool:
    x, y = _value(a), _value(b)
    return x is not None and y is not None and x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


def _identity(node: Node) -> Any:
    """Equal for operations that give equal results; None for random ones and those that return several tensors."""
    if node.target is operator.getitem or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    try:
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        hash(key)
        return key
    except TypeError:
        return None


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return (type(value).__name__, value)


def overwrite(module: GraphModule, first: int, counter: int) -> None:
    """Let the program write its results over its inputs from `first` on, instead of returning them, and count up."""
    graph = module.graph
    nodes = list(graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    (end,) = [node for node in nodes if node.op == "output"]
    read = dict.fromkeys(inputs, -1)  # where an input, or a view of it, is read last
    for node in nodes:
        for source in map(_root, node.all_input_nodes):
            if source in read:
                read[source] = max(read[source], place[node])
    results = list(zip(inputs[first:], end.args[0], strict=False))
    with graph.inserting_before(end):
        for mine, new in results:
            if new is not mine and _root(new) in read:  # about to be overwritten, too
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


def join_updates(module: GraphModule) -> None:
    """Let steps on weights that are overwritten subtract a product while it is computed."""
    for node in module.graph.find_nodes(op="call_function", target=aten.sub_.Tensor):
        mine, new = node.args
        if not isinstance(new, Node) or new.target is not PRODUCTS or len(new.users) > 1 or not _like(mine, new):
            continue
        factors, tiles = new.args[:2], list[int](new.args[2])  # type: ignore[arg-type]
        a, b = (factor.meta["val"] for factor in factors)  # type: ignore[union-attr]
        if a.shape[2] <= tiles[2]:
            tiles[1] = min(64, tiles[1])  # the weights are loaded before the only step, and take room
        # the product moves to where some inputs are overwritten already
        whole = span_of(a, b, tiles) >= a.shape[2]
        if whole and all(_root(factor).op != "placeholder" for factor in factors):  # type: ignore[arg-type]
            node.target, node.args = SUBTRACT, (mine, *factors, float(node.kwargs.get("alpha", 1)), tiles)
            node.kwargs = {}
            module.graph.erase_node(new)
    module.recompile()


def join_writes(module: GraphModule, counter: int) -> None:
    """Let a program that overwrites its inputs write the small ones at once, at its end, and count on the way."""
    graph, written = module.graph, _written(module)
    count = graph.find_nodes(op="placeholder")[counter]
    (end,) = graph.find_nodes(op="output")
    groups: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.target in _STEPS and _movable(node, written):
            groups.setdefault(len(node.args[0].meta["val"]), []).append(node)
    most = max(groups.values(), key=len, default=[])[:MANY]
    if not most:
        return
    with graph.inserting_before(end):
        mine = [node.args[0] for node in most]
        new = [_rows_of(graph, node, written) or node.args[1] for node in most]
        alphas = [_STEPS[node.target] * float(node.kwargs.get("alpha", 1)) for node in most]  # type: ignore[arg-type]
        copies = [node.target is aten.copy_.default for node in most]
        graph.call_function(UPDATE, (mine, new, alphas, copies, count))
    counting = [node for node in count.users if node.target is aten.add_.Tensor]
    for node in (*most, *counting):
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _written(module: GraphModule) -> set[Node]:
    """What operations write to."""
    found = set()
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            values = zip(node.target._schema.arguments, node.args, strict=False)
            found |= {_root(v) for a, v in values if a.is_write and isinstance(v, Node)}
    return found


def _movable(node: Node, written: set[Node]) -> bool:
    """Does it write the whole of a small input, with a value that nobody changes later on?"""
    mine, new = node.args[:2]
    if not isinstance(new, Node) or mine.op != "placeholder" or _root(new) in written:  # type: ignore[union-attr]
        return False
    value = _value(mine)
    if value is None or value.dtype != torch.float32 or not 0 < value.numel() <= LITTLE:
        return False
    return value.dim() > 0 and value.is_contiguous() and _like(mine, new)  # type: ignore[arg-type]


def _rows_of(graph: Any, node: Node, written: set[Node]) -> Node | None:
    """The few rows of every client whose sum is written, with the rows as second axis, if it is such a sum."""
    mine, new = node.args[:2]
    while new.target is aten.view.default and len(new.users) == 1:  # type: ignore[union-attr]
        new = new.args[0]  # type: ignore[union-attr]
    if new.target is not aten.sum.dim_IntList or len(new.users) > 1:  # type: ignore[union-attr]
        return None
    source, dims = new.args[:2]  # type: ignore[union-attr]
    value, shape = _value(source), _value(mine).shape  # type: ignore[union-attr]
    if value is None or list(dims) != list(range(1, 1 + len(dims))) or not value.is_contiguous():  # type: ignore[arg-type]
        return None
    rows = value[0].numel() // max(1, shape[1:].numel())
    if rows > FEW or value.dtype != torch.float32 or _root(source) in written:  # type: ignore[arg-type]
        return None
    found = graph.call_function(aten.view.default, (source, [shape[0], rows, *shape[1:]]))
    found.meta["val"] = value.view(shape[0], rows, *shape[1:])
    return found


def _root(node: Node) -> Node:
    """What a view is a view of."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_view(node: Node) -> bool:
    """Does it show the memory of its first argument?"""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        annotated = any(value.alias_info is not None for value in node.target._schema.returns)
        return annotated or node.target is aten._unsafe_view.default
    source = node.args[0]  # an item of several results
    return isinstance(source, Node) and is_view(source)


def used_inputs(module: GraphModule) -> list[bool]:
    return [bool(node.users) for node in module.graph.nodes if node.op == "placeholder"]


def passed_through(module: GraphModule, first: int) -> list[bool]:
    """Which outputs are the inputs in their place, from `first` on, handed on unchanged."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    return [new is mine for mine, new in zip(inputs[first:], output.args[0], strict=False)]


def operations(module: GraphModule) -> int:
    """How many the program has that compute something."""
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    return sum(node.target is not operator.getitem and not is_view(node) for node in calls)


def peak_bytes(module: GraphModule) -> int:
    """The most memory that intermediate results of the program take at one time."""
    last_use: dict[Node, int] = {}
    nodes = list(module.graph.nodes)
    for at, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last_use[source] = at
    live = peak = 0
    ends: dict[int, int] = {}
    for at, node in enumerate(nodes):
        if node.op == "call_function" and node.target not in _VIEWS and (value := _value(node)) is not None:
            size = value.numel() * value.element_size()
            live += size
            ends[last_use.get(node, at)] = ends.get(last_use.get(node, at), 0) + size
        peak = max(peak, live)
        live -= ends.get(at, 0)
    return peak
