"""Kernels for convolutions of many clients, each with its own weights.

`correlate` and `weight_gradient` are implicit matrix products: a program computes a tile of one client's product, and
nothing is unfolded in memory. `unfold` and `fold` are the two copies around a product that a library computes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = list[int]
Tiles = tuple[int, int, int, int, int]  # two sides of a tile, depth of a step, warps, stages
PROGRAMS = 264  # two for each processor of an H100
BLOCK = 1024


@triton.jit
def _correlate(
    x, w, y, M, O, K, H, W, P, Q,  # noqa: E741
    x_n, x_b, x_c, x_h, x_w, w_n, w_0, w_o, w_c, w_r, w_s, y_n,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[b, o, p, q] = sum over (c, r, s) of x[b, c, p * stride + r - pad, q * stride + s - pad] * w[o, c, r, s]."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(O, BN)
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    o = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    q, p, b = m % Q, m // Q % P, m // (P * Q)
    top, left = p * STRIDE_H - PAD_H, q * STRIDE_W - PAD_W
    x_at = x + client * x_n + b * x_b + top * x_h + left * x_w
    w_at = w + client * w_n + w_0 + o * w_o
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        s, r, c = k % S, k // S % R, k // (R * S)
        there = (m < M)[:, None] & (k < K)[None, :]
        if PAD_H > 0 or PAD_W > 0:
            h, v = top[:, None] + r[None, :], left[:, None] + s[None, :]
            there = there & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        some = tl.load(x_at[:, None] + (c * x_c + r * x_h + s * x_w)[None, :], mask=there, other=0.0)
        weights = tl.load(
            w_at[None, :] + (c * w_c + r * w_r + s * w_s)[:, None], mask=(k < K)[:, None] & (o < O)[None, :], other=0.0
        )
        total = tl.dot(some, weights, total, input_precision=PRECISION)
    to = y + client * y_n + (b * (O * P * Q) + p * Q + q)[:, None] + (o * (P * Q))[None, :]
    tl.store(to, total, mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def _weight_gradient(
    x, g, y, M, O, K, H, W, P, Q, span,  # noqa: E741
    x_n, x_b, x_c, x_h, x_w, g_n, g_b, g_o, g_p, g_q, y_s, y_n,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, PRECISION: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """y[o, c, r, s] = sum over a span of (b, p, q) of g[b, o, p, q] * x[b, c, p * stride + r - pad, ...]."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(K, BK)
    o = (tl.program_id(0) // tiles) * BO + tl.arange(0, BO)
    k = (tl.program_id(0) % tiles) * BK + tl.arange(0, BK)
    s, r, c = k % S, k // S % R, k // (R * S)
    x_at = x + client * x_n + c * x_c + (r - PAD_H) * x_h + (s - PAD_W) * x_w
    g_at = g + client * g_n + o * g_o
    first = tl.program_id(2) * span
    last = tl.minimum(first + span, M)
    total = tl.zeros((BO, BK), dtype=tl.float32)
    for start in range(first, last, BM):
        m = start + tl.arange(0, BM)
        q, p, b = m % Q, m // Q % P, m // (P * Q)
        there = (m < last)[:, None] & (k < K)[None, :]
        if PAD_H > 0 or PAD_W > 0:
            h = (p * STRIDE_H - PAD_H)[:, None] + r[None, :]
            v = (q * STRIDE_W - PAD_W)[:, None] + s[None, :]
            there = there & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        some = tl.load(
            x_at[None, :] + (b * x_b + p * (STRIDE_H * x_h) + q * (STRIDE_W * x_w))[:, None], mask=there, other=0.0
        )
        slope = tl.load(
            g_at[:, None] + (b * g_b + p * g_p + q * g_q)[None, :],
            mask=(o < O)[:, None] & (m < last)[None, :],
            other=0.0,
        )
        total = tl.dot(slope, some, total, input_precision=PRECISION)
    to = y + tl.program_id(2).to(tl.int64) * y_s + client * y_n + (o * K)[:, None] + k[None, :]
    tl.store(to, total, mask=(o < O)[:, None] & (k < K)[None, :])


@triton.jit
def _unfold(
    x, y, M, K, H, W, P, Q, x_n, x_b, x_c, x_h, x_w,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """y[(c, r, s), (b, p, q)] = x[b, c, p * stride + r - pad, q * stride + s - pad]"""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(M, BM)
    k = (tl.program_id(0) // tiles) * BK + tl.arange(0, BK)
    m = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    s, r, c = k % S, k // S % R, k // (R * S)
    q, p, b = m % Q, m // Q % P, m // (P * Q)
    top, left = p * STRIDE_H - PAD_H, q * STRIDE_W - PAD_W
    inside = (k < K)[:, None] & (m < M)[None, :]
    there = inside
    if PAD_H > 0 or PAD_W > 0:
        h, v = top[None, :] + r[:, None], left[None, :] + s[:, None]
        there = there & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    at = (b * x_b + top * x_h + left * x_w)[None, :] + (c * x_c + r * x_h + s * x_w)[:, None]
    value = tl.load(x + client * x_n + at, mask=there, other=0.0)
    tl.store(y + client * K * M + k[:, None] * M + m[None, :], value, mask=inside)


@triton.jit
def _fold(
    y, x, size, C, H, W, P, Q, y_n, y_k, y_m,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x[b, c, h, v] = sum over (r, s) of y[c, r, s, b, (h + pad - r) / stride, (v + pad - s) / stride]"""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v, h, c, b = at % W, at // W % H, at // (H * W) % C, at // (C * H * W)
    base = y + client * y_n + b * (P * Q * y_m)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            high, wide = h + PAD_H - r, v + PAD_W - s
            p, q = high // STRIDE_H, wide // STRIDE_W
            there = (at < size) & (high >= 0) & (wide >= 0) & (p < P) & (q < Q)
            if STRIDE_H > 1:
                there = there & (high % STRIDE_H == 0)
            if STRIDE_W > 1:
                there = there & (wide % STRIDE_W == 0)
            total += tl.load(base + ((c * R + r) * S + s) * y_k + (p * Q + q) * y_m, mask=there, other=0.0)
    tl.store(x + client * size + at, total, mask=at < size)


def correlate(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, transposed: bool, precision: str, tiles: Tiles
) -> Tensor:
    """x (n, b, c, h, w), w (n, o, c, r, s). `transposed` sums over o instead of c, with the kernel turned round."""
    n, batch, _, height, width = x.shape
    (_, out, inner, rows, columns), (w_n, w_o, w_c, w_r, w_s), w_0 = w.shape, w.stride(), 0
    if transposed:
        out, inner, w_o, w_c, w_0 = inner, out, w_c, w_o, (rows - 1) * w_r + (columns - 1) * w_s
        w_r, w_s = -w_r, -w_s
    high = (height + 2 * padding[0] - rows) // stride[0] + 1
    wide = (width + 2 * padding[1] - columns) // stride[1] + 1
    y = x.new_empty(n, batch, out, high, wide)
    m, k = batch * high * wide, inner * rows * columns
    bm, bn, bk, warps, stages = tiles
    _correlate[(triton.cdiv(m, bm) * triton.cdiv(out, bn), n)](
        x, w, y, m, out, k, height, width, high, wide, *x.stride(), w_n, w_0, w_o, w_c, w_r, w_s, y.stride(0),
        rows, columns, *stride, *padding, precision, bm, bn, bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def weight_gradient(
    x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair, precision: str, tiles: Tiles
) -> Tensor:
    """The gradient to weights (n, o, c, *kernel) from x (n, b, c, h, w) and g (n, b, o, p, q)."""
    n, batch, inner, height, width = x.shape
    out, high, wide = g.shape[2:]
    m, k = batch * high * wide, inner * kernel[0] * kernel[1]
    bo, bk, bm, warps, stages = tiles
    programs = triton.cdiv(out, bo) * triton.cdiv(k, bk)
    pieces = max(1, min(PROGRAMS // (programs * n), m // (4 * bm)))
    span = triton.cdiv(triton.cdiv(m, pieces), bm) * bm
    pieces = triton.cdiv(m, span)
    y = torch.empty(pieces, n, out, inner, *kernel, dtype=torch.float32, device=x.device)
    _weight_gradient[(programs, n, pieces)](
        x, g, y, m, out, k, height, width, high, wide, span, *x.stride(), *g.stride(), y.stride(0), y.stride(1),
        *kernel, *stride, *padding, precision, bo, bk, bm, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return (y[0] if pieces == 1 else y.sum(0)).to(x.dtype)


def unfold(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Patches of x (n, b, c, h, w) as columns: (n, c * r * s, b * p * q)."""
    n, batch, inner, height, width = x.shape
    high = (height + 2 * padding[0] - kernel[0]) // stride[0] + 1
    wide = (width + 2 * padding[1] - kernel[1]) // stride[1] + 1
    y = x.new_empty(n, inner * kernel[0] * kernel[1], batch * high * wide)
    k, m = y.shape[1:]
    _unfold[(triton.cdiv(k, 16) * triton.cdiv(m, 128), n)](
        x, y, m, k, height, width, high, wide, *x.stride(), *kernel, *stride, *padding, 16, 128
    )
    return y


def fold(y: Tensor, shape: list[int], kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The sum of columns (n, c * r * s, b * p * q) at the places of an image (b, c, h, w) where they come from."""
    _, inner, height, width = shape
    high = (height + 2 * padding[0] - kernel[0]) // stride[0] + 1
    wide = (width + 2 * padding[1] - kernel[1]) // stride[1] + 1
    x = y.new_empty(len(y), *shape)
    size = x[0].numel()
    _fold[(triton.cdiv(size, BLOCK), len(y))](
        y, x, size, inner, height, width, high, wide, *y.stride(), *kernel, *stride, *padding, BLOCK
    )
    return x
