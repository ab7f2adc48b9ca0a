"""Operators over stacked clients, which are the first axis of all their tensors."""

from typing import Any

import torch
from torch import Tensor


def over_clients(op: Any, tensors: int) -> None:
    """A rule for one more axis of clients: it joins the one that is there. So many of the first arguments are tensors
    (or None)."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        joined = [
            a if a is None else (a.expand(size, *a.shape) if d is None else a.movedim(d, 0)).flatten(0, 1)
            for a, d in zip(args[:tensors], in_dims, strict=False)
        ]
        found = op(*joined, *args[tensors:])
        if isinstance(found, Tensor):
            return found.unflatten(0, (size, -1)), 0
        return tuple(v.unflatten(0, (size, -1)) for v in found), (0,) * len(found)

    torch.library.register_vmap(op, rule)
