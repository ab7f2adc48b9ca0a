"""Where kernels of ours compute, and where plain operations do."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

TRITON = find_spec("triton") is not None  # it comes with torch where that has CUDA


def ours(x: Tensor) -> bool:
    """Do kernels of ours take it?"""
    return x.is_cuda and TRITON


def triton(name: str) -> Any:
    """The kernels of that name, which cannot be imported without Triton."""
    return import_module(f"fedloom.kernels.{name}_triton")
