"""Cross-entropy: a program has a block of rows of one client's logits, with all classes in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits


@triton.jit
def _weight(y, mask, r, ROWS: tl.constexpr, T: tl.constexpr):
    """Labels of a client and their weights: the mask of the sample, 0 for an unknown label."""
    label = tl.load(y + r, mask=r < ROWS, other=-1)
    weight = tl.load(mask + r // T, mask=r < ROWS, other=0.0)
    return label, tl.where(label >= 0, weight, 0.0)


@triton.jit
def _cross_entropy(
    logits, y, mask, g, out, z_n, z_b, z_t, y_n, m_n, g_n, GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ALL: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """weight / total * (log(sum exp z) - z[label]), or its gradient: g * weight / total * (softmax z - one at the
    label). Row r is position r % T of sample r // T."""
    blocks: tl.constexpr = (ROWS + BR - 1) // BR
    client = (tl.program_id(0) // blocks).to(tl.int64)
    y, mask = y + client * y_n, mask + client * m_n
    count = tl.zeros((ALL,), dtype=tl.float32)
    for start in range(0, ROWS, ALL):
        count += _weight(y, mask, start + tl.arange(0, ALL), ROWS, T)[1]
    r, c = (tl.program_id(0) % blocks) * BR + tl.arange(0, BR), tl.arange(0, BC)
    label, weight = _weight(y, mask, r, ROWS, T)
    weight = weight / tl.sum(count, 0)
    there = (r < ROWS)[:, None] & (c < C)[None, :]
    at = logits + client * z_n + (r // T) * z_b + (r % T) * z_t
    z = tl.where((c < C)[None, :], tl.load(at[:, None] + c[None, :], mask=there, other=0.0), float("-inf"))
    z = z - tl.max(z, 1)[:, None]
    e = tl.exp(z)
    total = tl.sum(e, 1)
    hit = c[None, :] == label[:, None]
    if GRADIENT:
        found = (weight * tl.load(g + client * g_n))[:, None] * (e / total[:, None] - tl.where(hit, 1.0, 0.0))
        tl.store(out + client * (ROWS * C) + (r * C)[:, None] + c[None, :], found, mask=there)
    else:
        found = weight * (tl.log(total) - tl.sum(tl.where(hit, z, 0.0), 1))
        tl.store(out + client * ROWS + r, found, mask=r < ROWS)


def terms(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """See `cross_entropy_terms`: logits (n, b, t, c), y (n, b, t), mask (n, b)."""
    out = torch.empty(y.shape, dtype=logits.dtype, device=logits.device)
    return _launch(logits, y, mask, None, out)


def gradient(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """See `cross_entropy_gradient`."""
    return _launch(logits, y, mask, g, torch.empty(logits.shape, dtype=logits.dtype, device=logits.device))


def _launch(logits: Tensor, y: Tensor, mask: Tensor, g: Tensor | None, out: Tensor) -> Tensor:
    n, b, t, c = logits.shape
    logits, mask = (v if v.stride(-1) == 1 else v.contiguous() for v in (logits, mask))
    y = y if y[0].is_contiguous() else y.contiguous()
    rows, width = b * t, triton.next_power_of_2(c)
    deep = triton.next_power_of_2(rows)
    high = max(1, min(deep, BLOCK // width))
    warps = max(1, min(8, high * width // 256))
    _cross_entropy[(n * triton.cdiv(rows, high),)](
        logits, y, mask, logits if g is None else g, out, *logits.stride()[:3], y.stride(0), mask.stride(0),
        0 if g is None else g.stride(0), g is not None, rows, t, c, min(deep, 1024), high, width, num_warps=warps,
    )  # fmt: skip
    return out
