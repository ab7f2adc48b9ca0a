"""Gathers the samples of a batch: a program copies a block of one sample; the first one also copies labels and mask."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["n"])
def _gather(
    table, at, x, y, xs, ys, mask, more, n, t_s, t_n, size, labels,
    S: tl.constexpr, MORE: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    client, j = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S
    here = table + tl.load(at) * t_s + client * t_n
    marked = tl.load(here + j)
    row, to = tl.where(marked < 0, ~marked, marked), client * S + j
    f = tl.program_id(1) * BX + tl.arange(0, BX)
    tl.store(xs + to * size + f, tl.load(x + row * size + f, mask=f < size), mask=f < size)
    if tl.program_id(1) == 0:
        for start in range(0, labels, BY):
            i = start + tl.arange(0, BY)
            tl.store(ys + to * labels + i, tl.load(y + row * labels + i, mask=i < labels), mask=i < labels)
        tl.store(mask + to, tl.where(marked < 0, 0.0, 1.0).to(mask.dtype.element_ty))
        if j == 0:
            m = tl.arange(0, BM)
            tl.store(more + m * n + client, tl.load(here + S + m, mask=m < MORE), mask=m < MORE)


def gather_batch(
    table: Tensor, at: Tensor, x: Tensor, y: Tensor, clients: int, shape: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fedloom.nn.kernels.batch_gather`."""
    x, y, samples = x.contiguous(), y.contiguous(), math.prod(shape)
    columns, size, labels = table.shape[2] - samples, math.prod(x.shape[1:]), math.prod(y.shape[1:])
    xs, ys = (torch.empty(clients, *shape, *v.shape[1:], dtype=v.dtype, device=v.device) for v in (x, y))
    mask = torch.empty(clients, *shape, dtype=dtype, device=x.device)
    more = torch.empty(columns, clients, dtype=table.dtype, device=x.device)
    wide, high = (min(BLOCK, triton.next_power_of_2(count)) for count in (size, labels))
    _gather[(clients * samples, triton.cdiv(size, wide))](
        table, at, x, y, xs, ys, mask, more, clients, *table.stride()[:2], size, labels,
        samples, columns, wide, high, triton.next_power_of_2(columns), num_warps=max(1, wide // 256),
    )  # fmt: skip
    return xs, ys, mask, more
