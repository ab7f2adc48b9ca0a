"""Keyed randomness: a random number is a function of (seed, stream name, ids), never of what was drawn before.

There are two generators. `rng` returns a NumPy generator, for work on the CPU that is done once (partitions, client
sampling). Everything else uses a *key*: a 64-bit integer, or an int64 tensor of them, from which SplitMix64 in integer
tensor operations computes random bits. They are the same on every device, under `vmap`, in a captured CUDA graph, for
one client or for a thousand at once.
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
    """A 64-bit word as a signed integer, which is what an int64 tensor holds."""
    return z - (1 << 64) if z >> 63 else z


def stream(name: str) -> int:
    """The number of a named random stream, such as "partition" (its CRC-32)."""
    return zlib.crc32(name.encode())


def rng(name: str, seed: int, *ids: int) -> np.random.Generator:
    """A NumPy generator for a named stream; `ids` (a client, a round) give independent generators of one stream."""
    return np.random.default_rng([seed, stream(name), *ids])


def _mix_int(z: int) -> int:
    """SplitMix64's output function on a Python integer."""
    z = ((z ^ (z >> 30)) * _MIX1) & _WORD
    z = ((z ^ (z >> 27)) * _MIX2) & _WORD
    return z ^ (z >> 31)


def _mix(z: Any) -> Any:
    """The same on int64 tensors or NumPy arrays."""
    # int64 has no logical shift: mask off the copies of the sign bit
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(_MIX1)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(_MIX2)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def salt(i: int) -> int:
    """The 64 bits that `fold` combines with a key for the id i. Compute them once to fold one id into many keys."""
    return _signed(_mix_int((i + _GOLDEN) & _WORD))


def fold(key: Any, *ids: int | Tensor | np.ndarray) -> Any:
    """Derive a key from a key and ids, such as a round and a client.

    Tensors and NumPy arrays broadcast and give the same values as integers do.
    """
    for i in ids:
        inner = salt(i) if isinstance(i, int) else _mix(i + _signed(_GOLDEN))
        mixed = key ^ inner
        key = _signed(_mix_int(mixed & _WORD)) if isinstance(mixed, int) else _mix(mixed)
    return key


def root(seed: int, name: str) -> Key:
    """The key of a named stream: derive all others from it with `fold`."""
    return fold(_signed(_mix_int(seed & _WORD)), stream(name))


def roots(seeds: Collection[int], name: str, device: torch.device) -> Tensor:
    """`root` for many seeds, as an int64 tensor; equal seeds are computed once."""
    keys = {seed: root(seed, name) for seed in set(seeds)}
    return torch.tensor([keys[seed] for seed in seeds], dtype=torch.int64, device=device)


def bits(key: int | Tensor, counters: Tensor) -> Tensor:
    """64 random bits, as int64, for every counter (0, 1, 2, ... numbers the draws of a key)."""
    return _mix(key + (counters + 1) * _signed(_GOLDEN))


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uniform in [0, 1). Element j depends on (key, j) alone, so padding at the end does not change the others."""
    counters = torch.arange(math.prod(shape), device=key.device).view(shape)
    return ((bits(key, counters) >> 40) & ((1 << 24) - 1)).to(dtype) * 2.0**-24


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Standard normal, by Box and Muller's transform."""
    radius = torch.sqrt(-2 * torch.log1p(-uniform(fold(key, 0), shape, dtype)))
    return radius * torch.cos(2 * math.pi * uniform(fold(key, 1), shape, dtype))


def permutations(keys: Tensor, n: Tensor, total: int | None = None) -> Tensor:
    """Random permutations of 0..n[s]-1 for every segment s, concatenated in one tensor.

    One sort serves all segments; the order within a segment depends on keys[s] alone. Give `total`, the sum of n, if it
    is known: otherwise a GPU has to be waited for.
    """
    segment = torch.repeat_interleave(torch.arange(len(n), device=n.device), n, output_size=total)
    starts = torch.cumsum(n, 0) - n
    position = torch.arange(len(segment), device=n.device) - starts[segment]
    draw = (bits(keys[segment], position) >> 24) & ((1 << 40) - 1)
    return position[torch.argsort((segment << 40) | draw, stable=True)]
