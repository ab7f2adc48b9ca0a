"""LSTM layers whose weights fit the registers of one SM (see lstm.cu)."""

from functools import cache

import torch
from torch import Tensor

from fedloom.nn.kernels.dispatch import use_custom_kernel
from fedloom.nn.kernels.gpu import gpu_properties
from fedloom.nn.kernels.hopper.nvrtc import CudaModule
from fedloom.nn.kernels.lstm import row_contiguous

MAX_UNITS = 100  # whose weights fit the registers of an SM
TWELVE_WARP_UNITS = 96  # units that twelve warps hold
MAX_ROWS = 12  # samples of a thread block


@cache
def kernels(device: torch.device, size: int, rows: int, keep: bool) -> CudaModule:
    """The compiled file for layers of `size` units."""
    return CudaModule("lstm.cu", device, **constants(size, rows, keep))


def constants(size: int, rows: int, keep: bool) -> dict[str, int]:
    """Preprocessor constants. With more than twelve warps a thread has 128 registers, too few for all weights."""
    return {"H": size, "ROWS": rows, "KEEP": keep, "LOW_APART": size > TWELVE_WARP_UNITS, "OVER": over(size)}


def over(size: int) -> int:
    """Number of last units without warps of their own in the backward pass: beyond 96 units, two more warps would have
    only four units to compute."""
    return 4 if size > TWELVE_WARP_UNITS else 0


@cache
def shared_bytes(device: torch.device, size: int, rows: int) -> tuple[int, int]:
    """Bytes of shared memory of a thread block, forward and backward."""
    found = torch.empty(2, dtype=torch.int64, device=device)
    kernels(device, size, rows, True).launch("shared_bytes", (1, 1), 1, 0, found)
    return tuple(found.tolist())


def fits(device: torch.device, size: int) -> bool:
    """True if layers of this size can use the kernels on this device."""
    return use_custom_kernel("lstm_hopper", _obstacle(device, size))


@cache
def _obstacle(device: torch.device, size: int) -> str | None:
    if size > MAX_UNITS or size % 4:
        return f"a layer of {size} units; it takes multiples of 4 up to {MAX_UNITS}"
    if gpu_properties(device).capability[0] != 9:
        return "this is not a Hopper GPU"
    try:
        shared_bytes(device, size, 1)
    except (AttributeError, OSError, RuntimeError) as error:  # another version of CUDA than this was written for
        return f"it does not compile here ({str(error).splitlines()[0]})"
    return None


def forward(z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """States after every step, and gates (if they are kept): z (n, t, b, 4 h), w (n, 4 h, h), bias (n, 4 h)."""
    n, steps, batch, _ = z.shape
    size, (rows, blocks) = w.shape[2], _split(batch)
    z, h, c, w, bias = (
        _aligned(row_contiguous(z)),
        h.contiguous(),
        c.contiguous(),
        row_contiguous(w),
        row_contiguous(bias),
    )
    hs, cs = (z.new_empty(n, steps, batch, size) for _ in range(2))
    gates = z.new_empty(n, steps if keep else 0, batch, 4 * size)
    kernels(z.device, size, rows, keep).launch(
        "forward", (n, blocks), 32 * -(-size // 8), shared_bytes(z.device, size, rows)[0],
        z, h, c, w, bias, hs, cs, gates, steps, batch, *z.stride()[:3], w.stride(0), bias.stride(0),
    )  # fmt: skip
    return hs, cs, gates


def backward(
    dhs: Tensor, dcs: Tensor, gates: Tensor, c: Tensor, cs: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients to z, h, c and the bias from those to the states after every step."""
    n, steps, batch, size = dhs.shape
    rows, blocks = _split(batch)
    dhs, dcs, w = _aligned(row_contiguous(dhs)), _aligned(row_contiguous(dcs)), row_contiguous(w)
    gates, c, cs = (_aligned(v.contiguous()) for v in (gates, c, cs))
    dz, dh, dc = torch.empty_like(gates), torch.empty_like(c), torch.empty_like(c)
    db = w.new_empty(n, blocks, 4 * size)
    kernels(w.device, size, rows, True).launch(
        "backward", (n, blocks), 64 * -(-(size - over(size)) // 16), shared_bytes(w.device, size, rows)[1],
        dhs, dcs, gates, c, cs, w, dz, dh, dc, db, steps, batch, *dhs.stride()[:3], *dcs.stride()[:3], w.stride(0),
    )  # fmt: skip
    return dz, dh, dc, db[:, 0] if blocks == 1 else db.sum(1)


def _aligned(x: Tensor) -> Tensor:
    """x with rows that begin at multiples of 16 bytes, as bulk copies need it."""
    aligned = x.data_ptr() % 16 == 0 and all(stride % 4 == 0 for stride in x.stride()[:-1])
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _split(batch: int) -> tuple[int, int]:
    """Samples of a thread block, and thread blocks of a client."""
    blocks = -(-batch // MAX_ROWS)
    return -(-batch // blocks), blocks
