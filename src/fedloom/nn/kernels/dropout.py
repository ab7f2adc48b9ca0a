"""Dropout masks from random keys, in one kernel; the formula of `core.keys` would take some twenty."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.keys import fold, uniform
from fedloom.nn.kernels.dispatch import cuda_kernel


@torch.library.custom_op("fedloom::dropout_factors", mutates_args=())
def dropout_factors(key: Tensor, draw: int, shape: list[int], p: float) -> Tensor:
    """The factors that dropout multiplies with, in float32: 1 / (1 - p) where `uniform(fold(key, draw), shape) >= p`,
    else 0. The axes of `key` come before those of `shape`."""
    each = key.view(*key.shape, *[1] * len(shape))
    return (uniform(fold(each, draw), tuple(shape), torch.float32) >= p) * kept_factor(p)


@dropout_factors.register_fake
def _(key: Tensor, draw: int, shape: list[int], p: float) -> Tensor:
    return key.new_empty(*key.shape, *shape, dtype=torch.float32)


def _vmap_over_keys(info: Any, in_dims: tuple[Any, ...], key: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return dropout_factors(key.movedim(in_dims[0], 0), *rest), 0


def kept_factor(p: float) -> float:
    """The factor of numbers that are kept, in float32."""
    return float(1 / np.float32((1 - p) or 1))  # p = 1 keeps nothing


torch.library.register_vmap(dropout_factors, _vmap_over_keys)
cuda_kernel(dropout_factors, "dropout", "dropout", "dropout_factors")
