"""Products of many clients' matrices by tensor cores (see products.cu)."""

import logging
from functools import cache

import torch
from torch import Tensor

from fedloom.kernels.nvrtc import Kernels

log = logging.getLogger("fedloom")

ROWS, WARPS = 64, 4  # of a tile, of a program: what one multiplication takes
SHALLOW = 128  # steps of 32 would go too far beyond smaller k
NARROWEST = 64  # columns for which a is split often enough; with 56 and less, Triton's kernel is as fast
LEAST = 198  # tiles, one and a half for each processor; with 140 Triton's kernel, which has smaller ones, is faster


@cache
def takes(device: torch.device) -> bool:
    """Whether there are such kernels here."""
    if device.type != "cuda":
        return False
    try:
        kernels(device, (ROWS, 8, 16, WARPS, 1, 1), (True, True), (16, 16), False)
    except (AttributeError, OSError, RuntimeError) as error:  # CUDA, or the chip, is not the one this was written for
        log.debug("No kernels for products in halves: %s", error)
        return False
    return True


def tiles_for(n: int, m: int, k: int, o: int) -> list[int] | None:
    """Rows, columns and depth of a tile, warps of a program, stages, and programs of a processor, by the registers that
    tiles take; None where Triton's kernel is faster."""
    pieces = -(-o // 8)
    depth, widest, programs = (16, 10, 3) if k <= SHALLOW else (32, 13, 2)
    tiles = [ROWS, 8 * -(-pieces // -(-pieces // widest)), depth, WARPS, 2, programs]
    return tiles if o >= NARROWEST and o % 2 == 0 and count(n, m, o, tiles) >= LEAST else None


@cache
def kernels(
    device: torch.device, tiles: tuple[int, ...], deep: tuple[bool, bool], apart: tuple[int, int], update: bool
) -> Kernels:
    return Kernels("products.cu", device, **constants(tiles, deep, apart, update), **operands(tiles[1]))


def constants(tiles: tuple[int, ...], deep: tuple[bool, bool], apart: tuple[int, int], update: bool) -> dict[str, int]:
    _, columns, depth, _, _, programs = tiles
    sizes = {"WIDE": columns // 8, "DEPTH": depth, "BLOCKS": programs, "UPDATE": update}
    return {**sizes, "A_DEEP": deep[0], "B_DEEP": deep[1], "A_APART": apart[0], "B_APART": apart[1]}


def operands(columns: int) -> dict[str, str]:
    """Of the multiplication, whose text has one for each number of a result."""
    results = columns // 2

    def places(first: int, count: int) -> str:
        return '"' + ", ".join(f"%{first + i}" for i in range(count)) + '"'

    return {
        "SIZE": f'"{columns}"',
        "INTO": ", ".join(f'"+f"(to[{i}])' for i in range(results)),
        "OUTPUTS": places(0, results),
        "LEFT": places(results, 4),
        "RIGHT": places(results + 4, 1),
        "MORE": places(results + 5, 1),
    }


def room(tiles: list[int]) -> int:
    """Bytes of shared memory for a program: two halves of each of two slabs of b."""
    return 16 * tiles[1] * tiles[2]


def product(a: Tensor, b: Tensor, tiles: list[int]) -> Tensor:
    """a (n, m, k), b (n, k, o)"""
    y = a.new_empty(*a.shape[:2], b.shape[2])
    _launch(a, b, y, None, tiles)
    return y


def subtract(w: Tensor, a: Tensor, b: Tensor, alpha: float, tiles: list[int]) -> None:
    """w (n, m, o), contiguous, -= alpha * a @ b"""
    if w.data_ptr() % 8:  # two numbers are written at a time
        w.sub_(product(a, b, tiles), alpha=alpha)
    else:
        _launch(a, b, w, alpha, tiles)


def _launch(a: Tensor, b: Tensor, y: Tensor, alpha: float | None, tiles: list[int]) -> None:
    n, m, o = y.shape
    at_a_time = tiles[5] * processors(a.device)
    deep = a.stride(2) == 1, b.stride(2) != 1
    apart = a.stride(1 if deep[0] else 2), b.stride(2 if deep[1] else 1)
    kernels(a.device, tuple(tiles), deep, apart, alpha is not None).launch(
        "product", (min(count(n, m, o, tiles), at_a_time),), 32 * WARPS, room(tiles),
        a, b, y, n, m, a.shape[2], o, a.stride(0), b.stride(0), alpha or 0.0,
    )  # fmt: skip


def count(n: int, m: int, o: int, tiles: list[int]) -> int:
    """Tiles in all."""
    return n * -(-m // tiles[0]) * -(-o // tiles[1])


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
