"""Sums over samples and pixels, the gradients of convolutions' biases: a program for every channel of a client.

As with products, they are put into programs that are already traced.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedloom.kernels.ours import ours, triton
from fedloom.kernels.pooling import UNPOOL, behind, shaped

MOST = 1 << 15  # numbers of a sum, which one program adds up


@torch.library.custom_op("fedloom::channel_sums", mutates_args=())
def channel_sums(g: Tensor, places: Tensor | None) -> Tensor:
    """Of g (n, b, c, h, w) by clients and channels, (n, c), less the numbers whose places are negative."""
    if ours(g):
        return triton("sums").channel_sums(g, places)
    return (g if places is None else g.masked_fill(places < 0, 0)).sum((1, 3, 4))


@channel_sums.register_fake
def _(g: Tensor, places: Tensor | None) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[2])


SUMS = torch.ops.fedloom.channel_sums.default


def replace_sums(program: GraphModule) -> None:
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList):
        given, dims, *more = node.args
        value = given.meta["val"]
        if value.dim() != 5 or sorted(dims) != [1, 3, 4] or more or node.kwargs:
            continue
        n, b, c = value.shape[:3]
        g, places = _largest(given)
        value = g.meta["val"]
        if value.is_contiguous() and value.is_floating_point() and value.numel() <= n * c * MOST:
            with graph.inserting_before(node):
                parts = [v and shaped(v, [n, b, c, *value.shape[-2:]]) for v in (g, places)]
            node.target, node.args = SUMS, tuple(parts)
    graph.eliminate_dead_code()
    program.recompile()


def _largest(node: Any) -> tuple[Any, Any]:
    """What there is to sum of a pooling's gradient, which is zero elsewhere, and where; of others everything."""
    unpool = behind(node)
    if unpool.target is not UNPOOL:
        return node, None
    g, places = unpool.args[:2]
    return g, places if places.meta["val"].dtype == torch.int8 else None
