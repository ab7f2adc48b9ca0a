"""Two-dimensional convolution with weights per client, differentiable as often as one likes.

Under `vmap`, PyTorch turns such a convolution into a grouped one, which cuDNN carries out client by client. There are
two other ways here: products of unfolded patches, and kernels that see all clients at once. A convolution, its gradient
to the input and its gradient to the weights are bilinear, and the derivatives of each are the other two, so each of
the three has its own way. Which one is fastest depends on the shapes; the execution plan says.
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

Pair = list[int]
Backward = Callable[[Any, Tensor], tuple[Tensor | None, ...]]
Part = Literal["output", "input", "weights"]  # what is computed
Way = str  # grouped, unfolded, or sides and depth of tiles, warps and stages: "32 64 32 4 3"


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
        sides = zip(self.x[2:], self.w[2:], self.stride, self.padding, strict=True)
        return self.x[0], self.w[0], *((size + 2 * p - k) // s + 1 for size, k, s, p in sides)

    def usual(self) -> Way:
        """What is done if nobody measured."""
        patch, places = math.prod(self.w[1:]), self.x[0] * math.prod(self.y[2:])
        if patch <= 32 and self.part != "input":
            return "128 32 32 4 3" if self.part == "output" else "32 32 32 4 3"
        return "unfolded" if patch * places <= 1 << 20 else "grouped"


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
    return ways.get(case.key) or case.usual()


# -- operators over stacked clients ------------------------------------------------------------------------------


def precision() -> str:
    """How products of float32 are taken: with the rounding that torch is allowed to do, or without."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _triton() -> Any:
    from fedloom.kernels import conv_triton  # there where torch comes with CUDA

    return conv_triton


@torch.library.custom_op("fedloom::correlate", mutates_args=())
def correlate(x: Tensor, w: Tensor, stride: Pair, padding: Pair, transposed: bool, tiles: Pair) -> Tensor:
    """Convolutions of x (n, b, c, h, w) with w (n, o, c, r, s), client by client; `transposed` sums over o with the
    kernel turned round."""
    if x.is_cuda:
        return _triton().correlate(x, w, stride, padding, transposed, precision(), tiles)
    w = w.transpose(1, 2).flip(3, 4) if transposed else w
    return torch.stack([F.conv2d(a, b, stride=stride, padding=padding) for a, b in zip(x, w, strict=True)])


@correlate.register_fake
def _(x: Tensor, w: Tensor, stride: Pair, padding: Pair, transposed: bool, tiles: Pair) -> Tensor:
    pairs = zip(x.shape[3:], padding, w.shape[3:], stride, strict=True)
    sides = [(size + 2 * p - k) // s + 1 for size, p, k, s in pairs]
    return x.new_empty(*x.shape[:2], w.shape[2 if transposed else 1], *sides)


@torch.library.custom_op("fedloom::weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair, tiles: Pair) -> Tensor:
    """Gradients to weights (n, o, c, *kernel), from inputs (n, b, c, h, w) and gradients to outputs."""
    if x.is_cuda:
        return _triton().weight_gradient(x, g, kernel, stride, padding, precision(), tiles)
    shape = (g.shape[2], x.shape[2], *kernel)
    pairs = zip(x, g, strict=True)
    return torch.stack([conv2d_weight(a, shape, b, stride, padding) for a, b in pairs])


@weight_gradient.register_fake
def _(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair, tiles: Pair) -> Tensor:
    return x.new_empty(len(x), g.shape[2], x.shape[2], *kernel)


@torch.library.custom_op("fedloom::unfold", mutates_args=())
def unfold(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Patches of x (n, b, c, h, w) as columns: (n, c * r * s, b * p * q)."""
    if x.is_cuda:
        return _triton().unfold(x, kernel, stride, padding)
    columns = F.unfold(x.flatten(0, 1), tuple(kernel), padding=tuple(padding), stride=tuple(stride))
    return columns.unflatten(0, x.shape[:2]).transpose(1, 2).flatten(2).contiguous()


@unfold.register_fake
def _(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    pairs = zip(x.shape[3:], padding, kernel, stride, strict=True)
    places = math.prod((size + 2 * p - k) // s + 1 for size, p, k, s in pairs)
    return x.new_empty(len(x), x.shape[2] * math.prod(kernel), x.shape[1] * places)


@torch.library.custom_op("fedloom::fold", mutates_args=())
def fold(y: Tensor, shape: list[int], kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Columns (n, c * r * s, b * p * q) summed up where they come from in images (n, b, c, h, w)."""
    if y.is_cuda:
        return _triton().fold(y, shape, kernel, stride, padding)
    columns = y.unflatten(2, (shape[0], -1)).transpose(1, 2).flatten(0, 1)
    images = F.fold(columns, tuple(shape[2:]), tuple(kernel), padding=tuple(padding), stride=tuple(stride))
    return images.unflatten(0, (len(y), -1))


@fold.register_fake
def _(y: Tensor, shape: list[int], kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    return y.new_empty(len(y), *shape)


def _over_clients(op: Any, tensors: int) -> Any:
    """A rule for one more axis of clients: it joins the one that is there."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        joined = [
            (a.expand(size, *a.shape) if d is None else a.movedim(d, 0)).flatten(0, 1)
            for a, d in zip(args[:tensors], in_dims, strict=False)
        ]
        return op(*joined, *args[tensors:]).unflatten(0, (size, -1)), 0

    return rule


for _op, _tensors in ((correlate, 2), (weight_gradient, 2), (unfold, 1), (fold, 1)):
    torch.library.register_vmap(_op, _over_clients(_op, _tensors))


# -- the three computations for one client ------------------------------------------------------------------------


def _rows(g: Tensor) -> Tensor:
    """(b, o, p, q) as a matrix (o, b * p * q)"""
    return g.transpose(0, 1).flatten(1)


def _output(x: Tensor, w: Tensor, stride: Pair, padding: Pair, way: Way) -> Tensor:
    if way == "grouped":
        return F.conv2d(x, w, stride=stride, padding=padding)
    if way == "unfolded":
        y = w.flatten(1) @ unfold(x[None], list(w.shape[2:]), stride, padding)[0]
        case = Case("output", x.shape, w.shape, tuple(stride), tuple(padding))
        return y.view(len(w), len(x), *case.y[2:]).transpose(0, 1)
    return correlate(x[None], w[None], stride, padding, False, _tiles(way))[0]


def _input(g: Tensor, w: Tensor, shape: Pair, stride: Pair, padding: Pair, way: Way) -> Tensor:
    kernel = list(w.shape[2:])
    if way == "grouped":
        return conv2d_input(shape, w, g, stride, padding)
    if way == "unfolded":
        return fold((w.flatten(1).t() @ _rows(g))[None], shape, kernel, stride, padding)[0]
    if stride != [1, 1]:  # zeros between the values, and behind them where the last steps left something over
        for dim in (0, 1):
            room = shape[2 + dim] + 2 * padding[dim] - kernel[dim] + 1
            g = F.pad(g.unsqueeze(3 + dim), (0, 0) * (1 - dim) + (0, stride[dim] - 1)).flatten(2 + dim, 3 + dim)
            g = F.pad(g, (0, 0) * (1 - dim) + (0, room - g.shape[2 + dim]))
    around = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
    return correlate(g[None], w[None], [1, 1], around, True, _tiles(way))[0]


def _weights(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair, way: Way) -> Tensor:
    shape = [g.shape[1], x.shape[1], *kernel]
    if way == "grouped":
        return conv2d_weight(x, shape, g, stride, padding)
    if way == "unfolded":
        return (_rows(g) @ unfold(x[None], kernel, stride, padding)[0].t()).view(shape)
    return weight_gradient(x[None], g[None], kernel, stride, padding, _tiles(way))[0]


def _tiles(way: Way) -> list[int]:
    return [int(v) for v in way.split()]


def carry_out(case: Case, a: Tensor, b: Tensor, way: Way) -> Tensor:
    stride, padding = list(case.stride), list(case.padding)
    if case.part == "output":
        return _output(a, b, stride, padding, way)
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
    def forward(x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Tensor:
        return _output(x, w, stride, padding, _chosen("output", x.shape, w.shape, stride, padding))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, ctx.stride, ctx.padding = inputs
        _keep(ctx, x, w)

    @staticmethod
    @_as_kept
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        to_x, to_w, *_ = ctx.needs_input_grad
        return (
            _ToInput.apply(g, w, list(x.shape), ctx.stride, ctx.padding) if to_x else None,
            _ToWeights.apply(x, g, list(w.shape[2:]), ctx.stride, ctx.padding) if to_w else None,
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
            _ToOutput.apply(x, w, ctx.stride, ctx.padding),
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
            _ToOutput.apply(x, w, ctx.stride, ctx.padding),
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
        w, bias = self.like.weight, self.like.bias
        if torch.is_autocast_enabled(x.device.type):
            x, w = (v.to(torch.get_autocast_dtype(x.device.type)) for v in (x, w))
        y: Tensor = _ToOutput.apply(x, w, self.stride, list(self.padding))
        return y if bias is None else y + bias.to(y.dtype)[:, None, None]
