"""Products of stacked clients with few rows.

With weights of its own for every client and a batch of ten, a layer reads (or, for their gradient, writes) the weights
once and computes little with them. The library's product takes two to four times as long as that memory does; the
kernels here are made for it. They are put into programs that are already traced, so nobody differentiates them.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

SHORT = 32  # rows
LEAST = 1 << 20  # weights of all clients together, from which on their memory takes longer than a launch


def precision() -> str:
    """How products of float32 are taken: with the rounding that torch is allowed to do, or without."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _own(a: Tensor) -> bool:
    return a.is_cuda and find_spec("triton") is not None


def _triton() -> Any:
    from fedloom.kernels import products_triton  # there where torch comes with CUDA

    return products_triton


@torch.library.custom_op("fedloom::products", mutates_args=())
def products(a: Tensor, b: Tensor, tiles: list[int]) -> Tensor:
    """a (n, m, k) times b (n, k, o), client by client; `tiles` are sides and depth of tiles, warps and stages."""
    if not _own(a):
        return torch.bmm(a, b)
    return _triton().product(a, b, precision(), tiles)


@products.register_fake
def _(a: Tensor, b: Tensor, tiles: list[int]) -> Tensor:
    return a.new_empty(*a.shape[:2], b.shape[2])


@torch.library.custom_op("fedloom::subtract_products", mutates_args=("w",))
def subtract_products(w: Tensor, a: Tensor, b: Tensor, alpha: float, tiles: list[int]) -> None:
    """w -= alpha * products(a, b): a step on weights without a gradient in memory."""
    if not _own(a):
        w.sub_(torch.bmm(a, b), alpha=alpha)
    else:
        _triton().subtract(w, a, b, alpha, precision(), tiles)


@subtract_products.register_fake
def _(w: Tensor, a: Tensor, b: Tensor, alpha: float, tiles: list[int]) -> None:
    return None


PRODUCTS, SUBTRACT = torch.ops.fedloom.products.default, torch.ops.fedloom.subtract_products.default


def way(n: int, m: int, k: int, o: int) -> list[int] | None:
    """Tiles for a product (n, m, k) x (n, k, o), or None where the library is to compute it."""
    if n >= 1 << 16:  # programs on an axis of a grid
        return None
    if k <= SHORT and n * m * o >= LEAST:  # a gradient to weights: one step
        return [_side(m, 32), _side(o, 128), _side(k, 32), 4, 1]
    if m <= SHORT and n * k * o >= LEAST:
        return [_side(m, 32), _side(o, 128), 32, 4, 4]
    return None


def _side(size: int, most: int) -> int:
    """The smallest side of a tile that covers it, or the largest that there is."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _reach(matrices: Tensor) -> int:
    """Places from the first element of a client's matrix to its last."""
    return sum((size - 1) * stride for size, stride in zip(matrices.shape[1:], matrices.stride()[1:], strict=True))


def replace_products(program: GraphModule) -> None:
    """Let the products of a program go their ways."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
        a, b = (factor.meta["val"] for factor in node.args)
        if a.dtype != torch.float32 or 1 not in b.stride()[1:] or max(map(_reach, (a, b, node.meta["val"]))) >= 1 << 31:
            continue
        n, m, k = a.shape
        if tiles := way(n, m, k, b.shape[2]):
            node.target, node.args = PRODUCTS, (*node.args, tiles)
    program.recompile()
