"""Arithmetic on trees (PyTorch's pytrees): nested dictionaries, tuples and slots whose leaves are tensors."""

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Tree: TypeAlias = Any
Number: TypeAlias = float | Tensor
Params: TypeAlias = dict[str, Tensor]  # parameters by name

__all__ = [
    "Number", "Params", "Tree", "add", "axpy",
    "leaves", "mean", "nonzero", "norm", "scale", "size_bytes", "sub", "take", "tree_flatten",
    "tree_map", "tree_unflatten", "trimmed_mean", "uniform_mean", "where", "zeros_like",
]  # fmt: skip


def nonzero(number: Number) -> bool:
    """False if a setting is zero. A tensor (a setting that differs between stacked runs) counts as not zero."""
    return isinstance(number, Tensor) or bool(number)


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in its order."""
    return tree_leaves(tree)


def add(a: Tree, b: Tree) -> Tree:
    """a + b"""
    return tree_map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b"""
    return tree_map(torch.sub, a, b)


def scale(a: Tree, c: Number) -> Tree:
    """c * a"""
    return tree_map(lambda x: x * c, a)


def axpy(c: Number, x: Tree, y: Tree) -> Tree:
    """y + c * x"""
    if isinstance(c, Tensor):
        return tree_map(lambda xi, yi: yi + c * xi, x, y)
    return tree_map(lambda xi, yi: torch.add(yi, xi, alpha=c), x, y)


def zeros_like(a: Tree) -> Tree:
    """Zeros with the structure, shapes and dtypes of a tree."""
    return tree_map(torch.zeros_like, a)


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """a where the (scalar) condition holds, else b."""
    return tree_map(lambda x, y: torch.where(condition, x, y), a, b)


def norm(a: Tree) -> Tensor:
    """Euclidean norm of all leaves together."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in leaves(a)]))


def mean(stacked: Tree, weights: Tensor) -> Tree:
    """Weighted mean over the leading (client) axis; weights need not add up to 1."""
    share = weights.double() / weights.double().sum()
    shares = {dtype: share.to(dtype) for dtype in {x.dtype for x in leaves(stacked)}}
    return tree_map(lambda x: torch.tensordot(shares[x.dtype], x, dims=1), stacked)


def uniform_mean(stacked: Tree) -> Tree:
    """Unweighted mean over the leading (client) axis."""
    return tree_map(lambda x: x.mean(0), stacked)


def trimmed_mean(stacked: Tree, counts: Tensor, trim: float) -> Tree:
    """Mean, in each coordinate, over the rows for which `counts` is not zero, without the share `trim` of the smallest
    and as many of the largest values; 0.5 gives the median."""
    rows = torch.count_nonzero(counts)
    cut = torch.minimum((trim * rows + 1e-9).long(), (rows - 1) // 2)
    rank = torch.arange(len(counts), device=counts.device)
    kept = (rank >= cut) & (rank < rows - cut)

    def of_leaf(x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 1))
        ordered = torch.where((counts != 0).view(shape), x, torch.inf).sort(0).values
        return torch.where(kept.view(shape), ordered, 0).sum(0) / (rows - 2 * cut)

    return tree_map(of_leaf, stacked)


def take(stacked: Tree, index: Any) -> Tree:
    """Rows of a stacked tree: one client (an integer), or several (a slice or an index tensor)."""
    return tree_map(lambda x: x[index], stacked)


def size_bytes(tree: Tree) -> int:
    """Bytes of all tensors of a tree."""
    return sum(x.numel() * x.element_size() for x in leaves(tree))
