"""Products of stacked clients.

With weights of its own for every client and a batch of ten, a layer reads (or, for their gradient, writes) the weights
once and computes little with them. The library's product takes two to four times as long as that memory does. Larger
products it takes without tensor cores, which do not know float32; kernels that give them two halves of each number
take 0.5 (products.cu) to 0.8 of the time and are more exact. The operators are put into programs that are
already traced, so nobody differentiates them.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedloom.kernels import products_cuda
from fedloom.kernels.ours import ours, triton

SHORT = 32  # rows
NARROW = 16  # columns
LEAST = 1 << 20  # weights of all clients together, from which on their memory takes longer than a launch
ENOUGH = 50_000_000  # multiplications of all clients together; larger products with fewer have not been measured
PROGRAMS = 264  # two for each processor of an H100
SET_UP = 4  # what a program takes before its first and after its last step, in steps
PIECES = 16


def precision() -> str:
    """How products of float32 are taken: with the rounding that torch is allowed to do, or without."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _in_halves(tiles: list[int]) -> bool:
    """Are these tiles of products.cu? They say how many programs a processor runs, too."""
    return len(tiles) == 6


@torch.library.custom_op("fedloom::products", mutates_args=())
def products(a: Tensor, b: Tensor, tiles: list[int]) -> Tensor:
    """a (n, m, k) times b (n, k, o), client by client; `tiles` are sides and depth of tiles, warps and stages."""
    if _in_halves(tiles):
        return products_cuda.product(a, b, tiles)
    if not ours(a):
        return torch.bmm(a, b)
    return triton("products").product(a, b, precision(), tiles)


@products.register_fake
def _(a: Tensor, b: Tensor, tiles: list[int]) -> Tensor:
    return a.new_empty(*a.shape[:2], b.shape[2])


@torch.library.custom_op("fedloom::subtract_products", mutates_args=("w",))
def subtract_products(w: Tensor, a: Tensor, b: Tensor, alpha: float, tiles: list[int]) -> None:
    """w -= alpha * products(a, b): a step on weights without a gradient in memory."""
    if _in_halves(tiles):
        products_cuda.subtract(w, a, b, alpha, tiles)
    elif not ours(a):
        w.sub_(torch.bmm(a, b), alpha=alpha)
    else:
        triton("products").subtract(w, a, b, alpha, precision(), tiles)


@subtract_products.register_fake
def _(w: Tensor, a: Tensor, b: Tensor, alpha: float, tiles: list[int]) -> None:
    return None


PRODUCTS, SUBTRACT = torch.ops.fedloom.products.default, torch.ops.fedloom.subtract_products.default


def way(a: Tensor, b: Tensor) -> list[int] | None:
    """Tiles for the products of a (n, m, k) and b (n, k, o), or None where the library is to compute them.

    With few rows, or a sum over few, the memory of the weights is the bound, and with few columns that of a. Other
    products are bound by what is around the multiplications of tensor cores. Where there is products.cu, it takes 0.73
    to 0.79 of the time of Triton's kernel. For that one, tiles of 64 x 64 need least where b has its columns in one
    piece, as tensor cores want it in shared memory; for other b they would turn it there, and 32 x 128, which go
    through registers, take half the time.
    """
    (n, m, k), o = a.shape, b.shape[2]
    turned = b.stride(2) != 1
    if a.dtype != torch.float32 or (turned and b.stride(1) != 1) or n >= 1 << 16:  # programs on an axis of a grid
        return None
    if max(_reach(a), _reach(b), m * o) >= 1 << 31:
        return None
    rows, columns = (64, 64) if turned else (32, 128)
    if tiles := _tiles_in_halves(a, b):
        return tiles
    if k <= SHORT and n * m * o >= LEAST:  # a gradient to weights: one step
        return [_side(m, rows), _side(o, columns), _side(k, 32), 4, 1]
    if m <= SHORT and n * k * o >= LEAST:
        return [_side(m, 32), _side(o, 128), 32, 4, 4]
    if not _large(a, b):
        return None
    if o <= NARROW:
        return [_side(m, 64), 16, 32, 4, 4]
    return [_side(m, rows), _side(o, columns), 32, 4, 3]


def _large(a: Tensor, b: Tensor) -> bool:
    """A product that tensor cores are for, and that can be read fast enough."""
    (n, m, k), o = a.shape, b.shape[2]
    return precision() != "tf32" and n * m * k * o >= ENOUGH and _wide(a) and _wide(b)


def _tiles_in_halves(a: Tensor, b: Tensor) -> list[int] | None:
    """Of products.cu, where it is the fastest: sums over few have been measured for outputs of a layer only."""
    (n, m, k), o = a.shape, b.shape[2]
    output = a.stride(2) == b.stride(1) == 1
    if m <= SHORT or (k <= SHORT and not output) or not _large(a, b) or not products_cuda.takes(a.device):
        return None
    return products_cuda.tiles_for(n, m, k, o)


def _side(size: int, most: int) -> int:
    """The smallest side of a tile that covers it, or the largest that there is."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _wide(matrices: Tensor) -> bool:
    """Can four numbers be read at a time? One at a time takes as long as everything else together, and longer."""
    last = 2 if matrices.stride(2) == 1 else 1
    starts = matrices.storage_offset(), matrices.stride(0), matrices.stride(3 - last), matrices.shape[last]
    return matrices.stride(last) == 1 and all(at % 4 == 0 for at in starts)


def _reach(matrices: Tensor) -> int:
    """Places from the first element of a client's matrix to its last."""
    return sum((size - 1) * stride for size, stride in zip(matrices.shape[1:], matrices.stride()[1:], strict=True))


def span_of(a: Tensor, b: Tensor, tiles: list[int]) -> int:
    """How much of k one program takes, in whole steps: all of it where clients give enough programs."""
    (n, m, k), (rows, columns, depth, *_) = a.shape, tiles
    if _in_halves(tiles):
        return k
    steps = _ceil(k, depth)
    return _ceil(steps, pieces(n * _ceil(m, rows) * _ceil(b.shape[2], columns), steps)) * depth


def pieces(programs: int, steps: int) -> int:
    """In how many to split the steps of programs, so that all are done soonest when PROGRAMS run at a time."""

    def time(count: int) -> int:
        return _ceil(programs * count, PROGRAMS) * (_ceil(steps, count) + SET_UP)

    return min(range(1, max(1, min(PIECES, steps // SET_UP)) + 1), key=time)


def _ceil(size: int, by: int) -> int:
    return -(-size // by)


def replace_products(program: GraphModule) -> None:
    """Let the products of a program go their ways."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
        if tiles := way(*(factor.meta["val"] for factor in node.args)):
            node.target, node.args = PRODUCTS, (*node.args, tiles)
    program.recompile()
