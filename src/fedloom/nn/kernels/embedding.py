"""Word vectors of stacked clients: rows of every client's embedding table, and the gradient to the tables.

Under vmap, torch offsets the ids into one table of all clients. Its gradient sorts all ids, which takes some thirty
kernels. For a small vocabulary, multiplying a one-hot matrix with the gradients of the vectors takes one. A graph pass
puts the operators into traced graphs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from fedloom.nn.kernels.dispatch import cuda_kernel, use_custom_kernel
from fedloom.nn.kernels.graph_nodes import behind_views, reshaped

aten = torch.ops.aten
_LOOK_UP, _GRADIENT = aten.embedding.default, aten.embedding_dense_backward.default
_ADD, _ARANGE, _TRANSPOSE = aten.add.Tensor, aten.arange.start_step, aten.transpose.int
MAX_PRODUCTS = 1 << 32  # multiplications of all clients together; with more, torch's sort is faster
MIN_COLUMNS = 16  # of a product on tensor cores


def _offset(ids: Tensor, words: int) -> Tensor:
    """Ids into one table of all clients."""
    return ids + torch.arange(0, len(ids) * words, words, device=ids.device).view(-1, *[1] * (ids.dim() - 1))


@torch.library.custom_op("fedloom::word_vectors", mutates_args=())
def word_vectors(tables: Tensor, ids: Tensor) -> Tensor:
    """Rows of each client's table (n, v, d) by its ids (n, ...): (n, ..., d)."""
    return aten.embedding(tables.flatten(0, 1), _offset(ids, tables.shape[1]))


@word_vectors.register_fake
def _(tables: Tensor, ids: Tensor) -> Tensor:
    return tables.new_empty(*ids.shape, tables.shape[2])


@torch.library.custom_op("fedloom::word_gradients", mutates_args=())
def word_gradients(g: Tensor, ids: Tensor, words: int, padding: int) -> Tensor:
    """Sums of g (n, ..., d) by client and id (n, ...): (n, words, d). The sum of the id `padding`, if >= 0, is 0."""
    sums = aten.embedding_dense_backward(g, _offset(ids, words), len(ids) * words, -1, False)
    sums = sums.unflatten(0, (len(ids), words))
    if padding >= 0:
        sums[:, padding] = 0
    return sums


@word_gradients.register_fake
def _(g: Tensor, ids: Tensor, words: int, padding: int) -> Tensor:
    return g.new_empty(len(ids), words, g.shape[-1])


cuda_kernel(word_vectors, "embedding", "embedding", "word_vectors")
cuda_kernel(word_gradients, "embedding", "embedding", "word_gradients")
VECTORS, GRADIENTS = torch.ops.fedloom.word_vectors.default, torch.ops.fedloom.word_gradients.default


def replace_embeddings(module: GraphModule) -> None:
    """Graph pass: word vectors, and their gradients where the vocabulary is small, are computed by these operators."""
    if not use_custom_kernel("embedding"):
        return
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_LOOK_UP):
        _look_up(module, node)
    for node in graph.find_nodes(op="call_function", target=VECTORS):
        _transpose(module, node)
    for node in graph.find_nodes(op="call_function", target=_GRADIENT):
        _sum(module, node)
    graph.eliminate_dead_code()
    module.recompile()


def _look_up(module: GraphModule, node: Any) -> None:
    table, ids = node.args[:2]
    value, found = table.meta["val"], node.meta["val"]
    found_ids = _without_offset(module, ids, len(value))
    n = found_ids[1] if found_ids else 1  # all clients may share one table
    if not value.is_contiguous() or not value.is_floating_point() or max(value.numel(), found.numel()) >= n << 31:
        return
    with module.graph.inserting_before(node):
        ids = found_ids[0] if found_ids else reshaped(ids, [1, *ids.meta["val"].shape])
        new = _added(module, VECTORS, reshaped(table, [n, len(value) // n, value.shape[1]]), ids)
        node.replace_all_uses_with(reshaped(new, found.shape))


def _transpose(module: GraphModule, node: Any) -> None:
    """Where the vectors are only used as transposed copies, look up transposed ids instead."""
    users, rank = list(node.users), node.meta["val"].dim()
    if [user.target for user in users] != [_TRANSPOSE]:
        return
    copies, axes = list(users[0].users), users[0].args[1:]
    if {0, rank - 1} & {axis % rank for axis in axes}:
        return
    if all(c.target is aten.clone.default and c.meta["val"].is_contiguous() for c in copies):
        tables, ids = node.args
        with module.graph.inserting_before(node):
            found = _added(module, VECTORS, tables, _added(module, _TRANSPOSE, ids, *(axis % rank for axis in axes)))
        for copy in copies:
            copy.replace_all_uses_with(found)


def _sum(module: GraphModule, node: Any) -> None:
    g, offset_ids, rows, padding, scaled = node.args
    found_ids, value = _without_offset(module, offset_ids, rows), g.meta["val"]
    if not found_ids or padding >= 0 or scaled or value.dtype != torch.float32:
        return
    (ids, n), d = found_ids, value.shape[-1]
    products = offset_ids.meta["val"].numel() * (rows // n) * max(MIN_COLUMNS, d)
    if products > MAX_PRODUCTS or max(value.numel(), rows * d) >= n << 31:
        return
    with module.graph.inserting_before(node):
        found = _added(module, GRADIENTS, g, ids, rows // n, _padding(node))
        node.replace_all_uses_with(reshaped(found, [rows, d]))


def _added(module: GraphModule, target: Any, *args: Any) -> Any:
    node = module.graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda arg: arg.meta["val"]))
    return node


def _without_offset(module: GraphModule, ids: Any, rows: int) -> tuple[Any, int] | None:
    """The ids before they were offset into one table of `rows` rows, and the number of clients; None for other ids."""
    if ids.target is not _ADD or ids.kwargs or not all(isinstance(arg, Node) for arg in ids.args):
        return None
    plain, offset = ids.args
    shape, n, steps = list(ids.meta["val"].shape), offset.meta["val"].numel(), behind_views(offset)
    if list(offset.meta["val"].shape) != [n] + [1] * (len(shape) - 1) or list(plain.meta["val"].shape) != shape:
        return None
    if not n or rows % n:
        return None
    if steps.target is _ARANGE:
        fits = list(steps.args) == [0, rows, rows // n]
    else:
        constant = getattr(module, steps.target).cpu() if steps.op == "get_attr" else torch.empty(0)
        fits = torch.equal(constant, torch.arange(0, rows, rows // n))
    return (plain, n) if fits else None


def _padding(node: Any) -> int:
    """The id whose gradient is set to zero afterwards, -1 where there is none; the operations that do it are
    removed."""
    view = next(iter(node.users), None)
    if view is None or len(node.users) > 1 or view.target is not aten.view.default or not view.users:
        return -1
    row = min(view.users)
    fill = next(iter(row.users), None)
    if row.target is not aten.select.int or row.args[1] != 1 or view.meta["val"].dim() != 3 or len(row.users) > 1:
        return -1
    if fill is None or fill.target is not aten.fill_.Scalar or fill.args[1] != 0 or fill.users:
        return -1
    padding: int = row.args[2]
    for dropped in (fill, row):
        node.graph.erase_node(dropped)
    return padding
