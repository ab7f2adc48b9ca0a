"""Two-dimensional convolution with weights per client, differentiable as often as one likes.

Under `vmap`, PyTorch turns such a convolution into a grouped one, which cuDNN carries out client by client. The other
way here is kernels that see all clients at once. A convolution, its gradient to the input and its gradient to the
weights are bilinear, and the derivatives of each are the other two, so each of the three has its own way. Which one is
fastest depends on the shapes; the execution plan says.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from fedloom.core.autodiff import inside_vmap
from fedloom.kernels.clients import over_clients
from fedloom.kernels.ours import ours, triton

Pair = list[int]
Backward = Callable[[Any, Tensor], tuple[Tensor | None, ...]]
Part = Literal["output", "input", "weights"]  # what is computed
COUNTED = 1 << 30  # a client's numbers are fewer, so that kernels count them in 32 bits, borders included
Way = str  # grouped, or sides and depth of tiles, warps and stages: "64 64 32 4 3"


def wide(channels: int) -> int:
    """Channels as they lie in memory, so that a pixel begins where memory is read in one go."""
    return -(-channels // 16) * 16


def sides(size: Any, kernel: Any, stride: Any, padding: Any) -> tuple[int, ...]:
    """Height and width of what a convolution gives."""
    return tuple((a + 2 * p - k) // s + 1 for a, k, s, p in zip(size, kernel, stride, padding, strict=True))


class Case(NamedTuple):
    """One of the three computations, for one client."""

    part: Part
    x: tuple[int, ...]  # (b, c, h, w)
    w: tuple[int, ...]  # (o, c, r, s)
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @property
    def key(self) -> str:
        x, w, stride, padding = ("x".join(map(str, v)) for v in self[1:])
        return f"{self.part} {x} {w} /{stride} +{padding}"

    @property
    def y(self) -> tuple[int, ...]:
        return self.x[0], self.w[0], *sides(self.x[2:], self.w[2:], self.stride, self.padding)

    @property
    def narrow(self) -> bool:
        """So few channels that what the kernel sees at a place had better lie in one row."""
        return self.x[1] < 16 and math.prod(self.w[1:]) <= 256

    @property
    def countable(self) -> bool:
        """Is the largest tensor that a kernel sees small enough for one? Borders come on top."""
        places = max(v[0] * math.prod(v[2:]) for v in (self.x, self.y))
        return places * wide(max(self.w[0], math.prod(self.w[1:]) if self.narrow else self.w[1])) < COUNTED

    def usual(self) -> Way:
        """What is done if nobody measured."""
        out, inner = self.w[:2]
        if self.part == "weights":
            return "32 32 64 4 3" if out <= 32 else "64 64 32 4 3" if inner < 64 else "64 128 32 4 3"
        width = inner if self.part == "input" else out
        return "64 32 32 4 3" if width <= 32 else "64 64 32 4 3" if width < 128 else "64 128 32 4 3"


class _Here(threading.local):
    ways: Mapping[str, Way] | None = None
    seen: dict[str, Case] | None = None


_here = _Here()


@contextmanager
def convolutions(ways: Mapping[str, Way] | None, seen: dict[str, Case] | None = None) -> Iterator[None]:
    """Stacked convolutions go the given ways, or (None) are torch's. Those that come by are noted in `seen`, also in
    further such blocks inside."""
    before, (_here.ways, _here.seen) = (_here.ways, _here.seen), (ways, _here.seen if seen is None else seen)
    try:
        yield
    finally:
        _here.ways, _here.seen = before


def _chosen(part: Part, x: Any, w: Any, stride: Pair, padding: Pair) -> Way:
    case = Case(part, tuple(x), tuple(w), tuple(stride), tuple(padding))
    if _here.seen is not None:
        _here.seen[case.key] = case
    ways = _here.ways if _here.ways is not None else {}
    return (ways.get(case.key) or case.usual()) if case.countable else "grouped"


# -- operators over stacked clients ------------------------------------------------------------------------------
# Without kernels of ours the first piece is the number itself, so that the formulas can be checked in any precision.


def _count(x: Tensor) -> int:
    """Pieces of a number: what torch is allowed to round off, they need not hold."""
    if x.dtype == torch.bfloat16:
        return 1
    return 2 if torch.backends.cuda.matmul.allow_tf32 else 3


def _half(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if ours(x) else x.dtype


def _full(pieces: Tensor) -> torch.dtype:
    """Of a product of pieces."""
    return torch.float32 if ours(pieces) and pieces.shape[1] > 1 else pieces.dtype


def _whole(pieces: Tensor) -> Tensor:
    """(n, count, a, h, w, c) as (n, a, c, h, w)"""
    return pieces.sum(1).permute(0, 1, 4, 2, 3)


@torch.library.custom_op("fedloom::pieces", mutates_args=())
def pieces(x: Tensor, count: int) -> Tensor:
    """x (n, a, c, h, w) in pieces: (n, count, a, h, w, channels), where channels are c and zeros behind them."""
    if ours(x):
        return triton("conv").pieces(x, count)
    n, a, c, h, w = x.shape
    y = x.new_zeros(n, count, a, h, w, wide(c))
    y[:, 0, ..., :c] = x.permute(0, 1, 3, 4, 2)
    return y


@pieces.register_fake
def _(x: Tensor, count: int) -> Tensor:
    n, a, c, h, w = x.shape
    return x.new_empty(n, count, a, h, w, wide(c), dtype=_half(x))


@torch.library.custom_op("fedloom::patches", mutates_args=())
def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, count: int) -> Tensor:
    """What a kernel sees at each place of x (n, b, c, h, w), in pieces: (n, count, b, p, q, c * r * s and zeros)."""
    if ours(x):
        return triton("conv").patches(x, kernel, stride, padding, count)
    places = sides(x.shape[3:], kernel, stride, padding)
    columns = F.unfold(x.flatten(0, 1), tuple(kernel), padding=tuple(padding), stride=tuple(stride))
    return pieces(columns.unflatten(0, x.shape[:2]).unflatten(3, places), count)


@patches.register_fake
def _(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, count: int) -> Tensor:
    n, b, c, *size = x.shape
    places = sides(size, kernel, stride, padding)
    return x.new_empty(n, count, b, *places, wide(c * math.prod(kernel)), dtype=_half(x))


@torch.library.custom_op("fedloom::correlate", mutates_args=())
def correlate(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, turned: bool, tiles: Pair
) -> Tensor:
    """Convolutions (n, b, o, p, q), client by client, of pieces of x (n, b, c, h, w) and w (n, o, c, r, s), and bias
    (n, o); `turned` turns the kernel round."""
    if ours(x):
        return triton("conv").correlate(x, w, bias, stride, padding, turned, tiles)
    pairs = zip(_whole(x), _whole(w).flip(3, 4) if turned else _whole(w), strict=True)
    found = torch.stack([F.conv2d(a, b, stride=stride, padding=padding) for a, b in pairs])
    found = found if bias is None else found + bias[:, None, :, None, None]
    return found.clone(memory_format=torch.contiguous_format)


@correlate.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, turned: bool, tiles: Pair) -> Tensor:
    places = sides(x.shape[3:5], w.shape[3:5], stride, padding)
    return x.new_empty(len(x), x.shape[2], w.shape[2], *places, dtype=_full(x))


@torch.library.custom_op("fedloom::weight_gradient", mutates_args=())
def weight_gradient(
    x: Tensor, g: Tensor, shape: Pair, kernel: Pair, stride: Pair, padding: Pair, tiles: Pair
) -> Tensor:
    """Gradients to weights (n, *shape, *kernel), where shape is (o, c), from pieces of inputs (n, b, c, h, w) and of
    gradients to outputs (n, b, o, p, q)."""
    if ours(x):
        return triton("conv").weight_gradient(x, g, shape, kernel, stride, padding, tiles)
    out, inner = shape
    pairs = zip(_whole(x)[:, :, :inner], _whole(g)[:, :, :out], strict=True)
    size = (out, inner, *kernel)
    return torch.stack([conv2d_weight(a.contiguous(), size, b.contiguous(), stride, padding) for a, b in pairs])


@weight_gradient.register_fake
def _(x: Tensor, g: Tensor, shape: Pair, kernel: Pair, stride: Pair, padding: Pair, tiles: Pair) -> Tensor:
    return x.new_empty(len(x), *shape, *kernel, dtype=_full(x))


over_clients(pieces, 1)
over_clients(patches, 1)
over_clients(correlate, 3)
over_clients(weight_gradient, 2)


# -- the three computations for one client ------------------------------------------------------------------------


def _output(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, way: Way) -> Tensor:
    if way == "grouped":
        return F.conv2d(x, w, bias, stride=stride, padding=padding)
    count, tiles, own = _count(x), _tiles(way), None if bias is None else bias[None]
    if Case("output", x.shape, w.shape, tuple(stride), tuple(padding)).narrow:
        x, w = patches(x[None], list(w.shape[2:]), stride, padding, count), w.flatten(1)[..., None, None]
        return correlate(x, pieces(w[None], count), own, [1, 1], [0, 0], False, tiles)[0]
    return correlate(pieces(x[None], count), pieces(w[None], count), own, stride, padding, False, tiles)[0]


def _input(g: Tensor, w: Tensor, shape: Pair, stride: Pair, padding: Pair, way: Way) -> Tensor:
    kernel = list(w.shape[2:])
    if way == "grouped":
        return conv2d_input(shape, w, g, stride, padding)
    if stride != [1, 1]:  # zeros between the values, and behind them where the last steps left something over
        for dim in (0, 1):
            room = shape[2 + dim] + 2 * padding[dim] - kernel[dim] + 1
            g = F.pad(g.unsqueeze(3 + dim), (0, 0) * (1 - dim) + (0, stride[dim] - 1)).flatten(2 + dim, 3 + dim)
            g = F.pad(g, (0, 0) * (1 - dim) + (0, room - g.shape[2 + dim]))
    around = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
    count = _count(g)
    g, w = pieces(g[None], count), pieces(w.transpose(0, 1)[None], count)
    return correlate(g, w, None, [1, 1], around, True, _tiles(way))[0]


def _weights(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair, way: Way) -> Tensor:
    shape = [g.shape[1], x.shape[1], *kernel]
    if way == "grouped":
        return conv2d_weight(x, shape, g, stride, padding)
    count, tiles = _count(x), _tiles(way)
    slopes = pieces(g[None], count)
    if Case("weights", x.shape, tuple(shape), tuple(stride), tuple(padding)).narrow:
        seen, patch = patches(x[None], kernel, stride, padding, count), math.prod(shape[1:])
        return weight_gradient(seen, slopes, [shape[0], patch], [1, 1], [1, 1], [0, 0], tiles)[0].view(shape)
    return weight_gradient(pieces(x[None], count), slopes, shape[:2], kernel, stride, padding, tiles)[0]


def _tiles(way: Way) -> list[int]:
    return [int(v) for v in way.split()]


def carry_out(case: Case, a: Tensor, b: Tensor, way: Way) -> Tensor:
    stride, padding = list(case.stride), list(case.padding)
    if case.part == "output":
        return _output(a, b, None, stride, padding, way)
    if case.part == "input":
        return _input(a, b, list(case.x), stride, padding, way)
    return _weights(a, b, list(case.w[2:]), stride, padding, way)


# A backward pass on a GPU runs in another thread: it goes the ways of the pass that it belongs to.


def _keep(ctx: Any, *tensors: Tensor) -> None:
    ctx.save_for_backward(*tensors)
    ctx.ways, ctx.seen = _here.ways, _here.seen


def _as_kept(backward: Backward) -> Backward:
    def inside(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with convolutions(ctx.ways, ctx.seen):
            return backward(ctx, gradient)

    return inside


class _ToOutput(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        return _output(x, w, bias, stride, padding, _chosen("output", x.shape, w.shape, stride, padding))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, ctx.stride, ctx.padding = inputs
        _keep(ctx, x, w)

    @staticmethod
    @_as_kept
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        to_x, to_w, to_bias, *_ = ctx.needs_input_grad
        return (
            _ToInput.apply(g, w, list(x.shape), ctx.stride, ctx.padding) if to_x else None,
            _ToWeights.apply(x, g, list(w.shape[2:]), ctx.stride, ctx.padding) if to_w else None,
            g.sum((0, 2, 3)) if to_bias else None,
            *[None] * 2,
        )


class _ToInput(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, w: Tensor, shape: Pair, stride: Pair, padding: Pair) -> Tensor:
        return _input(g, w, shape, stride, padding, _chosen("input", shape, w.shape, stride, padding))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, w, _, ctx.stride, ctx.padding = inputs
        _keep(ctx, g, w)

    @staticmethod
    @_as_kept
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor | None, ...]:
        g, w = ctx.saved_tensors
        return (
            _ToOutput.apply(x, w, None, ctx.stride, ctx.padding),
            _ToWeights.apply(x, g, list(w.shape[2:]), ctx.stride, ctx.padding),
            *[None] * 3,
        )


class _ToWeights(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
        shape = (g.shape[1], x.shape[1], *kernel)
        return _weights(x, g, kernel, stride, padding, _chosen("weights", x.shape, shape, stride, padding))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, g, _, ctx.stride, ctx.padding = inputs
        _keep(ctx, x, g)

    @staticmethod
    @_as_kept
    def backward(ctx: Any, w: Tensor) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        return (
            _ToInput.apply(g, w, list(x.shape), ctx.stride, ctx.padding),
            _ToOutput.apply(x, w, None, ctx.stride, ctx.padding),
            *[None] * 3,
        )


class Convolution(nn.Module):
    """A convolution layer that goes the ways of the execution plan where clients are stacked."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.like, self.stride, self.padding = like, list(like.stride), like.padding
        self.own = (
            like.groups == 1
            and like.dilation == (1, 1)
            and like.padding_mode == "zeros"
            and not isinstance(like.padding, str)
            and all(p < k for p, k in zip(like.padding, like.kernel_size, strict=True))
        )

    def forward(self, x: Tensor) -> Tensor:
        exact = x.is_cuda and x.dtype == torch.float64  # kernels for a GPU add up in float32
        if _here.ways is None or not self.own or exact or not inside_vmap():
            return self.like(x)
        given = x, self.like.weight, self.like.bias
        if torch.is_autocast_enabled(x.device.type):
            half = torch.get_autocast_dtype(x.device.type)
            given = x.to(half), given[1].to(half), None if given[2] is None else given[2].to(half)
        y: Tensor = _ToOutput.apply(*given, self.stride, list(self.padding))
        return y
