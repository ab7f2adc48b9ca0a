"""Dropout masks from keys: the SplitMix64 generator of `core.keys` in registers."""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.core.keys import salt
from fedloom.nn.kernels.dropout import kept_factor

BLOCK = 1024


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["salt", "least", "blocks"])
def _factors(keys, y, salt, least, scale, size, blocks, BLOCK: tl.constexpr):
    """Element j of a client is `scale` if the upper 24 bits of its random number are at least `least`, otherwise 0."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    j = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    key = _mix(tl.load(keys + client).to(tl.uint64) ^ salt.to(tl.uint64))
    bits = _mix(key + (j + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    kept = (bits >> 40).to(tl.int32) >= least
    tl.store(y + client * size + j, tl.where(kept, scale, 0.0), mask=j < size)


def dropout_factors(key: Tensor, draw: int, shape: list[int], p: float) -> Tensor:
    """See `fedloom.nn.kernels.dropout`."""
    found = factors(key.reshape(-1), salt(draw), math.prod(shape), p, kept_factor(p))
    return found.view(*key.shape, *shape)


def factors(keys: Tensor, salt: int, size: int, p: float, scale: float) -> Tensor:
    """Factors (n, size) for keys (n,) and the salt of a draw."""
    y = torch.empty(len(keys), size, dtype=torch.float32, device=keys.device)
    least = math.ceil(float(np.float32(p)) * 2**24)  # the formula compares in float32
    blocks = triton.cdiv(size, BLOCK)
    _factors[(blocks * len(keys),)](keys, y, salt, least, scale, size, blocks, BLOCK)
    return y
