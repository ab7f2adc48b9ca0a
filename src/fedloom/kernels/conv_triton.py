"""Kernels for convolutions of many clients, each with its own weights.

Tensor cores multiply halves (bfloat16), so a number goes through them in pieces: three halves hold all 24 bits of a
float32, two hold 16, one holds 8. `pieces` and `patches` write them with the channels of a pixel side by side, and
`correlate` and `weight_gradient` are implicit matrix products of such pieces: a program computes a tile of one client's
product, and nothing is unfolded in memory.

With three pieces the result is as exact as that of float32 arithmetic: of the nine products the three smallest are left
out, and the largest is added up in registers, because tensor cores cut off what they add instead of rounding it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.kernels.convolution import sides, wide

Pair = list[int]
Tiles = tuple[int, int, int, int, int]  # two sides of a tile, depth of a step, warps, stages
HALF, FULL = torch.bfloat16, torch.float32
PROGRAMS = 264  # two for each processor of an H100
BLOCK = 64


@triton.jit
def _store(to, to_p, number, there, PIECES: tl.constexpr):
    """The pieces of a number: each rounds what those before it left."""
    for piece in tl.static_range(PIECES):
        some = number.to(to.dtype.element_ty)
        tl.store(to + piece * to_p, some, mask=there)
        number = number - some.to(tl.float32)


@triton.jit
def _multiply(total, small, a, b, in_a, in_b, a_p, b_p, PIECES: tl.constexpr):
    """The sums of the largest products and of the others, with those of what lies at a and b in pieces."""
    a0, b0 = tl.load(a, mask=in_a, other=0.0), tl.load(b, mask=in_b, other=0.0)
    if PIECES == 1:
        total = tl.dot(a0, b0, total)
    else:
        a1, b1 = tl.load(a + a_p, mask=in_a, other=0.0), tl.load(b + b_p, mask=in_b, other=0.0)
        if PIECES == 3:
            a2, b2 = tl.load(a + 2 * a_p, mask=in_a, other=0.0), tl.load(b + 2 * b_p, mask=in_b, other=0.0)
            small = tl.dot(a2, b0, small)
            small = tl.dot(a1, b1, small)
            small = tl.dot(a0, b2, small)
        small = tl.dot(a1, b0, small)
        small = tl.dot(a0, b1, small)
        if PIECES == 3:
            total += tl.dot(a0, b0, max_num_imprecise_acc=a0.shape[1])  # which keeps the sum out of the tensor core
        else:
            total = tl.dot(a0, b0, total)
    return total, small


@triton.jit
def _pieces(
    x, y, rows, C, H, W, x_n, x_a, x_c, x_h, x_w, y_n, y_p,
    WIDE: tl.constexpr, PIECES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y[piece, a, h, w, c] of x[a, c, h, w]; channels beyond C are zeros."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(WIDE, BC)
    row = (tl.program_id(0) // tiles) * BR + tl.arange(0, BR)
    c = (tl.program_id(0) % tiles) * BC + tl.arange(0, BC)
    w, h, a = row % W, row // W % H, row // (H * W)
    at = (a * x_a + h * x_h + w * x_w)[:, None] + (c * x_c)[None, :]
    number = tl.load(x + client * x_n + at, mask=(row < rows)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
    to = y + client * y_n + row[:, None] * WIDE + c[None, :]
    _store(to, y_p, number, (row < rows)[:, None] & (c < WIDE)[None, :], PIECES)


@triton.jit
def _patches(
    x, y, M, K, H, W, P, Q, x_n, x_b, x_c, x_h, x_w, y_n, y_p,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[piece, b, p, q, (c, r, s)] of x[b, c, p * stride + r - pad, q * stride + s - pad]; zeros beyond K."""
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
    _store(to, y_p, number, (m < M)[:, None] & (k < WIDE)[None, :], PIECES)


@triton.jit
def _correlate(
    x, w, bias, y, M, O, H, W, P, Q, x_n, x_p, w_n, w_p,  # noqa: E741
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, TURNED: tl.constexpr, BIAS: tl.constexpr,
    PIECES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[b, o, p, q] = bias[o] + sum over (r, s, c) of x[b, p * stride + r - pad, ..., c] * w[o, r, s, c]."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(O, BN)
    start = (tl.program_id(0) // tiles) * BM
    m = start + tl.arange(0, BM)
    o = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    low, high = 0, R
    if PAD_H > 1:  # the same rows of all images, of whose padding much is seen in one go and left out
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
        ws = w_at + ((R * S - 1 - tap if TURNED else tap) * C + c)
        total, small = _multiply(total, small, xs, ws, inside[:, None], (o < O)[None, :], x_p, w_p, PIECES)
    total += small
    if BIAS:
        total += tl.load(bias + client * O + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    to = y + client * (M * O) + (b * (O * P * Q) + p * Q + q)[:, None] + (o * (P * Q))[None, :]
    tl.store(to, total, mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def _weight_gradient(
    x, g, y, M, O, K, H, W, P, Q, span, x_n, x_p, g_n, g_p, y_s, y_n,  # noqa: E741
    C: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, PIECES: tl.constexpr,
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
        total, small = _multiply(total, small, gs, xs, known, there, g_p, x_p, PIECES)
    to = y + tl.program_id(2).to(tl.int64) * y_s + client * y_n + (o * K)[:, None] + k[None, :]
    tl.store(to, total + small, mask=(o < O)[:, None] & (k < K)[None, :])


def pieces(x: Tensor, count: int) -> Tensor:
    """x (n, a, c, h, w) as (n, count, a, h, w, channels)."""
    n, a, c, h, w = x.shape
    y = torch.empty(n, count, a, h, w, wide(c), dtype=HALF, device=x.device)
    rows, block = a * h * w, math.gcd(32, wide(c))
    _pieces[(triton.cdiv(rows, BLOCK) * (wide(c) // block), n)](
        x, y, rows, c, h, w, *x.stride(), y.stride(0), y.stride(1), wide(c), count, BLOCK, block
    )
    return y


def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, count: int) -> Tensor:
    """What the kernel sees at each place of x (n, b, c, h, w), as channels of (n, count, b, p, q, channels)."""
    n, b, c, h, w = x.shape
    high, broad = sides([h, w], kernel, stride, padding)
    m, k = b * high * broad, c * kernel[0] * kernel[1]
    y = torch.empty(n, count, b, high, broad, wide(k), dtype=HALF, device=x.device)
    _patches[(triton.cdiv(m, BLOCK), n)](
        x, y, m, k, h, w, high, broad, *x.stride(), y.stride(0), y.stride(1),
        *kernel, *stride, *padding, wide(k), count, BLOCK, triton.next_power_of_2(wide(k)),
    )  # fmt: skip
    return y


def correlate(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, turned: bool, tiles: Tiles
) -> Tensor:
    """Pieces of x (n, b, h, w, c) and of w (n, o, r, s, c), and bias (n, o), give (n, b, o, p, q); `turned` turns the
    kernel round."""
    n, count, b, high, broad, c = x.shape
    _, _, out, r, s, _ = w.shape
    p, q = sides([high, broad], [r, s], stride, padding)
    y = torch.empty(n, b, out, p, q, dtype=FULL if count > 1 else HALF, device=x.device)
    bm, bn, bk, warps, stages = tiles
    _correlate[(triton.cdiv(b * p * q, bm) * triton.cdiv(out, bn), n)](
        x, w, y if bias is None else bias.contiguous(), y, b * p * q, out, high, broad, p, q,
        x.stride(0), x.stride(1), w.stride(0), w.stride(1),
        c, r, s, *stride, *padding, turned, bias is not None, count, bm, bn, math.gcd(bk, c),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def weight_gradient(
    x: Tensor, g: Tensor, shape: list[int], kernel: Pair, stride: Pair, padding: Pair, tiles: Tiles
) -> Tensor:
    """Pieces of x (n, b, h, w, c) and of g (n, b, p, q, o) give (n, *shape, *kernel), where shape is (o, c)."""
    n, count, b, high, broad, c = x.shape
    p, q, many = g.shape[3:]
    out, inner = shape
    m, k = b * p * q, c * kernel[0] * kernel[1]
    bo, bk, bm, warps, stages = tiles
    programs = triton.cdiv(out, bo) * triton.cdiv(k, bk)
    spans = max(1, min(PROGRAMS // (programs * n), m // (4 * bm)))
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
