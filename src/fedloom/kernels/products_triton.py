"""Kernels for products of many clients' matrices, one of whose sides is short: the memory of one factor, or of the
result, bounds them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264  # two for each processor of an H100
SET_UP = 4  # what a program takes before its first and after its last step, in steps
PIECES = 16


@triton.jit
def _product(
    a, b, y, M, O, K, span, alpha,  # noqa: E741
    a_n, a_m, a_k, b_n, b_k, b_o, y_s, y_n,
    UPDATE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, o] = sum over a span of k of a[m, k] * b[k, o]; UPDATE takes alpha times that from y. Spans are whole steps,
    so only the end of k is ragged."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(O, BO)
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    o = (tl.program_id(0) % tiles) * BO + tl.arange(0, BO)
    first = tl.program_id(2) * span
    a_at = a + client * a_n + m * a_m
    b_at = b + client * b_n + o * b_o
    y_at = y + tl.program_id(2).to(tl.int64) * y_s + client * y_n + (m * O)[:, None] + o[None, :]
    there = (m < M)[:, None] & (o < O)[None, :]
    if UPDATE:
        before = tl.load(y_at, mask=there, other=0.0)
    total = tl.zeros((BM, BO), dtype=tl.float32)
    for start in range(first, tl.minimum(first + span, K), BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a_at[:, None] + (k * a_k)[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b_at[None, :] + (k * b_k)[:, None], mask=(k < K)[:, None] & (o < O)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if UPDATE:
        total = before - alpha * total
    tl.store(y_at, total, mask=there)


def product(a: Tensor, b: Tensor, precision: str, tiles: list[int]) -> Tensor:
    """a (n, m, k), b (n, k, o). Where a client gives too few programs, k is split; the parts are added up in order."""
    (n, m, k), o = a.shape, b.shape[2]
    bm, bo, bk, *_ = tiles
    programs, steps = triton.cdiv(m, bm) * triton.cdiv(o, bo), triton.cdiv(k, bk)
    span = triton.cdiv(steps, pieces(programs * n, steps)) * bk
    y = torch.empty(triton.cdiv(k, span), n, m, o, dtype=torch.float32, device=a.device)
    _launch(a, b, y, span, None, precision, tiles)
    return y[0] if len(y) == 1 else y.sum(0)


def subtract(w: Tensor, a: Tensor, b: Tensor, alpha: float, precision: str, tiles: list[int]) -> None:
    """w (n, m, o), contiguous, -= alpha * a @ b"""
    _launch(a, b, w[None], triton.cdiv(a.shape[2], tiles[2]) * tiles[2], alpha, precision, tiles)


def _launch(a: Tensor, b: Tensor, y: Tensor, span: int, alpha: float | None, precision: str, tiles: list[int]) -> None:
    parts, n, m, o = y.shape
    bm, bo, bk, warps, stages = tiles
    _product[(triton.cdiv(m, bm) * triton.cdiv(o, bo), n, parts)](
        a, b, y, m, o, a.shape[2], span, alpha or 0.0, *a.stride(), *b.stride(), y.stride(0), y.stride(1),
        alpha is not None, precision, bm, bo, bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def pieces(programs: int, steps: int) -> int:
    """In how many to split the steps of programs, so that all are done soonest when PROGRAMS run at a time."""

    def time(count: int) -> int:
        return triton.cdiv(programs * count, PROGRAMS) * (triton.cdiv(steps, count) + SET_UP)

    return min(range(1, max(1, min(PIECES, steps // SET_UP)) + 1), key=time)
