"""Between main memory and the device. A GPU works off what it is given while the program goes on, so a round passes
everything to it through `onto`, which does not wait, and asks for numbers through `fetch`, which does, seldom."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.core.tree import Tree, tree_map

PINNED = 1 << 26  # bytes that are copied from pinned memory at most; it is never given back


def onto(device: torch.device, values: np.ndarray | Tensor) -> Tensor:
    """The values on the device; on a CPU, in the memory they are in.

    A copy from ordinary memory waits for everything that was launched before. One from pinned memory does not, and
    torch reuses that memory only after the stream has passed the copy.
    """
    there = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and there.device.type == "cpu" and 0 < there.nbytes <= PINNED:
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


def fetch(tree: Tree) -> Tree:
    """The tree with arrays in the place of tensors: waits for the device."""
    return tree_map(lambda v: v.cpu().numpy() if isinstance(v, Tensor) else v, tree)


def copy_all(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Onto others of their shapes, with a launch for all of a kind."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for there, here in zip(to, tensors, strict=True):
        for group, v in zip(kinds.setdefault(here.dtype, ([], [])), (there, here), strict=True):
            group.append(v)
    for there_all, here_all in kinds.values():
        torch._foreach_copy_(there_all, here_all)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    found = [torch.empty_like(v) for v in tensors]
    copy_all(found, tensors)
    return found
