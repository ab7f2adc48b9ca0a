"""Batched matrix products with weights per client.

With weights per client and a batch of ten, a layer reads its weights once (or, for their gradient, writes them once)
and computes little with them. cuBLAS takes two to four times as long as that memory traffic. Larger products it
computes without tensor cores, which have no float32; the kernel here splits a float32 into two TF32 numbers, takes 0.8
of the time and is more exact. A graph pass puts the operators into traced graphs, so they need no gradient.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedloom.nn.kernels.dispatch import cuda_kernel, use_custom_kernel
from fedloom.nn.kernels.gpu import gpu_properties

FEW_ROWS = 32  # of a product that is bound by reading the weights
FEW_COLUMNS = 16
MIN_WEIGHTS = 1 << 20  # of all clients together; fewer are read faster than a kernel is launched
MIN_PRODUCTS = 50_000_000  # multiplications of all clients together, for a large product; fewer were not measured
PROGRAMS_PER_SM = 2
OVERHEAD_STEPS = 4  # what a Triton program takes before its first and after its last step, in steps
MAX_SPLITS = 16


def precision() -> str:
    """How products of float32 are computed: rounded to TF32 if torch may do so, otherwise from three TF32 products."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@torch.library.custom_op("fedloom::batched_matmul", mutates_args=())
def batched_matmul(a: Tensor, b: Tensor, tiles: list[int]) -> Tensor:
    """a (n, m, k) times b (n, k, o) for every client. `tiles`: rows, columns and depth of a tile, warps, stages."""
    return torch.bmm(a, b)


@batched_matmul.register_fake
def _(a: Tensor, b: Tensor, tiles: list[int]) -> Tensor:
    return a.new_empty(*a.shape[:2], b.shape[2])


@torch.library.custom_op("fedloom::subtract_matmul", mutates_args=("w",))
def subtract_matmul(w: Tensor, a: Tensor, b: Tensor, alpha: float, tiles: list[int]) -> None:
    """w -= alpha * (a @ b): an SGD step that never writes the gradient to memory."""
    w.sub_(torch.bmm(a, b), alpha=alpha)


@subtract_matmul.register_fake
def _(w: Tensor, a: Tensor, b: Tensor, alpha: float, tiles: list[int]) -> None:
    return None


cuda_kernel(batched_matmul, "matmul", "matmul", "batched_matmul")
cuda_kernel(subtract_matmul, "matmul", "matmul", "subtract_matmul")
MATMUL, SUBTRACT_MATMUL = torch.ops.fedloom.batched_matmul.default, torch.ops.fedloom.subtract_matmul.default


def choose_tiles(a: Tensor, b: Tensor) -> list[int] | None:
    """Tiles for the products of a (n, m, k) and b (n, k, o), or None where cuBLAS is to compute them.

    With few rows, or a sum over few, the memory of the weights is the bound, and with few columns that of a. Tiles of
    64 x 64 are fastest where the columns of b are contiguous, as tensor cores want it in shared memory; any other b
    would have to be transposed there, and tiles of 32 x 128, which go through registers, take half the time.
    """
    (n, m, k), o = a.shape, b.shape[2]
    transposed = b.stride(2) != 1
    if a.dtype != torch.float32 or (transposed and b.stride(1) != 1) or n >= 1 << 16:  # the limit of a grid's axis
        return None
    if max(_extent(a), _extent(b), m * o) >= 1 << 31:
        return None
    rows, columns = (64, 64) if transposed else (32, 128)
    if k <= FEW_ROWS and n * m * o >= MIN_WEIGHTS:  # a gradient to weights: one step
        return [_side(m, rows), _side(o, columns), _side(k, 32), 4, 1]
    if m <= FEW_ROWS and n * k * o >= MIN_WEIGHTS:
        return [_side(m, 32), _side(o, 128), 32, 4, 4]
    if precision() == "tf32" or n * m * k * o < MIN_PRODUCTS or not (_vectorized(a) and _vectorized(b)):
        return None
    if o <= FEW_COLUMNS:
        return [_side(m, 64), 16, 32, 4, 4]
    return [_side(m, rows), _side(o, columns), 32, 4, 3]


def _side(size: int, most: int) -> int:
    """The smallest power of two that covers the size, between 16 and `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _vectorized(matrices: Tensor) -> bool:
    """True if four numbers can be loaded at a time; single loads would take as long as everything else together."""
    last = 2 if matrices.stride(2) == 1 else 1
    starts = matrices.storage_offset(), matrices.stride(0), matrices.stride(3 - last), matrices.shape[last]
    return matrices.stride(last) == 1 and all(at % 4 == 0 for at in starts)


def _extent(matrices: Tensor) -> int:
    """Distance in memory from the first element of a client's matrix to its last."""
    return sum((size - 1) * stride for size, stride in zip(matrices.shape[1:], matrices.stride()[1:], strict=True))


def depth_per_program(a: Tensor, b: Tensor, tiles: list[int]) -> int:
    """How much of k one Triton program sums, in whole steps: all of it where there are enough programs."""
    (n, m, k), (rows, columns, depth, *_) = a.shape, tiles
    steps = _ceil(k, depth)
    programs = n * _ceil(m, rows) * _ceil(b.shape[2], columns)
    return _ceil(steps, splits(programs, steps, PROGRAMS_PER_SM * gpu_properties(a.device).sms)) * depth


def splits(programs: int, steps: int, at_once: int) -> int:
    """Into how many programs to split the steps of each, so that all are done soonest when `at_once` run at a time."""

    def time(count: int) -> int:
        return _ceil(programs * count, at_once) * (_ceil(steps, count) + OVERHEAD_STEPS)

    return min(range(1, max(1, min(MAX_SPLITS, steps // OVERHEAD_STEPS)) + 1), key=time)


def _ceil(size: int, by: int) -> int:
    return -(-size // by)


def replace_matmuls(module: GraphModule) -> None:
    """Graph pass: batched products are computed by `batched_matmul` where it is faster."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
        tiles = choose_tiles(*(factor.meta["val"] for factor in node.args))
        if use_custom_kernel("matmul", None if tiles else "cuBLAS is faster for these sizes"):
            node.target, node.args = MATMUL, (*node.args, tiles)
    module.recompile()
