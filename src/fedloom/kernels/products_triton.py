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
    a, b, y, M, O, K, span,  # noqa: E741
    a_n, a_m, a_k, b_n, b_k, b_o, y_s, y_n,
    PRECISION: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, o] = sum over a span of k of a[m, k] * b[k, o]. Spans are whole steps, so only the end of k is ragged."""
    client = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(O, BO)
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    o = (tl.program_id(0) % tiles) * BO + tl.arange(0, BO)
    first = tl.program_id(2) * span
    a_at = a + client * a_n + m * a_m
    b_at = b + client * b_n + o * b_o
    total = tl.zeros((BM, BO), dtype=tl.float32)
    for start in range(first, tl.minimum(first + span, K), BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a_at[:, None] + (k * a_k)[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b_at[None, :] + (k * b_k)[:, None], mask=(k < K)[:, None] & (o < O)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    to = y + tl.program_id(2).to(tl.int64) * y_s + client * y_n + (m * O)[:, None] + o[None, :]
    tl.store(to, total, mask=(m < M)[:, None] & (o < O)[None, :])


def product(a: Tensor, b: Tensor, precision: str, tiles: list[int]) -> Tensor:
    """a (n, m, k), b (n, k, o). Where a client gives too few programs, k is split; the parts are added up in order."""
    (n, m, k), o = a.shape, b.shape[2]
    bm, bo, bk, warps, stages = tiles
    programs, steps = triton.cdiv(m, bm) * triton.cdiv(o, bo), triton.cdiv(k, bk)
    span = triton.cdiv(steps, pieces(programs * n, steps)) * bk
    parts = triton.cdiv(k, span)
    y = torch.empty(parts, n, m, o, dtype=torch.float32, device=a.device)
    _product[(programs, n, parts)](
        a, b, y, m, o, k, span, *a.stride(), *b.stride(), y.stride(0), y.stride(1),
        precision, bm, bo, bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y[0] if parts == 1 else y.sum(0)


def pieces(programs: int, steps: int) -> int:
    """In how many to split the steps of programs, so that all are done soonest when PROGRAMS run at a time."""

    def time(count: int) -> int:
        return triton.cdiv(programs * count, PROGRAMS) * (triton.cdiv(steps, count) + SET_UP)

    return min(range(1, max(1, min(PIECES, steps // SET_UP)) + 1), key=time)
