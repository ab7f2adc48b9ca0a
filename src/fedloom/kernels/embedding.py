"""Word vectors of stacked clients: rows of every client's own table, and the gradient to the tables.

Under vmap, ids are shifted into one table of all clients. The library then looks up row by row, and for the gradient
sorts all ids, which takes some thirty kernels. For a small vocabulary, a product of ones, where an id is the word, with
the gradients of the vectors takes one. As with products, the operators are put into programs that are already traced.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from fedloom.kernels.ours import ours, triton
from fedloom.kernels.pooling import behind, shaped

aten = torch.ops.aten
_LOOK_UP, _GRADIENT = aten.embedding.default, aten.embedding_dense_backward.default
_ADD, _ARANGE, _TRANSPOSE = aten.add.Tensor, aten.arange.start_step, aten.transpose.int
MOST = 1 << 32  # multiplications of all clients together, from which on the library's sort is left to do it
NARROW = 16  # columns of a product, at least


def _shifted(ids: Tensor, words: int) -> Tensor:
    """Into one table of all clients."""
    return ids + torch.arange(0, len(ids) * words, words, device=ids.device).view(-1, *[1] * (ids.dim() - 1))


@torch.library.custom_op("fedloom::vectors", mutates_args=())
def vectors(tables: Tensor, ids: Tensor) -> Tensor:
    """Rows of each client's table (n, v, d) by its ids (n, ...): (n, ..., d)."""
    if ours(tables):
        return triton("embedding").vectors(tables.contiguous(), ids)
    return aten.embedding(tables.flatten(0, 1), _shifted(ids, tables.shape[1]))


@vectors.register_fake
def _(tables: Tensor, ids: Tensor) -> Tensor:
    return tables.new_empty(*ids.shape, tables.shape[2])


@torch.library.custom_op("fedloom::vector_sums", mutates_args=())
def vector_sums(g: Tensor, ids: Tensor, words: int, padding: int) -> Tensor:
    """Sums of g (n, ..., d) by clients and ids (n, ...): (n, words, d). That of the padding, if there is one, is 0."""
    if ours(g):
        return triton("embedding").vector_sums(g, ids, words, padding)
    sums = aten.embedding_dense_backward(g, _shifted(ids, words), len(ids) * words, -1, False)
    sums = sums.unflatten(0, (len(ids), words))
    if padding >= 0:
        sums[:, padding] = 0
    return sums


@vector_sums.register_fake
def _(g: Tensor, ids: Tensor, words: int, padding: int) -> Tensor:
    return g.new_empty(len(ids), words, g.shape[-1])


VECTORS, SUMS = torch.ops.fedloom.vectors.default, torch.ops.fedloom.vector_sums.default


def replace_embeddings(program: GraphModule) -> None:
    """Let a program look up vectors, and sum their gradients by words where these are few, by these operators."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=_LOOK_UP):
        _look_up(program, node)
    for node in graph.find_nodes(op="call_function", target=VECTORS):
        _turn(program, node)
    for node in graph.find_nodes(op="call_function", target=_GRADIENT):
        _sum(program, node)
    graph.eliminate_dead_code()
    program.recompile()


def _look_up(program: GraphModule, node: Any) -> None:
    table, ids = node.args[:2]
    value, found = table.meta["val"], node.meta["val"]
    own = _unshifted(program, ids, len(value))
    n = own[1] if own else 1  # all clients may have one table
    if not value.is_contiguous() or not value.is_floating_point() or max(value.numel(), found.numel()) >= n << 31:
        return
    with program.graph.inserting_before(node):
        ids = own[0] if own else shaped(ids, [1, *ids.meta["val"].shape])
        new = _added(program, VECTORS, shaped(table, [n, len(value) // n, value.shape[1]]), ids)
        node.replace_all_uses_with(shaped(new, found.shape))


def _turn(program: GraphModule, node: Any) -> None:
    """Where all that is made of vectors is copies in another order of a client's tokens, look them up in that order."""
    turns, rank = list(node.users), node.meta["val"].dim()
    if [turn.target for turn in turns] != [_TRANSPOSE]:
        return
    copies, axes = list(turns[0].users), turns[0].args[1:]
    if {0, rank - 1} & {axis % rank for axis in axes}:
        return
    if all(c.target is aten.clone.default and c.meta["val"].is_contiguous() for c in copies):
        tables, ids = node.args
        with program.graph.inserting_before(node):
            found = _added(program, VECTORS, tables, _added(program, _TRANSPOSE, ids, *(axis % rank for axis in axes)))
        for copy in copies:
            copy.replace_all_uses_with(found)


def _sum(program: GraphModule, node: Any) -> None:
    g, shifted, rows, padding, scaled = node.args
    own, value = _unshifted(program, shifted, rows), g.meta["val"]
    if not own or padding >= 0 or scaled or value.dtype != torch.float32:
        return
    (ids, n), d = own, value.shape[-1]
    if shifted.meta["val"].numel() * (rows // n) * max(NARROW, d) > MOST or max(value.numel(), rows * d) >= n << 31:
        return
    with program.graph.inserting_before(node):
        found = _added(program, SUMS, g, ids, rows // n, _padding(node))
        node.replace_all_uses_with(shaped(found, [rows, d]))


def _added(program: GraphModule, target: Any, *args: Any) -> Any:
    node = program.graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda arg: arg.meta["val"]))
    return node


def _unshifted(program: GraphModule, ids: Any, rows: int) -> tuple[Any, int] | None:
    """The ids before they were shifted into one table of so many rows, and how many clients it is of."""
    if ids.target is not _ADD or ids.kwargs or not all(isinstance(arg, Node) for arg in ids.args):
        return None
    plain, shift = ids.args
    shape, n, steps = list(ids.meta["val"].shape), shift.meta["val"].numel(), behind(shift)
    if list(shift.meta["val"].shape) != [n] + [1] * (len(shape) - 1) or list(plain.meta["val"].shape) != shape:
        return None
    if not n or rows % n:
        return None
    if steps.target is _ARANGE:
        fits = list(steps.args) == [0, rows, rows // n]
    else:
        constant = getattr(program, steps.target).cpu() if steps.op == "get_attr" else torch.empty(0)
        fits = torch.equal(constant, torch.arange(0, rows, rows // n))
    return (plain, n) if fits else None


def _padding(node: Any) -> int:
    """The word whose rows are set to zero before anybody reads them, which is dropped; -1 where there is none."""
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
