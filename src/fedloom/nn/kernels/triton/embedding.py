"""Word vectors: a program copies a block of a client's vectors, or sums their gradients by word."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4  # numbers of vectors that a program copies
HALF = tl.bfloat16
TILES = (128, 64, 64, 8, 3)  # words, columns and tokens of a step, warps, stages


@triton.jit
def _vectors(
    tables, ids, y, V: tl.constexpr, D: tl.constexpr, T: tl.constexpr, Q: tl.constexpr,
    I_N: tl.constexpr, I_P: tl.constexpr, I_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[t] = tables[ids[t]]. Neighbouring threads copy neighbouring numbers, of one vector or of several."""
    blocks: tl.constexpr = (T * D + BLOCK - 1) // BLOCK
    client = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    t, k, there = i // D, i % D, i < T * D
    word = tl.load(ids + client * I_N + (t // Q * I_P + t % Q * I_Q), mask=there, other=0).to(tl.int32)
    tl.store(y + client * (T * D) + i, tl.load(tables + client * (V * D) + (word * D + k), mask=there), mask=there)


@triton.jit
def _sums(
    g, ids, y, V: tl.constexpr, D: tl.constexpr, T: tl.constexpr, Q: tl.constexpr,
    G_N: tl.constexpr, G_P: tl.constexpr, G_Q: tl.constexpr, I_N: tl.constexpr, I_P: tl.constexpr, I_Q: tl.constexpr,
    PADDING: tl.constexpr, HALF: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """y[v] = sum of g[t] over ids[t] == v, as a product. Three bfloat16 hold all 24 bits of a number, and ones are
    exact; tensor cores truncate their sums, so the steps are summed outside. An infinite gradient gives NaN for all
    words."""
    client = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    k = tl.program_id(2) * BD + tl.arange(0, BD)
    total = tl.zeros((BV, BD), dtype=tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        word = tl.load(ids + client * I_N + (t // Q * I_P + t % Q * I_Q), mask=t < T, other=-1).to(tl.int32)
        at = g + client * G_N + ((t // Q * G_P + t % Q * G_Q)[:, None] + k[None, :])
        number = tl.load(at, mask=(t < T)[:, None] & (k < D)[None, :], other=0.0)
        ones = (v[:, None] == word[None, :]).to(HALF)
        high = number.to(HALF)
        number -= high.to(tl.float32)
        middle = number.to(HALF)
        low = (number - middle.to(tl.float32)).to(HALF)
        step = tl.dot(ones, middle, tl.dot(ones, low))
        total += tl.dot(ones, high, step)
    total = tl.where((v == PADDING)[:, None], 0.0, total)
    tl.store(y + client * (V * D) + (v * D)[:, None] + k[None, :], total, mask=(v < V)[:, None] & (k < D)[None, :])


def _two_token_axes(x: Tensor, rank: int) -> Tensor:
    """x with a client's tokens, which are on the axes 1 to `rank`, on two axes; a view where strides allow it."""
    tokens = x.shape[1:rank]
    return x.reshape(len(x), tokens[:-1].numel(), tokens[-1] if tokens else 1, *x.shape[rank:])


def word_vectors(tables: Tensor, ids: Tensor) -> Tensor:
    """See `fedloom.nn.kernels.embedding`."""
    tables = tables.contiguous()
    n, v, d = tables.shape
    y = torch.empty(*ids.shape, d, dtype=tables.dtype, device=tables.device)
    ids = _two_token_axes(ids, ids.dim())
    t = ids.shape[1] * ids.shape[2]
    _vectors[(n * triton.cdiv(t * d, BLOCK),)](
        tables, ids, y, v, d, t, ids.shape[2], *ids.stride(), BLOCK, num_warps=WARPS
    )
    return y


def word_gradients(g: Tensor, ids: Tensor, words: int, padding: int, tiles: tuple[int, ...] = TILES) -> Tensor:
    """See `fedloom.nn.kernels.embedding`."""
    n, d = len(g), g.shape[-1]
    g, ids = (_two_token_axes(x, ids.dim()) for x in (g if g.stride(-1) == 1 else g.contiguous(), ids))
    y = torch.empty(n, words, d, dtype=torch.float32, device=g.device)
    bv, most, bt, warps, stages = tiles
    bd = min(most, max(16, triton.next_power_of_2(d)))
    _sums[(n, triton.cdiv(words, bv), triton.cdiv(d, bd))](
        g, ids, y, words, d, ids.shape[1] * ids.shape[2], ids.shape[2], *g.stride()[:3], *ids.stride(),
        padding, HALF, bv, bd, bt, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y
