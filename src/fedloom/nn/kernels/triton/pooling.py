"""Max-pooling and its gradient: a program has a block of pixels, of one image or of several."""

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = list[int]
POOL, UNPOOL = (256, 8), (512, 4)  # pixels and warps of a program; neighbouring threads have neighbouring windows


@triton.jit(do_not_specialize=["planes"])
def _pool(
    x, y, places, planes, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, RELU: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[p, q] is the largest x[p * KH + r, q * KW + s], and places[p, q] is r * KW + s."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    to = start + tl.arange(0, BLOCK)
    there = to < planes.to(tl.int64) * (P * Q)
    at = (start % (P * Q)).to(tl.int32) + tl.arange(0, BLOCK)  # counted from the image in which the block begins
    plane, p, q = at // (P * Q), at // Q % P, at % Q
    corner = x + start // (P * Q) * (H * W) + (plane * (H * W) + p * (KH * W) + q * KW)
    kind = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    largest = tl.full((BLOCK,), float("-inf"), dtype=kind)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for r in tl.static_range(KH):
        for s in tl.static_range(KW):
            inside = there
            if P * KH > H or Q * KW > W:
                inside = inside & (p * KH + r < H) & (q * KW + s < W)
            value = tl.load(corner + (r * W + s), mask=inside, other=float("-inf")).to(kind)
            takes = (value > largest) | (value != value)  # the first of equal values, the last of NaNs, as torch does
            largest = tl.where(takes, value, largest)
            place = tl.where(takes, r * KW + s, place)
    if RELU:
        place = tl.where(largest <= 0, -1, place)
        largest = tl.where(largest <= 0, 0.0, largest)
    tl.store(y + to, largest, mask=there)
    if PLACES:
        tl.store(places + to, place, mask=there)


@triton.jit(do_not_specialize=["planes"])
def _unpool(
    g, places, y, planes, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[h, w] = g[p, q] if pixel (h, w) is the maximum of its window (p, q) according to `places`, else 0."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    to = start + tl.arange(0, BLOCK)
    there = to < planes.to(tl.int64) * (H * W)
    at = (start % (H * W)).to(tl.int32) + tl.arange(0, BLOCK)
    plane, h, w = at // (H * W), at // W % H, at % W
    p, q = h // KH, w // KW
    inside = there
    if P * KH < H or Q * KW < W:
        inside = inside & (p < P) & (q < Q)
    window = start // (H * W) * (P * Q) + (plane * (P * Q) + p * Q + q)
    mine = h * W + w if places.dtype.element_ty == tl.int64 else h % KH * KW + w % KW
    place = tl.load(places + window, mask=inside, other=-1)
    value = tl.load(g + window, mask=inside, other=0.0)
    tl.store(y + to, tl.where(place == mine, value, 0.0), mask=there)


def max_pool(x: Tensor, kernel: Pair, size: Pair, relu: bool, with_places: bool) -> tuple[Tensor, Tensor]:
    """See `fedloom.nn.kernels.pooling`."""
    x = x.contiguous()
    y = torch.empty(*x.shape[:-2], *size, dtype=x.dtype, device=x.device)
    places = torch.empty(y.shape if with_places else 0, dtype=torch.int8, device=x.device)
    block, warps = POOL
    _pool[(triton.cdiv(y.numel(), block),)](
        x, y, places, x.shape[:-2].numel(), *x.shape[-2:], *size, *kernel, relu, with_places, block, num_warps=warps
    )
    return y, places


def max_unpool(g: Tensor, places: Tensor, size: Pair, kernel: Pair) -> Tensor:
    """See `fedloom.nn.kernels.pooling`."""
    g, places = g.contiguous(), places.contiguous()
    y = torch.empty(*places.shape[:-2], *size, dtype=g.dtype, device=g.device)
    block, warps = UNPOOL
    _unpool[(triton.cdiv(y.numel(), block),)](
        g, places, y, y.shape[:-2].numel(), *size, *places.shape[-2:], *kernel, block, num_warps=warps
    )
    return y
