"""Kernels for LSTM layers whose weights fit into one processor (see lstm.cu)."""

import logging
from functools import cache

import torch
from torch import Tensor

from fedloom.kernels.lstm import in_rows
from fedloom.kernels.nvrtc import Kernels

log = logging.getLogger("fedloom")

UNITS = 100  # at most, whose weights fit into the registers of a processor
IN_TWELVE_WARPS = 96  # units
ROWS = 12  # samples of a program at most


@cache
def kernels(device: torch.device, size: int, rows: int, keep: bool) -> Kernels:
    return Kernels("lstm.cu", device, **constants(size, rows, keep))


def constants(size: int, rows: int, keep: bool) -> dict[str, int]:
    """More than twelve warps would have 128 registers for a thread, too few for all weights."""
    return {"H": size, "ROWS": rows, "KEEP": keep, "LOW_APART": size > IN_TWELVE_WARPS, "OVER": over(size)}


def over(size: int) -> int:
    """Units of which a thirteenth and fourteenth warp would have few, back through time."""
    return 4 if size > IN_TWELVE_WARPS else 0


@cache
def rooms(device: torch.device, size: int, rows: int) -> tuple[int, int]:
    """Bytes of shared memory for a program, forward and back."""
    found = torch.empty(2, dtype=torch.int64, device=device)
    kernels(device, size, rows, True).launch("rooms", (1, 1), 1, 0, found)
    return tuple(found.tolist())


@cache
def takes(device: torch.device, size: int) -> bool:
    """Whether layers of this size have such kernels here."""
    if size > UNITS or size % 4:
        return False
    try:
        rooms(device, size, 1)
    except (AttributeError, OSError, RuntimeError) as error:  # CUDA is not the one this was written for
        log.debug("No kernels for an LSTM that keep its weights: %s", error)
        return False
    return True


def forward(z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """States after every step, and gates (if they are kept): z (n, t, b, 4 h), w (n, 4 h, h), bias (n, 4 h)."""
    n, steps, batch, _ = z.shape
    size, (rows, programs) = w.shape[2], _shares(batch)
    z, h, c, w, bias = _aligned(in_rows(z)), h.contiguous(), c.contiguous(), in_rows(w), in_rows(bias)
    hs, cs = (z.new_empty(n, steps, batch, size) for _ in range(2))
    gates = z.new_empty(n, steps if keep else 0, batch, 4 * size)
    kernels(z.device, size, rows, keep).launch(
        "forward", (n, programs), 32 * -(-size // 8), rooms(z.device, size, rows)[0],
        z, h, c, w, bias, hs, cs, gates, steps, batch, *z.stride()[:3], w.stride(0), bias.stride(0),
    )  # fmt: skip
    return hs, cs, gates


def backward(
    dhs: Tensor, dcs: Tensor, gates: Tensor, c: Tensor, cs: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients to z, h, c and the bias from those to the states after every step."""
    n, steps, batch, size = dhs.shape
    rows, programs = _shares(batch)
    dhs, dcs, w = _aligned(in_rows(dhs)), _aligned(in_rows(dcs)), in_rows(w)
    gates, c, cs = (_aligned(v.contiguous()) for v in (gates, c, cs))
    dz, dh, dc = torch.empty_like(gates), torch.empty_like(c), torch.empty_like(c)
    db = w.new_empty(n, programs, 4 * size)
    kernels(w.device, size, rows, True).launch(
        "backward", (n, programs), 64 * -(-(size - over(size)) // 16), rooms(w.device, size, rows)[1],
        dhs, dcs, gates, c, cs, w, dz, dh, dc, db, steps, batch, *dhs.stride()[:3], *dcs.stride()[:3], w.stride(0),
    )  # fmt: skip
    return dz, dh, dc, db[:, 0] if programs == 1 else db.sum(1)


def _aligned(x: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, as they are copied into shared memory."""
    own = x.data_ptr() % 16 == 0 and all(stride % 4 == 0 for stride in x.stride()[:-1])
    return x if own else x.clone(memory_format=torch.contiguous_format)


def _shares(batch: int) -> tuple[int, int]:
    """Samples of a program, and programs of a client."""
    programs = -(-batch // ROWS)
    return -(-batch // programs), programs
