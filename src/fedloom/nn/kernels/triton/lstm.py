"""An LSTM layer of many clients with weights per client: all time steps, forward and backward.

A program takes all steps of some samples of one client, one after another: samples do not depend on each other but in
the gradient of the weights, which is a product of its own. In a step, all four gates of a block of units come from one
loop over the units of the previous step, which other threads of the program wrote to global memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.nn.kernels.gpu import gpu_properties
from fedloom.nn.kernels.hopper import lstm as hopper
from fedloom.nn.kernels.lstm import row_contiguous
from fedloom.nn.kernels.matmul import precision
from fedloom.nn.kernels.triton.matmul import rounded

MAX_ROWS = 32  # samples of a program


class Tiles(NamedTuple):
    """How the kernels divide a step."""

    units: int  # whose gates are computed at once
    depth: int  # of a step of the product
    warps: int
    stages: int


@triton.jit
def _tanh(x):
    """Exact to a few units in the last place, also for small x."""
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(y < 0.0625, near, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _dot(x, y, total, PRECISION: tl.constexpr):
    """A product for "tf32x3": `tl.dot` takes nine instructions per number to split it, more than all else in the loops
    below; here it is three."""
    if PRECISION == "tf32x3":
        high_x, high_y = rounded(x), rounded(y)
        total = tl.dot(x - high_x, high_y, total, input_precision="tf32")
        total = tl.dot(high_x, y - high_y, total, input_precision="tf32")
        return tl.dot(high_x, high_y, total, input_precision="tf32")
    else:
        return tl.dot(x, y, total, input_precision=PRECISION)


@triton.jit
def _forward(
    z, h0, c0, w, bias, hs, cs, gates, T, B, z_n, z_t, z_b, w_n, bias_n,
    H: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """(i, f, g, o) = z[t] + bias + w h; c' = s(f) c + s(i) tanh(g); h' = s(o) tanh(c')."""
    client = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, 4 * UNITS)
    z += client * z_n
    w += client * w_n
    bias += client * bias_n
    hs += client * T * B * H
    cs += client * T * B * H
    gates += client * T * B * (4 * H)
    h_from = h0 + client * B * H
    c_from = c0 + client * B * H
    for _ in range(T):
        for start in range(0, H, UNITS):
            u = start + tl.arange(0, UNITS)
            there = (b < B)[:, None] & (u < H)[None, :]
            at = b[:, None] * H + u[None, :]
            z_at = z + b[:, None] * z_b + u[None, :]  # loaded now, needed after the product
            b_at = bias + u
            z_i = tl.load(z_at, mask=there, other=0.0) + tl.load(b_at, mask=u < H, other=0.0)[None, :]
            z_f = tl.load(z_at + H, mask=there, other=0.0) + tl.load(b_at + H, mask=u < H, other=0.0)[None, :]
            z_g = tl.load(z_at + 2 * H, mask=there, other=0.0) + tl.load(b_at + 2 * H, mask=u < H, other=0.0)[None, :]
            z_o = tl.load(z_at + 3 * H, mask=there, other=0.0) + tl.load(b_at + 3 * H, mask=u < H, other=0.0)[None, :]
            c = tl.load(c_from + at, mask=there, other=0.0)
            # The four gates of a unit are adjacent: threads exchange the sums once, and all that follows is done in the
            # layout of the loads. With one gate after another, every operand would be exchanged.
            gate, v = n % 4, start + n // 4
            sums = tl.zeros((ROWS, 4 * UNITS), dtype=tl.float32)
            for first in range(0, H, DEPTH):
                k = first + tl.arange(0, DEPTH)
                h = tl.load(h_from + b[:, None] * H + k[None, :], mask=(b < B)[:, None] & (k < H)[None, :], other=0.0)
                some_w = (k < H)[:, None] & (v < H)[None, :]
                weights = tl.load(w + ((gate * H + v) * H)[None, :] + k[:, None], mask=some_w, other=0.0)
                sums = _dot(h, weights, sums, PRECISION)
            i_and_g, f_and_o = tl.split(tl.reshape(sums, (ROWS, UNITS, 2, 2)))
            i, g = tl.split(i_and_g)
            f, o = tl.split(f_and_o)
            i, f, g, o = tl.sigmoid(i + z_i), tl.sigmoid(f + z_f), _tanh(g + z_g), tl.sigmoid(o + z_o)
            c = f * c + i * g
            tl.store(hs + at, o * _tanh(c), mask=there)
            tl.store(cs + at, c, mask=there)
            if KEEP:
                to = gates + b[:, None] * (4 * H) + u[None, :]
                tl.store(to, i, mask=there)
                tl.store(to + H, f, mask=there)
                tl.store(to + 2 * H, g, mask=there)
                tl.store(to + 3 * H, o, mask=there)
        tl.debug_barrier()  # h is read by other threads
        h_from, c_from = hs, cs
        z += z_t
        hs += B * H
        cs += B * H
        gates += B * (4 * H)


@triton.jit
def _backward(
    dhs, dcs, gates, c0, cs, w, dz, dh0, dc0, T, B, dh_n, dh_t, dh_b, dc_n, dc_t, dc_b, w_n,
    H: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """From the last step to the first, and once more for the gradient to the initial state. `dc0` holds the gradient to
    the cells in between."""
    client = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    steps = client * 0 + T - 1  # 64 bits, as all offsets of clients and steps
    last = client * T + steps
    dhs += client * dh_n + steps * dh_t
    dcs += client * dc_n + steps * dc_t
    gates += last * B * (4 * H)
    cs += last * B * H
    c0 += client * B * H
    w += client * w_n
    dz += last * B * (4 * H)
    dh0 += client * B * H
    dc0 += client * B * H
    for back in range(T + 1):
        step = b * 0 + back
        later, now = (b < B) & (step > 0), (b < B) & (step < T)
        for start in range(0, H, UNITS):
            u = start + tl.arange(0, UNITS)
            there = now[:, None] & (u < H)[None, :]
            at = b[:, None] * H + u[None, :]
            at_gate = b[:, None] * (4 * H) + u[None, :]
            i = tl.load(gates + at_gate, mask=there, other=0.0)
            f = tl.load(gates + at_gate + H, mask=there, other=0.0)
            g = tl.load(gates + at_gate + 2 * H, mask=there, other=0.0)
            o = tl.load(gates + at_gate + 3 * H, mask=there, other=0.0)
            c = tl.load(cs + at, mask=there, other=0.0)
            given = tl.load(cs - B * H + at, mask=there & (step < T - 1)[:, None], other=0.0)
            given += tl.load(c0 + at, mask=there & (step == T - 1)[:, None], other=0.0)
            dh = tl.load(dhs + b[:, None] * dh_b + u[None, :], mask=there, other=0.0)
            dc = tl.load(dcs + b[:, None] * dc_b + u[None, :], mask=there, other=0.0)
            dc += tl.load(dc0 + at, mask=later[:, None] & (u < H)[None, :], other=0.0)
            by_i = tl.zeros((ROWS, UNITS), dtype=tl.float32)  # four independent sums
            by_f = tl.zeros((ROWS, UNITS), dtype=tl.float32)
            by_g = tl.zeros((ROWS, UNITS), dtype=tl.float32)
            by_o = tl.zeros((ROWS, UNITS), dtype=tl.float32)
            for first in range(0, H, DEPTH):
                k = first + tl.arange(0, DEPTH)
                some = later[:, None] & (k < H)[None, :]
                from_ = dz + B * (4 * H) + b[:, None] * (4 * H) + k[None, :]
                w_at = w + k[:, None] * H + u[None, :]
                inside = (k < H)[:, None] & (u < H)[None, :]
                z_i = tl.load(from_, mask=some, other=0.0)
                z_f = tl.load(from_ + H, mask=some, other=0.0)
                z_g = tl.load(from_ + 2 * H, mask=some, other=0.0)
                z_o = tl.load(from_ + 3 * H, mask=some, other=0.0)
                by_i = _dot(z_i, tl.load(w_at, mask=inside, other=0.0), by_i, PRECISION)
                by_f = _dot(z_f, tl.load(w_at + H * H, mask=inside, other=0.0), by_f, PRECISION)
                by_g = _dot(z_g, tl.load(w_at + 2 * H * H, mask=inside, other=0.0), by_g, PRECISION)
                by_o = _dot(z_o, tl.load(w_at + 3 * H * H, mask=inside, other=0.0), by_o, PRECISION)
            carried = (by_i + by_f) + (by_g + by_o)
            tl.store(dh0 + at, carried, mask=((b < B) & (step == T))[:, None] & (u < H)[None, :])
            dh += carried
            out = _tanh(c)
            dc += dh * o * (1 - out * out)
            tl.store(dz + at_gate, dc * g * i * (1 - i), mask=there)
            tl.store(dz + at_gate + H, dc * given * f * (1 - f), mask=there)
            tl.store(dz + at_gate + 2 * H, dc * i * (1 - g * g), mask=there)
            tl.store(dz + at_gate + 3 * H, dh * out * o * (1 - o), mask=there)
            tl.store(dc0 + at, dc * f, mask=there)
        tl.debug_barrier()  # dz is read by other threads
        dhs -= dh_t
        dcs -= dc_t
        gates -= B * (4 * H)
        cs -= B * H
        dz -= B * (4 * H)


def lstm_forward(z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `fedloom.nn.kernels.lstm`; the Hopper kernel is used where it fits."""
    if hopper.fits(w.device, w.shape[2]):
        return hopper.forward(z, h, c, w, bias, keep)
    return forward(z, h, c, w, bias, keep, precision())


def lstm_backward(
    dhs: Tensor, dcs: Tensor, gates: Tensor, c: Tensor, cs: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fedloom.nn.kernels.lstm`; the Hopper kernel is used where it fits."""
    if hopper.fits(w.device, w.shape[2]):
        return hopper.backward(dhs, dcs, gates, c, cs, w)
    return backward(dhs, dcs, gates, c, cs, w, precision())


def forward(
    z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor, keep: bool, precision: str,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """States after every step, and gates (if they are kept): z (n, t, b, 4 h), w (n, 4 h, h), bias (n, 4 h)."""
    n, steps, batch, _ = z.shape
    size = w.shape[2]
    z, h, c, w, bias = row_contiguous(z), h.contiguous(), c.contiguous(), row_contiguous(w), row_contiguous(bias)
    hs, cs = (z.new_empty(n, steps, batch, size) for _ in range(2))
    gates = z.new_empty(n, steps if keep else 0, batch, 4 * size)
    gpu = gpu_properties(w.device)
    rows = rows_per_program(n, batch, gpu.sms)
    units, depth, warps, stages = tiles or default_tiles(size, rows, gpu.shared_bytes)
    _forward[(n, triton.cdiv(batch, rows))](
        z, h, c, w, bias, hs, cs, gates, steps, batch, *z.stride()[:3], w.stride(0), bias.stride(0),
        size, keep, precision, rows, units, depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return hs, cs, gates


def backward(
    dhs: Tensor, dcs: Tensor, gates: Tensor, c: Tensor, cs: Tensor, w: Tensor, precision: str,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients to z, h, c and the bias from those to the states after every step."""
    n, steps, batch, size = dhs.shape
    dhs, dcs, w = row_contiguous(dhs), row_contiguous(dcs), row_contiguous(w)
    gates, c, cs = gates.contiguous(), c.contiguous(), cs.contiguous()
    dz, dh, dc = torch.empty_like(gates), torch.empty_like(c), torch.empty_like(c)
    gpu = gpu_properties(w.device)
    rows = rows_per_program(n, batch, gpu.sms)
    units, depth, warps, stages = tiles or default_tiles(size, rows, gpu.shared_bytes)
    _backward[(n, triton.cdiv(batch, rows))](
        dhs, dcs, gates, c, cs, w, dz, dh, dc, steps, batch, *dhs.stride()[:3], *dcs.stride()[:3], w.stride(0),
        size, precision, rows, units, depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dz, dh, dc, dz.sum((1, 2))


def default_tiles(size: int, rows: int, shared_bytes: int) -> Tiles:
    """As many units as fit registers, and three stages if they fit shared memory, otherwise fewer."""
    most = max(16, triton.next_power_of_2(size))
    units, depth = min(2048 // rows, most), min(32, most)
    loaded = 16 * depth * (rows + units)  # bytes of a stage: for four gates, of gradients and of weights
    stages = min(3, 1 + shared_bytes // loaded)  # all but one are in shared memory
    return Tiles(units, depth, 4 if size <= 32 else 8 if size <= 128 else 16, stages)


def rows_per_program(n: int, batch: int, sms: int) -> int:
    """Samples of a program: few, so that all SMs have work; more where there are enough programs, because each reads
    all weights."""
    return MAX_ROWS if batch > 16 and n * triton.cdiv(batch, 16) > sms else 16
