"""Keyed randomness: every draw is a function of (seed, stream, ids), never of what was drawn before.

Two generators serve two places. `rng` is numpy's, for host work that runs once (partitions, client
sampling). A *key* is a 64-bit integer, or an int64 tensor of them, and feeds SplitMix64 written in
integer tensor operations: the same bits on every device, under `vmap`, inside a captured graph, for one
client or for a thousand at once.
"""

import math
import zlib
from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Key: TypeAlias = int  # a key on the host; per-client keys are int64 tensors

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def stream(name: str) -> int:
    return zlib.crc32(name.encode())


def rng(name: str, seed: int, *ids: int) -> np.random.Generator:
    return np.random.default_rng([seed, stream(name), *ids])


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX1) & _WORD
    z = ((z ^ (z >> 27)) * _MIX2) & _WORD
    return z ^ (z >> 31)


def _mix(z: Any) -> Any:
    # int64 has no logical shift: mask off the copies of the sign bit
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(_MIX1)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(_MIX2)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def salt(i: int) -> int:
    """What an id is to a key that it is folded into."""
    return _signed(_mix_int((i + _GOLDEN) & _WORD))


def fold(key: Any, *ids: int | Tensor | np.ndarray) -> Any:
    """A new key from a key and ids; tensors, or numpy's arrays, broadcast, and integers give the same value."""
    for i in ids:
        inner = salt(i) if isinstance(i, int) else _mix(i + _signed(_GOLDEN))
        mixed = key ^ inner
        key = _signed(_mix_int(mixed & _WORD)) if isinstance(mixed, int) else _mix(mixed)
    return key


def root(seed: int, name: str) -> Key:
    """The key that a named stream starts from."""
    return fold(_signed(_mix_int(seed & _WORD)), stream(name))


def roots(seeds: Collection[int], name: str, device: torch.device) -> Tensor:
    """The same for many seeds, of which most are equal."""
    keys = {seed: root(seed, name) for seed in set(seeds)}
    return torch.tensor([keys[seed] for seed in seeds], dtype=torch.int64, device=device)


def bits(key: int | Tensor, counters: Tensor) -> Tensor:
    """64 random bits for every counter."""
    return _mix(key + (counters + 1) * _signed(_GOLDEN))


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uniform in [0, 1). Element j depends on (key, j) alone, so padding rows at the end shift nothing."""
    counters = torch.arange(math.prod(shape), device=key.device).view(shape)
    return ((bits(key, counters) >> 40) & ((1 << 24) - 1)).to(dtype) * 2.0**-24


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Standard normal, by Box and Muller's transform."""
    radius = torch.sqrt(-2 * torch.log1p(-uniform(fold(key, 0), shape, dtype)))
    return radius * torch.cos(2 * math.pi * uniform(fold(key, 1), shape, dtype))


def permutations(keys: Tensor, n: Tensor, total: int | None = None) -> Tensor:
    """Random orders of 0..n[s]-1 for every segment s, one after another in one flat tensor. Who knows the sum of n
    saves a GPU from being asked for it.

    One sort serves all segments; the order within a segment depends on its own key alone.
    """
    segment = torch.repeat_interleave(torch.arange(len(n), device=n.device), n, output_size=total)
    starts = torch.cumsum(n, 0) - n
    position = torch.arange(len(segment), device=n.device) - starts[segment]
    draw = (bits(keys[segment], position) >> 24) & ((1 << 40) - 1)
    return position[torch.argsort((segment << 40) | draw, stable=True)]
