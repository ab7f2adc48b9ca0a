"""Batched products: a program has a tile of one client's product, or of a part of its sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.nn.kernels.matmul import depth_per_program, precision


@triton.jit
def rounded(x):
    """Rounded to TF32, which has ten bits of fraction."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _product(
    a, b, y, span, alpha, M: tl.constexpr, O: tl.constexpr, K: tl.constexpr,  # noqa: E741
    A_N: tl.constexpr, A_M: tl.constexpr, A_K: tl.constexpr, B_N: tl.constexpr, B_K: tl.constexpr, B_O: tl.constexpr,
    UPDATE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, o] = sum over a span of k of a[m, k] * b[k, o]; UPDATE subtracts alpha times that from y. Spans are whole
    steps, so only the end of k is masked. Sizes and strides are constants, so that loads are vectorized.

    Exact products are of two TF32 numbers each, split by three instructions where `tl.dot` takes nine; what is left out
    is below the last bit of a float32. Tensor cores truncate their sums, so steps are summed outside. An infinite
    factor gives NaN."""
    client = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (O + BO - 1) // BO
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    o = (tl.program_id(0) % tiles) * BO + tl.arange(0, BO)
    first = tl.program_id(2) * span
    a_at = a + client * A_N + m * A_M
    b_at = b + client * B_N + o * B_O
    y_at = y + (tl.program_id(2) * tl.num_programs(1) + client) * (M * O) + (m * O)[:, None] + o[None, :]
    there = (m < M)[:, None] & (o < O)[None, :]
    if UPDATE and K <= BK:
        before = tl.load(y_at, mask=there, other=0.0)
    total = tl.zeros((BM, BO), dtype=tl.float32)
    for start in range(first, tl.minimum(first + span, K), BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a_at[:, None] + (k * A_K)[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b_at[None, :] + (k * B_K)[:, None], mask=(k < K)[:, None] & (o < O)[None, :], other=0.0)
        if PRECISION == "tf32x3":
            high_left, high_right = rounded(left), rounded(right)
            step = tl.dot(left - high_left, high_right, input_precision="tf32")
            step = tl.dot(high_left, right - high_right, step, input_precision="tf32")
            total += tl.dot(high_left, high_right, step, input_precision="tf32")
        else:
            total = tl.dot(left, right, total, input_precision=PRECISION)
    if UPDATE:
        if K > BK:  # loaded late, because it would take registers during the steps
            before = tl.load(y_at, mask=there, other=0.0)
        total = before - alpha * total
    tl.store(y_at, total, mask=there)


def batched_matmul(a: Tensor, b: Tensor, tiles: list[int]) -> Tensor:
    """See `fedloom.nn.kernels.matmul`. Where there are too few programs, k is split; the parts are added in order."""
    (n, m, k), o = a.shape, b.shape[2]
    span = depth_per_program(a, b, tiles)
    y = torch.empty(triton.cdiv(k, span), n, m, o, dtype=torch.float32, device=a.device)
    _launch(a, b, y, span, None, tiles)
    return y[0] if len(y) == 1 else y.sum(0)


def subtract_matmul(w: Tensor, a: Tensor, b: Tensor, alpha: float, tiles: list[int]) -> None:
    """See `fedloom.nn.kernels.matmul`; w (n, m, o) is contiguous."""
    _launch(a, b, w[None], triton.cdiv(a.shape[2], tiles[2]) * tiles[2], alpha, tiles)


def _launch(a: Tensor, b: Tensor, y: Tensor, span: int, alpha: float | None, tiles: list[int]) -> None:
    parts, n, m, o = y.shape
    bm, bo, bk, warps, stages = tiles
    _product[(triton.cdiv(m, bm) * triton.cdiv(o, bo), n, parts)](
        a, b, y, span, alpha or 0.0, m, o, a.shape[2], *a.stride(), *b.stride(),
        alpha is not None, precision(), bm, bo, bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
