"""Dropout from keys in one kernel, where the formula of `core.keys` is some twenty."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.keys import fold, salt, uniform
from fedloom.kernels.ours import ours, triton


@torch.library.custom_op("fedloom::dropout_factors", mutates_args=())
def dropout_factors(key: Tensor, draw: int, shape: list[int], p: float) -> Tensor:
    """What dropout multiplies with, in float32: 1 / (1 - p) where `uniform(fold(key, draw), shape) >= p`, else 0. Many
    keys give as many leading axes."""
    scale = float(1 / np.float32((1 - p) or 1))  # p = 1 keeps nothing
    if ours(key):
        found = triton("dropout").factors(key.reshape(-1), salt(draw), math.prod(shape), p, scale)
        return found.view(*key.shape, *shape)
    each = key.view(*key.shape, *[1] * len(shape))
    return (uniform(fold(each, draw), tuple(shape), torch.float32) >= p) * scale


@dropout_factors.register_fake
def _(key: Tensor, draw: int, shape: list[int], p: float) -> Tensor:
    return key.new_empty(*key.shape, *shape, dtype=torch.float32)


def _over_keys(info: Any, in_dims: tuple[Any, ...], key: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return dropout_factors(key.movedim(in_dims[0], 0), *rest), 0


torch.library.register_vmap(dropout_factors, _over_keys)
