"""Sums over samples and pixels per client and channel: the gradients of the biases of convolutions."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedloom.nn.kernels.dispatch import cuda_kernel, use_custom_kernel
from fedloom.nn.kernels.graph_nodes import behind_views, reshaped
from fedloom.nn.kernels.pooling import UNPOOL

MAX_TERMS = 1 << 15  # of a sum; one Triton program adds all of them


@torch.library.custom_op("fedloom::channel_sums", mutates_args=())
def channel_sums(g: Tensor, places: Tensor | None) -> Tensor:
    """Sums of g (n, b, c, h, w) per client and channel, (n, c). `places`, if given, are those of `pooling.max_pool`;
    elements where they are negative (no gradient through ReLU) are left out."""
    return (g if places is None else g.masked_fill(places < 0, 0)).sum((1, 3, 4))


@channel_sums.register_fake
def _(g: Tensor, places: Tensor | None) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[2])


cuda_kernel(channel_sums, "channel_sum", "channel_sum", "channel_sums")
CHANNEL_SUMS = torch.ops.fedloom.channel_sums.default


def replace_channel_sums(module: GraphModule) -> None:
    """Graph pass: sums over samples and pixels are computed by `channel_sums`."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList):
        given, dims, *more = node.args
        value = given.meta["val"]
        if value.dim() != 5 or sorted(dims) != [1, 3, 4] or more or node.kwargs:
            continue
        n, b, c = value.shape[:3]
        g, places = _nonzero_part(given)
        value = g.meta["val"]
        fits = value.is_contiguous() and value.is_floating_point() and value.numel() <= n * c * MAX_TERMS
        if use_custom_kernel("channel_sum", None if fits else "sums that are too large"):
            with graph.inserting_before(node):
                parts = [v and reshaped(v, [n, b, c, *value.shape[-2:]]) for v in (g, places)]
            node.target, node.args = CHANNEL_SUMS, tuple(parts)
    graph.eliminate_dead_code()
    module.recompile()


def _nonzero_part(node: Any) -> tuple[Any, Any]:
    """The pooled gradient and its places, where the node is the gradient of a pooling, which is zero elsewhere; for any
    other node, itself."""
    unpool = behind_views(node)
    if unpool.target is not UNPOOL:
        return node, None
    g, places = unpool.args[:2]
    return g, places if places.meta["val"].dtype == torch.int8 else None
