"""Products of many clients' matrices by tensor cores (see products.cu)."""

import logging
from functools import cache

import torch
from torch import Tensor

from fedloom.kernels.nvrtc import Kernels

log = logging.getLogger("fedloom")

DEPTH = 16  # of a slab
WIDEST = 13  # pieces of 8 columns that a warp has the registers for, with 32 rows
WARPS = 4  # one for each quarter of a processor
STAGES = 4
ENOUGH = 264  # programs of 128 rows, from which on all processors have two


@cache
def takes(device: torch.device) -> bool:
    """Whether there are such kernels here."""
    if device.type != "cuda":
        return False
    try:
        kernels(device, (16, 8, DEPTH, 1, 2, 1), (True, True), False)
    except (AttributeError, OSError, RuntimeError) as error:  # CUDA is not the one this was written for
        log.debug("No kernels for products in halves: %s", error)
        return False
    return True


def tiles_for(n: int, m: int, o: int) -> list[int]:
    """Rows, columns and depth of a tile, warps, stages, and pieces of 16 rows of a warp: as little as can be beyond o,
    and fewer rows where there are few clients."""
    pieces = -(-o // 8)
    tiles = -(-pieces // WIDEST)
    high = 2 if n * -(-m // (32 * WARPS)) * tiles >= ENOUGH else 1
    return [16 * high * WARPS, 8 * -(-pieces // tiles), DEPTH, WARPS, STAGES, high]


@cache
def kernels(device: torch.device, tiles: tuple[int, ...], deep: tuple[bool, bool], update: bool) -> Kernels:
    return Kernels("products.cu", device, **constants(tiles, deep, update))


def constants(tiles: tuple[int, ...], deep: tuple[bool, bool], update: bool) -> dict[str, int]:
    rows, columns, _, warps, stages, high = tiles
    down = rows // (16 * high)
    across = warps // down
    wide = columns // (8 * across)
    at_a_time = 16 if high * wide <= WIDEST else 8  # warps, by the registers they need
    sides = {"HIGH": high, "WIDE": wide, "DOWN": down, "ACROSS": across, "A_DEEP": deep[0], "B_DEEP": deep[1]}
    return {**sides, "UPDATE": update, "STAGES": stages, "BLOCKS": at_a_time // warps}


def room(tiles: list[int], deep: tuple[bool, bool]) -> int:
    """Bytes of shared memory for a program."""
    return tiles[4] * sum(4 * DEPTH * side + (0 if d else 128) for side, d in zip(tiles[:2], deep, strict=True))


def product(a: Tensor, b: Tensor, span: int, tiles: list[int]) -> Tensor:
    """a (n, m, k), b (n, k, o). Parts of k are `span` long; they are added up in order."""
    (n, m, k), o = a.shape, b.shape[2]
    y = a.new_empty(-(-k // span), n, m, o)
    _launch(a, b, y, span, None, tiles)
    return y[0] if len(y) == 1 else y.sum(0)


def subtract(w: Tensor, a: Tensor, b: Tensor, alpha: float, tiles: list[int]) -> None:
    """w (n, m, o), contiguous, -= alpha * a @ b"""
    if w.data_ptr() % 16:  # four numbers are written at a time
        w.sub_(product(a, b, a.shape[2], tiles), alpha=alpha)
    else:
        _launch(a, b, w[None], a.shape[2], alpha, tiles)


def _launch(a: Tensor, b: Tensor, y: Tensor, span: int, alpha: float | None, tiles: list[int]) -> None:
    parts, n, m, o = y.shape
    deep = a.stride(2) == 1, b.stride(2) != 1
    apart = a.stride(1 if deep[0] else 2), b.stride(2 if deep[1] else 1)
    kernels(a.device, tuple(tiles), deep, alpha is not None).launch(
        "product", (-(-m // tiles[0]) * -(-o // tiles[1]), n, parts), 32 * tiles[3], room(tiles, deep),
        a, b, y, m, a.shape[2], o, a.stride(0), apart[0], b.stride(0), apart[1], span, alpha or 0.0,
    )  # fmt: skip
