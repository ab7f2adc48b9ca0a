"""Max-pooling whose windows do not overlap, the positive part of its results, and the gradient of both.

A place in such a window takes a byte, where torch's places in images take eight, and the byte also says where there is
no gradient because the largest pixel is not positive. As with products, the operators are put into programs that are
already traced.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from fedloom.kernels.ours import ours, triton

aten = torch.ops.aten
_POOL, _POOL_BACK = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
_RELU, _RELU_BACK, _VIEW = aten.relu.default, aten.threshold_backward.default, aten.view.default
MOST = 127  # pixels of a window


@torch.library.custom_op("fedloom::pool", mutates_args=())
def pool(x: Tensor, kernel: list[int], size: list[int], positive: bool, with_places: bool) -> tuple[Tensor, Tensor]:
    """The largest pixels of windows of images x (..., h, w), (..., *size), or their positive parts; and their places in
    the windows, counted row by row, or -1 where the positive part has no gradient. Without places these are empty."""
    if ours(x):
        return triton("pooling").pool(x.contiguous(), kernel, size, positive, with_places)
    ragged = any(side * k > pixels for side, k, pixels in zip(size, kernel, x.shape[-2:], strict=True))
    y, at = F.max_pool2d(x, kernel, ceil_mode=ragged, return_indices=True)
    row, column = at // x.shape[-1] % kernel[0], at % x.shape[-1] % kernel[1]
    places = row * kernel[1] + column
    if positive:
        places, y = places.masked_fill(y <= 0, -1), y.relu()
    return y, places.to(torch.int8) if with_places else x.new_empty(0, dtype=torch.int8)


@pool.register_fake
def _(x: Tensor, kernel: list[int], size: list[int], positive: bool, with_places: bool) -> tuple[Tensor, Tensor]:
    y = x.new_empty(*x.shape[:-2], *size)
    return y, x.new_empty(y.shape if with_places else 0, dtype=torch.int8)


@torch.library.custom_op("fedloom::unpool", mutates_args=())
def unpool(g: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    """Gradients g (..., p, q) where they belong in images (..., *size): at the places of the largest pixels, which are
    those of `pool`, or torch's, of int64."""
    if ours(g):
        return triton("pooling").unpool(g.contiguous(), places.contiguous(), size, kernel)
    if places.dtype != torch.int64:
        g = g.masked_fill(places < 0, 0)
        places = places.clamp(min=0).long()
        p, q = (torch.arange(n, device=g.device) for n in places.shape[-2:])
        row, column = p[:, None] * kernel[0] + places // kernel[1], q * kernel[1] + places % kernel[1]
        places = row * size[1] + column
    images = g.new_zeros(*g.shape[:-2], size[0] * size[1])
    return images.scatter(-1, places.flatten(-2), g.flatten(-2)).unflatten(-1, size)


@unpool.register_fake
def _(g: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    return g.new_empty(*places.shape[:-2], *size)


POOL, UNPOOL = torch.ops.fedloom.pool.default, torch.ops.fedloom.unpool.default


def replace_pooling(program: GraphModule) -> None:
    """Let a program pool by these operators where windows do not overlap and images lie plane after plane."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=_POOL):
        if _fits(*node.args):
            _replace(node)
    for node in graph.find_nodes(op="call_function", target=_POOL_BACK):  # whose places are read by others, too
        g, x, kernel, stride, padding, dilation, _, places = node.args
        if _fits(x, kernel, stride, padding, dilation):
            node.target, node.args = UNPOOL, (g, places, _size(x), list(kernel))
    graph.eliminate_dead_code()
    program.recompile()


def _fits(x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), _: bool = False) -> bool:
    apart = list(stride or kernel) == list(kernel) and not any(padding) and set(dilation) == {1}
    image = x.meta["val"]
    return (
        apart and len(kernel) == 2 and math.prod(kernel) <= MOST and image.is_contiguous() and image.is_floating_point()
    )


def _size(node: Any) -> list[int]:
    return list(node.meta["val"].shape[-2:])


def _replace(pool: Any) -> None:
    """Unless somebody but gradients reads the places."""
    x, kernel = pool.args[:2]
    values, places = ([node for node in pool.users if node.args[1] == which] for which in (0, 1))
    backward = list(_readers(places))
    if any(node.target is not _POOL_BACK for node in backward):
        return
    masks, readers = [behind(node.args[0]) for node in backward], list(_readers(values))
    positive = [node.target for node in readers] == [_RELU] and all(_passes(mask, readers[0]) for mask in masks)
    if positive:
        readers[0].replace_all_uses_with(readers[0].args[0])
    shown, at = pool.meta["val"]
    pool.target, pool.args = POOL, (x, list(kernel), list(shown.shape[-2:]), positive, bool(backward))
    pool.meta["val"] = shown, at.to(torch.int8)
    for node in places:
        node.meta["val"] = at.to(torch.int8)
    for node, mask in zip(backward, masks, strict=True):
        g = mask.args[0] if positive else node.args[0]
        with pool.graph.inserting_before(node):
            node.args = shaped(g, at.shape), places[0], _size(x), list(kernel)
        node.target = UNPOOL


def _passes(mask: Any, relu: Any) -> bool:
    """Is it the gradient that the positive part lets through?"""
    if mask.target is not _RELU_BACK or mask.args[2] != 0 or behind(mask.args[1]) is not relu:
        return False
    return mask.args[0].meta["val"].is_contiguous()


def _readers(nodes: Iterable[Any]) -> Iterator[Any]:
    """Of their values, also through views."""
    for node in nodes:
        for user in node.users:
            if user.target is _VIEW:
                yield from _readers([user])
            else:
                yield user


def behind(node: Any) -> Any:
    """What a view is a view of."""
    while node.target is _VIEW:
        node = node.args[0]
    return node


def shaped(node: Any, shape: Sequence[int]) -> Any:
    """A node for its value in that shape."""
    value = node.meta["val"]
    if list(value.shape) == list(shape):
        return node
    view = node.graph.call_function(_VIEW, (node, list(shape)))
    view.meta["val"] = value.view(shape)
    return view
