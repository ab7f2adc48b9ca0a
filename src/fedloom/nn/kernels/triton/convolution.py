"""Convolutions with weights per client.

Tensor cores multiply bfloat16, so a float32 is split into a sum of bfloat16: three hold all its 24 bits, two hold 16,
one holds 8. `bf16_splits` and `im2col_splits` write them in channels-last order, and `correlate` and `weight_gradient`
are implicit matrix products of such splits: a program computes a tile of one client's product, and nothing is unfolded
in memory.

With three splits the result is as exact as float32 arithmetic: of the nine products the three smallest are left out,
and the largest is summed in registers, because tensor cores truncate their sums instead of rounding them.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.nn.kernels.convolution import output_size, padded_channels
from fedloom.nn.kernels.gpu import gpu_properties

Pair = list[int]
Tiles = tuple[int, int, int, int, int]  # two sides of a tile, depth of a step, warps, stages
HALF, FULL = torch.bfloat16, torch.float32
PROGRAMS_PER_SM = 2
BLOCK = 64


@triton.jit
def _store(to, to_p, number, there, SPLITS: tl.constexpr):
    """Store the splits of a number: each is the rounded remainder of those before it."""
    for split in tl.static_range(SPLITS):
        some = number.to(to.dtype.element_ty)
        tl.store(to + split * to_p, some, mask=there)
        number = number - some.to(tl.float32)


@triton.jit
def _multiply(total, small, a, b, in_a, in_b, a_p, b_p, SPLITS: tl.constexpr):
    """Add the products of the splits at a and b: the largest ones to `total`, the others to `small`."""
    a0, b0 = tl.load(a, mask=in_a, other=0.0), tl.load(b, mask=in_b, other=0.0)
    if SPLITS == 1:
        total = tl.dot(a0, b0, total)
    else:
        a1, b1 = tl.load(a + a_p, mask=in_a, other=0.0), tl.load(b + b_p, mask=in_b, other=0.0)
        if SPLITS == 3:
            a2, b2 = tl.load(a + 2 * a_p, mask=in_a, other=0.0), tl.load(b + 2 * b_p, mask=in_b, other=0.0)
            small = tl.dot(a2, b0, small)
            small = tl.dot(a1, b1, small)
            small = tl.dot(a0, b2, small)
        small = tl.dot(a1, b0, small)
        small = tl.dot(a0, b1, small)
        if SPLITS == 3:
            total += tl.dot(a0, b0, max_num_imprecise_acc=a0.shape[1])  # the sum stays outside the tensor core
        else:
            total = tl.dot(a0, b0, total)
    return total, small


@triton.jit
def _bf16_splits(
    x, y, rows, C, H, W, x_n, x_a, x_c, x_h, x_w, y_n, y_p,
    WIDE: tl.constexpr, SPLITS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y[split, a, h, w, c] of x[a, c, h, w]; channels beyond C are zeros."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(WIDE, BC)
    row = (tl.program_id(0) // tiles) * BR + tl.arange(0, BR)
    c = (tl.program_id(0) % tiles) * BC + tl.arange(0, BC)
    w, h, a = row % W, row // W % H, row // (H * W)
    at = (a * x_a + h * x_h + w * x_w)[:, None] + (c * x_c)[None, :]
    number = tl.load(x + client * x_n + at, mask=(row < rows)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
    to = y + client * y_n + row[:, None] * WIDE + c[None, :]
    _store(to, y_p, number, (row < rows)[:, None] & (c < WIDE)[None, :], SPLITS)


@triton.jit
def _im2col_splits(
    x, y, M, K, H, W, P, Q, x_n, x_b, x_c, x_h, x_w, y_n, y_p,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[split, b, p, q, (c, r, s)] of x[b, c, p * stride + r - pad, q * stride + s - pad]; zeros beyond K."""
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    s, r, c = k % S, k // S % R, k // (R * S)
    q, p, b = m % Q, m // Q % P, m // (P * Q)
    top, left = p * STRIDE_H - PAD_H, q * STRIDE_W - PAD_W
    there = (m < M)[:, None] & (k < K)[None, :]
    if PAD_H > 0 or PAD_W > 0:
        h, v = top[:, None] + r[None, :], left[:, None] + s[None, :]
        there = there & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    at = (b * x_b + top * x_h + left * x_w)[:, None] + (c * x_c + r * x_h + s * x_w)[None, :]
    number = tl.load(x + client * x_n + at, mask=there, other=0.0).to(tl.float32)
    to = y + client * y_n + m[:, None] * WIDE + k[None, :]
    _store(to, y_p, number, (m < M)[:, None] & (k < WIDE)[None, :], SPLITS)


@triton.jit
def _correlate(
    x, w, bias, y, M, O, H, W, P, Q, x_n, x_p, w_n, w_p,  # noqa: E741
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[b, o, p, q] = bias[o] + sum over (r, s, c) of x[b, p * stride + r - pad, ..., c] * w[o, r, s, c]."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(O, BN)
    start = (tl.program_id(0) // tiles) * BM
    m = start + tl.arange(0, BM)
    o = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    low, high = 0, R
    if PAD_H > 1:  # a tile has the same rows of all images, so that taps in the padding can be skipped
        many = M // P
        q, p, b = m % Q, m // many, m // Q % (many // Q)
        low = tl.maximum(0, PAD_H - (tl.minimum(start + BM, M) - 1) // many * STRIDE_H)
        high = tl.minimum(R, H + PAD_H - start // many * STRIDE_H)
    else:
        q, p, b = m % Q, m // Q % P, m // (P * Q)
    top, left = p * STRIDE_H - PAD_H, q * STRIDE_W - PAD_W
    k = tl.arange(0, BK)
    x_at = x + client * x_n + (((b * H + top) * W + left) * C)[:, None] + k[None, :]
    w_at = w + client * w_n + (o * (R * S * C))[None, :] + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    small = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(low * S * (C // BK), high * S * (C // BK)):
        tap, c = step // (C // BK), step % (C // BK) * BK
        r, s = tap // S, tap % S
        inside = m < M
        if PAD_H > 0 or PAD_W > 0:
            inside = inside & (top + r >= 0) & (top + r < H) & (left + s >= 0) & (left + s < W)
        xs = x_at + ((r * W + s) * C + c)
        ws = w_at + ((R * S - 1 - tap if FLIP else tap) * C + c)
        total, small = _multiply(total, small, xs, ws, inside[:, None], (o < O)[None, :], x_p, w_p, SPLITS)
    total += small
    if BIAS:
        total += tl.load(bias + client * O + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    to = y + client * (M * O) + (b * (O * P * Q) + p * Q + q)[:, None] + (o * (P * Q))[None, :]
    tl.store(to, total, mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def _weight_gradient(
    x, g, y, M, O, K, H, W, P, Q, span, x_n, x_p, g_n, g_p, y_s, y_n,  # noqa: E741
    C: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, SPLITS: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """y[o, r, s, c] = sum over a span of (b, p, q) of g[b, p, q, o] * x[b, p * stride + r - pad, ..., c]."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(K, BK)
    o = (tl.program_id(0) // tiles) * BO + tl.arange(0, BO)
    k = (tl.program_id(0) % tiles) * BK + tl.arange(0, BK)
    c, tap = k % C, k // C
    r, s = tap // S, tap % S
    x_at = x + client * x_n + ((r - PAD_H) * W + (s - PAD_W)) * C + c
    g_at = g + client * g_n + o
    first = tl.program_id(2) * span
    last = tl.minimum(first + span, M)
    total = tl.zeros((BO, BK), dtype=tl.float32)
    small = tl.zeros((BO, BK), dtype=tl.float32)
    for start in range(first, last, BM):
        m = start + tl.arange(0, BM)
        q, p, b = m % Q, m // Q % P, m // (P * Q)
        there = (m < last)[:, None] & (k < K)[None, :]
        if PAD_H > 0 or PAD_W > 0:
            h = (p * STRIDE_H - PAD_H)[:, None] + r[None, :]
            v = (q * STRIDE_W - PAD_W)[:, None] + s[None, :]
            there = there & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        known = (o < WIDE)[:, None] & (m < last)[None, :]
        xs = x_at[None, :] + (((b * H + p * STRIDE_H) * W + q * STRIDE_W) * C)[:, None]
        gs = g_at[:, None] + (m * WIDE)[None, :]
        total, small = _multiply(total, small, gs, xs, known, there, g_p, x_p, SPLITS)
    to = y + tl.program_id(2).to(tl.int64) * y_s + client * y_n + (o * K)[:, None] + k[None, :]
    tl.store(to, total + small, mask=(o < O)[:, None] & (k < K)[None, :])


def bf16_splits(x: Tensor, count: int) -> Tensor:
    """See `fedloom.nn.kernels.convolution`."""
    n, a, c, h, w = x.shape
    y = torch.empty(n, count, a, h, w, padded_channels(c), dtype=HALF, device=x.device)
    rows, block = a * h * w, math.gcd(32, padded_channels(c))
    _bf16_splits[(triton.cdiv(rows, BLOCK) * (padded_channels(c) // block), n)](
        x, y, rows, c, h, w, *x.stride(), y.stride(0), y.stride(1), padded_channels(c), count, BLOCK, block
    )
    return y


def im2col_splits(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, count: int) -> Tensor:
    """See `fedloom.nn.kernels.convolution`."""
    n, b, c, h, w = x.shape
    high, broad = output_size([h, w], kernel, stride, padding)
    m, k = b * high * broad, c * kernel[0] * kernel[1]
    y = torch.empty(n, count, b, high, broad, padded_channels(k), dtype=HALF, device=x.device)
    _im2col_splits[(triton.cdiv(m, BLOCK), n)](
        x, y, m, k, h, w, high, broad, *x.stride(), y.stride(0), y.stride(1),
        *kernel, *stride, *padding, padded_channels(k), count, BLOCK, triton.next_power_of_2(padded_channels(k)),
    )  # fmt: skip
    return y


def correlate(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, flip: bool, tiles: Tiles
) -> Tensor:
    """See `fedloom.nn.kernels.convolution`: splits of x (n, b, h, w, c) and of w (n, o, r, s, c), bias (n, o)."""
    n, count, b, high, broad, c = x.shape
    _, _, out, r, s, _ = w.shape
    p, q = output_size([high, broad], [r, s], stride, padding)
    y = torch.empty(n, b, out, p, q, dtype=FULL if count > 1 else HALF, device=x.device)
    bm, bn, bk, warps, stages = tiles
    _correlate[(triton.cdiv(b * p * q, bm) * triton.cdiv(out, bn), n)](
        x, w, y if bias is None else bias.contiguous(), y, b * p * q, out, high, broad, p, q,
        x.stride(0), x.stride(1), w.stride(0), w.stride(1),
        c, r, s, *stride, *padding, flip, bias is not None, count, bm, bn, math.gcd(bk, c),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def weight_gradient(
    x: Tensor, g: Tensor, shape: list[int], kernel: Pair, stride: Pair, padding: Pair, tiles: Tiles
) -> Tensor:
    """See `fedloom.nn.kernels.convolution`: splits of x (n, b, h, w, c) and of g (n, b, p, q, o)."""
    n, count, b, high, broad, c = x.shape
    p, q, many = g.shape[3:]
    out, inner = shape
    m, k = b * p * q, c * kernel[0] * kernel[1]
    bo, bk, bm, warps, stages = tiles
    programs = triton.cdiv(out, bo) * triton.cdiv(k, bk)
    spans = max(1, min(PROGRAMS_PER_SM * gpu_properties(x.device).sms // (programs * n), m // (4 * bm)))
    span = triton.cdiv(triton.cdiv(m, spans), bm) * bm
    spans = triton.cdiv(m, span)
    y = torch.empty(spans, n, out, *kernel, c, dtype=FULL, device=x.device)
    _weight_gradient[(programs, n, spans)](
        x, g, y, m, out, k, high, broad, p, q, span, x.stride(0), x.stride(1), g.stride(0), g.stride(1),
        y.stride(0), y.stride(1), c, many, *kernel, *stride, *padding, count, bo, bk, bm,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    y = (y[0] if spans == 1 else y.sum(0))[..., :inner].permute(0, 1, 4, 2, 3)
    return y.to(FULL if count > 1 else HALF, memory_format=torch.contiguous_format, copy=True)
