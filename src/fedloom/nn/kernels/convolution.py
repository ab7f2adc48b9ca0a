"""Two-dimensional convolution with weights per client, differentiable any number of times.

Under `vmap`, PyTorch turns such a convolution into a grouped one, which cuDNN computes client by client. The kernels
here compute all clients at once. A convolution, its gradient to the input and its gradient to the weights are bilinear,
and the derivatives of each are the other two, so each of the three has an algorithm of its own. Which one is fastest
depends on the shapes; the execution plan says.
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
from fedloom.nn.kernels.dispatch import cuda_kernel, has_cuda_kernels, use_custom_kernel, vmap_over_clients

Pair = list[int]
Backward = Callable[[Any, Tensor], tuple[Tensor | None, ...]]
Part = Literal["output", "input", "weights"]  # what is computed
MAX_ELEMENTS = 1 << 30  # of a client's tensor, so that kernels can index it in 32 bits, padding included
Algo = str  # "grouped" (cuDNN), or sides and depth of tiles, warps and stages: "64 64 32 4 3"
GROUPED = "grouped"


def padded_channels(channels: int) -> int:
    """Channels per pixel in memory: a multiple of 16, so that loads are aligned."""
    return -(-channels // 16) * 16


def output_size(size: Any, kernel: Any, stride: Any, padding: Any) -> tuple[int, ...]:
    """Height and width of the output of a convolution."""
    return tuple((a + 2 * p - k) // s + 1 for a, k, s, p in zip(size, kernel, stride, padding, strict=True))


class ConvCase(NamedTuple):
    """One of the three computations, with its shapes for one client."""

    part: Part
    x: tuple[int, ...]  # (b, c, h, w)
    w: tuple[int, ...]  # (o, c, r, s)
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @property
    def key(self) -> str:
        """Name of the case in the execution plan."""
        x, w, stride, padding = ("x".join(map(str, v)) for v in self[1:])
        return f"{self.part} {x} {w} /{stride} +{padding}"

    @property
    def y(self) -> tuple[int, ...]:
        """Shape of the output."""
        return self.x[0], self.w[0], *output_size(self.x[2:], self.w[2:], self.stride, self.padding)

    @property
    def few_channels(self) -> bool:
        """True if there are so few channels that an explicit im2col is faster."""
        return self.x[1] < 16 and math.prod(self.w[1:]) <= 256

    @property
    def indexable(self) -> bool:
        """True if kernels can index the largest tensor in 32 bits."""
        columns = math.prod(self.w[1:])
        places = max(v[0] * math.prod(v[2:]) for v in (self.x, self.y))
        return places * padded_channels(max(self.w[0], columns if self.few_channels else self.w[1])) < MAX_ELEMENTS

    def default_algo(self) -> Algo:
        """The algorithm that is used if none was measured."""
        out, inner = self.w[:2]
        if self.part == "weights":
            return "32 32 64 4 3" if out <= 32 else "64 64 32 4 3" if inner < 64 else "64 128 32 4 3"
        width = inner if self.part == "input" else out
        return "64 32 32 4 3" if width <= 32 else "64 64 32 4 3" if width < 128 else "64 128 32 4 3"


class _Context(threading.local):
    algos: Mapping[str, Algo] | None = None
    seen: dict[str, ConvCase] | None = None


_context = _Context()


@contextmanager
def convolutions(algos: Mapping[str, Algo] | None, seen: dict[str, ConvCase] | None = None) -> Iterator[None]:
    """Within this context, stacked convolutions use the given algorithms, or torch's own if it is None. Cases that
    occur are collected in `seen`, also within nested contexts."""
    before = _context.algos, _context.seen
    _context.algos, _context.seen = algos, _context.seen if seen is None else seen
    try:
        yield
    finally:
        _context.algos, _context.seen = before


def _chosen_algo(part: Part, x: Any, w: Any, stride: Pair, padding: Pair) -> Algo:
    case = ConvCase(part, tuple(x), tuple(w), tuple(stride), tuple(padding))
    if _context.seen is not None:
        _context.seen[case.key] = case
    algos = _context.algos if _context.algos is not None else {}
    return (algos.get(case.key) or case.default_algo()) if case.indexable else GROUPED


# -- operators over stacked clients ------------------------------------------------------------------------------
# The plain implementations keep the whole number in the first split, so that formulas can be tested in any precision.


def _split_count(x: Tensor) -> int:
    """How many bfloat16 represent a number: fewer where torch may round."""
    if x.dtype == torch.bfloat16:
        return 1
    return 2 if torch.backends.cuda.matmul.allow_tf32 else 3


def _split_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if has_cuda_kernels(x) else x.dtype


def _product_dtype(splits: Tensor) -> torch.dtype:
    """Type of a product of splits."""
    return torch.float32 if has_cuda_kernels(splits) and splits.shape[1] > 1 else splits.dtype


def _from_splits(splits: Tensor) -> Tensor:
    """(n, count, a, h, w, c) as (n, a, c, h, w)"""
    return splits.sum(1).permute(0, 1, 4, 2, 3)


@torch.library.custom_op("fedloom::bf16_splits", mutates_args=())
def bf16_splits(x: Tensor, count: int) -> Tensor:
    """x (n, a, c, h, w) as sums of `count` bfloat16: (n, count, a, h, w, channels), channels padded with zeros."""
    n, a, c, h, w = x.shape
    y = x.new_zeros(n, count, a, h, w, padded_channels(c))
    y[:, 0, ..., :c] = x.permute(0, 1, 3, 4, 2)
    return y


@bf16_splits.register_fake
def _(x: Tensor, count: int) -> Tensor:
    n, a, c, h, w = x.shape
    return x.new_empty(n, count, a, h, w, padded_channels(c), dtype=_split_dtype(x))


@torch.library.custom_op("fedloom::im2col_splits", mutates_args=())
def im2col_splits(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, count: int) -> Tensor:
    """The patches of x (n, b, c, h, w) as splits: (n, count, b, p, q, c * r * s, padded with zeros)."""
    places = output_size(x.shape[3:], kernel, stride, padding)
    columns = F.unfold(x.flatten(0, 1), tuple(kernel), padding=tuple(padding), stride=tuple(stride))
    return bf16_splits(columns.unflatten(0, x.shape[:2]).unflatten(3, places), count)


@im2col_splits.register_fake
def _(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, count: int) -> Tensor:
    n, b, c, *size = x.shape
    places = output_size(size, kernel, stride, padding)
    return x.new_empty(n, count, b, *places, padded_channels(c * math.prod(kernel)), dtype=_split_dtype(x))


@torch.library.custom_op("fedloom::correlate", mutates_args=())
def correlate(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, flip: bool, tiles: Pair
) -> Tensor:
    """Convolutions (n, b, o, p, q) of every client, from splits of x (n, b, c, h, w) and of w (n, o, c, r, s), and bias
    (n, o); `flip` flips the kernels in both directions."""
    pairs = zip(_from_splits(x), _from_splits(w).flip(3, 4) if flip else _from_splits(w), strict=True)
    found = torch.stack([F.conv2d(a, b, stride=stride, padding=padding) for a, b in pairs])
    found = found if bias is None else found + bias[:, None, :, None, None]
    return found.clone(memory_format=torch.contiguous_format)


@correlate.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, flip: bool, tiles: Pair) -> Tensor:
    places = output_size(x.shape[3:5], w.shape[3:5], stride, padding)
    return x.new_empty(len(x), x.shape[2], w.shape[2], *places, dtype=_product_dtype(x))


@torch.library.custom_op("fedloom::weight_gradient", mutates_args=())
def weight_gradient(
    x: Tensor, g: Tensor, shape: Pair, kernel: Pair, stride: Pair, padding: Pair, tiles: Pair
) -> Tensor:
    """Gradients to weights (n, *shape, *kernel), where shape is (o, c), from splits of inputs (n, b, c, h, w) and of
    gradients to outputs (n, b, o, p, q)."""
    out, inner = shape
    pairs = zip(_from_splits(x)[:, :, :inner], _from_splits(g)[:, :, :out], strict=True)
    size = (out, inner, *kernel)
    return torch.stack([conv2d_weight(a.contiguous(), size, b.contiguous(), stride, padding) for a, b in pairs])


@weight_gradient.register_fake
def _(x: Tensor, g: Tensor, shape: Pair, kernel: Pair, stride: Pair, padding: Pair, tiles: Pair) -> Tensor:
    return x.new_empty(len(x), *shape, *kernel, dtype=_product_dtype(x))


for _operator, _tensors in ((bf16_splits, 1), (im2col_splits, 1), (correlate, 3), (weight_gradient, 2)):
    vmap_over_clients(_operator, _tensors)
    cuda_kernel(_operator, "convolution", "convolution", _operator._name)


# -- the three computations for one client ------------------------------------------------------------------------


def _output(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, algo: Algo) -> Tensor:
    if algo == GROUPED:
        return F.conv2d(x, w, bias, stride=stride, padding=padding)
    count, tiles, stacked_bias = _split_count(x), _tiles(algo), None if bias is None else bias[None]
    if ConvCase("output", x.shape, w.shape, tuple(stride), tuple(padding)).few_channels:
        x, w = im2col_splits(x[None], list(w.shape[2:]), stride, padding, count), w.flatten(1)[..., None, None]
        return correlate(x, bf16_splits(w[None], count), stacked_bias, [1, 1], [0, 0], False, tiles)[0]
    return correlate(
        bf16_splits(x[None], count), bf16_splits(w[None], count), stacked_bias, stride, padding, False, tiles
    )[0]


def _input(g: Tensor, w: Tensor, shape: Pair, stride: Pair, padding: Pair, algo: Algo) -> Tensor:
    kernel = list(w.shape[2:])
    if algo == GROUPED:
        return conv2d_input(shape, w, g, stride, padding)
    if stride != [1, 1]:  # dilate the gradient, and pad it where the stride left pixels over
        for dim in (0, 1):
            size = shape[2 + dim] + 2 * padding[dim] - kernel[dim] + 1
            g = F.pad(g.unsqueeze(3 + dim), (0, 0) * (1 - dim) + (0, stride[dim] - 1)).flatten(2 + dim, 3 + dim)
            g = F.pad(g, (0, 0) * (1 - dim) + (0, size - g.shape[2 + dim]))
    border = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
    count = _split_count(g)
    g, w = bf16_splits(g[None], count), bf16_splits(w.transpose(0, 1)[None], count)
    return correlate(g, w, None, [1, 1], border, True, _tiles(algo))[0]


def _weights(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair, algo: Algo) -> Tensor:
    shape = [g.shape[1], x.shape[1], *kernel]
    if algo == GROUPED:
        return conv2d_weight(x, shape, g, stride, padding)
    count, tiles = _split_count(x), _tiles(algo)
    gradients = bf16_splits(g[None], count)
    if ConvCase("weights", x.shape, tuple(shape), tuple(stride), tuple(padding)).few_channels:
        columns, patch = im2col_splits(x[None], kernel, stride, padding, count), math.prod(shape[1:])
        return weight_gradient(columns, gradients, [shape[0], patch], [1, 1], [1, 1], [0, 0], tiles)[0].view(shape)
    return weight_gradient(bf16_splits(x[None], count), gradients, shape[:2], kernel, stride, padding, tiles)[0]


def _tiles(algo: Algo) -> list[int]:
    return [int(v) for v in algo.split()]


def compute(case: ConvCase, a: Tensor, b: Tensor, algo: Algo) -> Tensor:
    """One of the three computations for one client."""
    stride, padding = list(case.stride), list(case.padding)
    if case.part == "output":
        return _output(a, b, None, stride, padding, algo)
    if case.part == "input":
        return _input(a, b, list(case.x), stride, padding, algo)
    return _weights(a, b, list(case.w[2:]), stride, padding, algo)


# A backward pass on a GPU runs in another thread: it uses the algorithms of the pass that it belongs to.


class _ConvFunction(torch.autograd.Function):
    """Saves the first two inputs and the algorithms in use for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        first, second, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(first, second)
        ctx.algos, ctx.seen = _context.algos, _context.seen


def _in_saved_context(backward: Backward) -> Backward:
    def inside(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with convolutions(ctx.algos, ctx.seen):
            return backward(ctx, gradient)

    return inside


class _ToOutput(_ConvFunction):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        return _output(x, w, bias, stride, padding, _chosen_algo("output", x.shape, w.shape, stride, padding))

    @staticmethod
    @_in_saved_context
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        to_x, to_w, to_bias, *_ = ctx.needs_input_grad
        return (
            _ToInput.apply(g, w, list(x.shape), ctx.stride, ctx.padding) if to_x else None,
            _ToWeights.apply(x, g, list(w.shape[2:]), ctx.stride, ctx.padding) if to_w else None,
            g.sum((0, 2, 3)) if to_bias else None,
            *[None] * 2,
        )


class _ToInput(_ConvFunction):
    @staticmethod
    def forward(g: Tensor, w: Tensor, shape: Pair, stride: Pair, padding: Pair) -> Tensor:
        return _input(g, w, shape, stride, padding, _chosen_algo("input", shape, w.shape, stride, padding))

    @staticmethod
    @_in_saved_context
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor | None, ...]:
        g, w = ctx.saved_tensors
        return (
            _ToOutput.apply(x, w, None, ctx.stride, ctx.padding),
            _ToWeights.apply(x, g, list(w.shape[2:]), ctx.stride, ctx.padding),
            *[None] * 3,
        )


class _ToWeights(_ConvFunction):
    @staticmethod
    def forward(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
        shape = (g.shape[1], x.shape[1], *kernel)
        return _weights(x, g, kernel, stride, padding, _chosen_algo("weights", x.shape, shape, stride, padding))

    @staticmethod
    @_in_saved_context
    def backward(ctx: Any, w: Tensor) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        return (
            _ToInput.apply(g, w, list(x.shape), ctx.stride, ctx.padding),
            _ToOutput.apply(x, w, None, ctx.stride, ctx.padding),
            *[None] * 3,
        )


class Convolution(nn.Module):
    """A convolution layer that uses the algorithms of the execution plan where clients are stacked."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.like, self.stride, self.padding = like, list(like.stride), like.padding
        self.supported = (
            like.groups == 1
            and like.dilation == (1, 1)
            and like.padding_mode == "zeros"
            and not isinstance(like.padding, str)
            and all(p < k for p, k in zip(like.padding, like.kernel_size, strict=True))
        )

    def _use_kernel(self, x: Tensor) -> bool:
        obstacle = None if self.supported else "groups, dilation or another padding"
        if x.is_cuda and x.dtype == torch.float64:
            obstacle = "float64, and the kernels sum in float32"
        return use_custom_kernel("convolution", obstacle)

    def forward(self, x: Tensor) -> Tensor:
        if _context.algos is None or not inside_vmap() or not self._use_kernel(x):
            return self.like(x)
        given = x, self.like.weight, self.like.bias
        if torch.is_autocast_enabled(x.device.type):
            half = torch.get_autocast_dtype(x.device.type)
            given = x.to(half), given[1].to(half), None if given[2] is None else given[2].to(half)
        y: Tensor = _ToOutput.apply(*given, self.stride, list(self.padding))
        return y
