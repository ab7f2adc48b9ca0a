"""Global settings of torch, changed for the duration of a context."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use so many intra-op threads, which change the last bits of a result; 0 leaves their number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Round products of float32 to TF32 only if the dtype of a run allows it (tf32, bf16)."""
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = dtype in ("tf32", "bf16")
        yield
    finally:
        for place, allowed in zip(places, before, strict=True):
            place.allow_tf32 = allowed


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Use deterministic algorithms only, if enabled."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # no uninitialized memory is read here
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
