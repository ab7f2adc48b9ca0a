"""Max-pooling with windows that do not overlap, ReLU of its results, and the gradient of both.

The position of a maximum within such a window takes a byte, where torch's indices into images take eight, and the byte
also says where ReLU lets no gradient through. A graph pass puts the operators into traced graphs.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from fedloom.nn.kernels.dispatch import cuda_kernel, use_custom_kernel
from fedloom.nn.kernels.graph_nodes import VIEW, behind_views, reshaped

aten = torch.ops.aten
_POOL, _POOL_BACK = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
_RELU, _RELU_BACK = aten.relu.default, aten.threshold_backward.default
MAX_WINDOW = 127  # pixels of a window, whose position fits a signed byte


@torch.library.custom_op("fedloom::max_pool", mutates_args=())
def max_pool(x: Tensor, kernel: list[int], size: list[int], relu: bool, with_places: bool) -> tuple[Tensor, Tensor]:
    """The maxima (..., *size) of the windows of images x (..., h, w), after ReLU if asked for; and their positions in
    the windows, counted row by row, or -1 where ReLU lets no gradient through. Without places the second is empty."""
    ragged = any(side * k > pixels for side, k, pixels in zip(size, kernel, x.shape[-2:], strict=True))
    y, at = F.max_pool2d(x, kernel, ceil_mode=ragged, return_indices=True)
    row, column = at // x.shape[-1] % kernel[0], at % x.shape[-1] % kernel[1]
    places = row * kernel[1] + column
    if relu:
        places, y = places.masked_fill(y <= 0, -1), y.relu()
    return y, places.to(torch.int8) if with_places else x.new_empty(0, dtype=torch.int8)


@max_pool.register_fake
def _(x: Tensor, kernel: list[int], size: list[int], relu: bool, with_places: bool) -> tuple[Tensor, Tensor]:
    y = x.new_empty(*x.shape[:-2], *size)
    return y, x.new_empty(y.shape if with_places else 0, dtype=torch.int8)


@torch.library.custom_op("fedloom::max_unpool", mutates_args=())
def max_unpool(g: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    """The gradient of max-pooling: images (..., *size) with g (..., p, q) at the positions of the maxima and zeros
    elsewhere. `places` are those of `max_pool`, or torch's indices (int64)."""
    if places.dtype != torch.int64:
        g = g.masked_fill(places < 0, 0)
        places = places.clamp(min=0).long()
        p, q = (torch.arange(n, device=g.device) for n in places.shape[-2:])
        row, column = p[:, None] * kernel[0] + places // kernel[1], q * kernel[1] + places % kernel[1]
        places = row * size[1] + column
    images = g.new_zeros(*g.shape[:-2], size[0] * size[1])
    return images.scatter(-1, places.flatten(-2), g.flatten(-2)).unflatten(-1, size)


@max_unpool.register_fake
def _(g: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    return g.new_empty(*places.shape[:-2], *size)


cuda_kernel(max_pool, "pooling", "pooling", "max_pool")
cuda_kernel(max_unpool, "pooling", "pooling", "max_unpool")
POOL, UNPOOL = torch.ops.fedloom.max_pool.default, torch.ops.fedloom.max_unpool.default


def replace_pooling(module: GraphModule) -> None:
    """Graph pass: max-pooling is computed by these operators where windows do not overlap and images are contiguous."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_POOL):
        if _fits(*node.args):
            _replace(node)
    for node in graph.find_nodes(
        op="call_function", target=_POOL_BACK
    ):  # its indices are read by other operations, too
        g, x, kernel, stride, padding, dilation, _, places = node.args
        if _fits(x, kernel, stride, padding, dilation):
            node.target, node.args = UNPOOL, (g, places, _size(x), list(kernel))
    graph.eliminate_dead_code()
    module.recompile()


def _fits(x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), _: bool = False) -> bool:
    disjoint = list(stride or kernel) == list(kernel) and not any(padding) and set(dilation) == {1}
    image = x.meta["val"]
    fits = disjoint and len(kernel) == 2 and math.prod(kernel) <= MAX_WINDOW
    fits = fits and image.is_contiguous() and image.is_floating_point()
    return use_custom_kernel("pooling", None if fits else "windows that overlap, or images that are not contiguous")


def _size(node: Any) -> list[int]:
    return list(node.meta["val"].shape[-2:])


def _replace(pool: Any) -> None:
    """Replace a pooling and its gradients, unless something else reads the indices."""
    x, kernel = pool.args[:2]
    values, places = ([node for node in pool.users if node.args[1] == which] for which in (0, 1))
    backward = list(_readers(places))
    if any(node.target is not _POOL_BACK for node in backward):
        return
    masks, readers = [behind_views(node.args[0]) for node in backward], list(_readers(values))
    relu = [node.target for node in readers] == [_RELU] and all(_is_relu_mask(mask, readers[0]) for mask in masks)
    if relu:
        readers[0].replace_all_uses_with(readers[0].args[0])
    shown, at = pool.meta["val"]
    pool.target, pool.args = POOL, (x, list(kernel), list(shown.shape[-2:]), relu, bool(backward))
    pool.meta["val"] = shown, at.to(torch.int8)
    for node in places:
        node.meta["val"] = at.to(torch.int8)
    for node, mask in zip(backward, masks, strict=True):
        g = mask.args[0] if relu else node.args[0]
        with pool.graph.inserting_before(node):
            node.args = reshaped(g, at.shape), places[0], _size(x), list(kernel)
        node.target = UNPOOL


def _is_relu_mask(mask: Any, relu: Any) -> bool:
    """True if the node is the gradient of this ReLU."""
    if mask.target is not _RELU_BACK or mask.args[2] != 0 or behind_views(mask.args[1]) is not relu:
        return False
    return mask.args[0].meta["val"].is_contiguous()


def _readers(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes that read the values of the given nodes, also through views."""
    for node in nodes:
        for user in node.users:
            if user.target is VIEW:
                yield from _readers([user])
            else:
                yield user
