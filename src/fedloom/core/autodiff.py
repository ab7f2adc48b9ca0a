"""`grad` and `vmap` of the contract.

One client at a time, gradients come from ordinary autograd (353 us a step for a small MLP, where
`torch.func.grad` takes 994); inside `vmap` they come from `torch.func`. Methods write `grad` and need not know.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fedloom.core.tree import Tree

_here = threading.local()


def inside_vmap() -> bool:
    return getattr(_here, "depth", 0) > 0


def vmap(f: Callable[..., Any], in_dims: Any = 0) -> Callable[..., Any]:
    """`torch.func.vmap` that also tells `grad` which way to go. Unkeyed random draws inside are refused."""

    def stacked(*args: Any) -> Any:
        _here.depth = getattr(_here, "depth", 0) + 1
        try:
            return torch.func.vmap(f, in_dims=in_dims, randomness="error")(*args)
        finally:
            _here.depth -= 1

    return stacked


def grad(f: Callable[[Tree], tuple[Tensor, Tree]], at: Tree) -> tuple[Tree, Tree]:
    """For f(at) -> (loss, aux): the gradient of the loss with the structure of `at`, and aux."""
    if inside_vmap():
        return torch.func.grad(f, has_aux=True)(at)
    flat, spec = tree_flatten(at)
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in flat]
        loss, aux = f(tree_unflatten(inputs, spec))
        found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return tree_unflatten(list(found), spec), tree_map(lambda x: x.detach(), aux)
