"""Copies between main memory and the device.

A GPU works asynchronously: the program enqueues work and goes on. `to_device` keeps it so; `to_numpy` waits for all
work that was enqueued before, so a round calls it once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

MAX_PINNED_BYTES = 1 << 26  # larger copies are not pinned, because torch never returns pinned memory to the system


def to_device(device: torch.device, values: np.ndarray | Tensor) -> Tensor:
    """The values as a tensor on the device, without waiting for the device; on a CPU, without a copy.

    A copy from pageable memory would wait for all work on the stream. A copy from pinned memory does not, and torch
    reuses the pinned memory only after the stream has passed the copy.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and tensor.device.type == "cpu" and 0 < tensor.nbytes <= MAX_PINNED_BYTES:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_numpy(tree: Any) -> Any:
    """The tree with NumPy arrays in place of tensors. Waits for the device."""
    return tree_map(lambda v: v.cpu().numpy() if isinstance(v, Tensor) else v, tree)


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in place, with one foreach kernel per dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = by_dtype.setdefault(source.dtype, ([], []))
        group[0].append(target)
        group[1].append(source)
    for group_targets, group_sources in by_dtype.values():
        torch._foreach_copy_(group_targets, group_sources)


def clone_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, with one foreach kernel per dtype."""
    clones = [torch.empty_like(v) for v in tensors]
    copy_tensors(clones, tensors)
    return clones
