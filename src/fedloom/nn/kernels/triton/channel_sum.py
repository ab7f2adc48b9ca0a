"""Sums over samples and pixels: a program has one channel of one client."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 512, 4


@triton.jit
def _sums(
    g, places, y, C: tl.constexpr, SAMPLES: tl.constexpr, PIXELS: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y[n, c] = sum over (b, pixels) of g[n, b, c], where places are not negative."""
    client, c = tl.program_id(0).to(tl.int64) // C, tl.program_id(0) % C
    start = client * (SAMPLES * C * PIXELS) + c * PIXELS
    total = tl.zeros((BLOCK,), dtype=tl.float64 if g.dtype.element_ty == tl.float64 else tl.float32)
    for first in range(0, SAMPLES * PIXELS, BLOCK):
        i = first + tl.arange(0, BLOCK)
        at, there = start + (i // PIXELS * (C * PIXELS) + i % PIXELS), i < SAMPLES * PIXELS
        value = tl.load(g + at, mask=there, other=0.0).to(total.dtype)
        if PLACES:
            value = tl.where(tl.load(places + at, mask=there, other=-1) >= 0, value, 0.0)
        total += value
    tl.store(y + tl.program_id(0), tl.sum(total))


def channel_sums(g: Tensor, places: Tensor | None) -> Tensor:
    """See `fedloom.nn.kernels.channel_sum`; both tensors are contiguous."""
    n, b, c, *size = g.shape
    y = torch.empty(n, c, dtype=g.dtype, device=g.device)
    _sums[(n * c,)](
        g, g if places is None else places, y, c, b, size[0] * size[1], places is not None, BLOCK, num_warps=WARPS
    )
    return y
