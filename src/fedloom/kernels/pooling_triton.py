"""The kernel for gradients of max-pooling."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _unpool(
    g, places, y, blocks, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[h, w] = g[p, q] of the window (p, q) that it lies in, if its place is (h, w), else 0."""
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    p, q = at // W // KH, at % W // KW
    inside = (at < H * W) & (p < P) & (q < Q)
    window = plane * (P * Q) + p * Q + q
    place = tl.load(places + window, mask=inside, other=-1)
    value = tl.load(g + window, mask=inside, other=0.0)
    tl.store(y + plane * (H * W) + at, tl.where(place == at, value, 0.0), mask=at < H * W)


def unpool(g: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    y = torch.empty(*g.shape[:2], *size, dtype=g.dtype, device=g.device)
    pixels = size[0] * size[1]
    block = min(1024, triton.next_power_of_2(pixels))
    blocks = triton.cdiv(pixels, block)
    planes = g.shape[0] * g.shape[1]
    _unpool[(planes * blocks,)](
        g, places, y, blocks, *size, *g.shape[2:], *kernel, block, num_warps=max(1, block // 256)
    )
    return y
