"""Writes many tensors at once: every program has a block of one of them."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["n"])
def _update(w, g, alphas, count, n, SIZES: tl.constexpr, ROWS: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr):
    """SIZES and ROWS are those of one client: ROWS rows of g are summed; 0 means that g has the shape of w."""
    program = tl.program_id(0)
    first = 0
    for i in tl.static_range(len(SIZES)):
        blocks = tl.cdiv(n * SIZES[i], BLOCK)
        if (program >= first) & (program < first + blocks):
            j = (program - first) * BLOCK + tl.arange(0, BLOCK)
            there = j < n * SIZES[i]
            if ROWS[i] == 0:
                new = tl.load(g[i] + j, mask=there)
            else:
                new = tl.zeros((BLOCK,), dtype=tl.float32)
                at = g[i] + (j // SIZES[i]) * (ROWS[i] * SIZES[i]) + j % SIZES[i]
                for row in range(ROWS[i]):
                    new += tl.load(at + row * SIZES[i], mask=there)
            if not COPY[i]:
                new = tl.load(w[i] + j, mask=there) - alphas[i] * new
            tl.store(w[i] + j, new, mask=there)
        first += blocks
    if program == 0:
        tl.store(count, tl.load(count) + 1)


def fused_update(w: list[Tensor], g: list[Tensor], alphas: list[float], copies: list[bool], count: Tensor) -> None:
    """See `fedloom.nn.kernels.fused_update`; all tensors are contiguous and have the clients as first axis."""
    n = len(w[0])
    sizes = tuple(mine.numel() // n for mine in w)
    rows = tuple(new.shape[1] if new.dim() > mine.dim() else 0 for mine, new in zip(w, g, strict=True))
    programs = sum(triton.cdiv(n * size, BLOCK) for size in sizes)
    _update[(programs,)](tuple(w), tuple(g), tuple(alphas), count, n, sizes, rows, tuple(copies), BLOCK)
