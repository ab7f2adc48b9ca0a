"""Compiles Triton kernels for GPUs that are not there, with the tiles that are chosen for them: the launching functions
are called with tensors without memory, and only compile.

Prints as JSON, for every compute capability and kernel, the bytes of shared memory of a thread block, and whether
tensor cores are used. A program of its own, because tests import Triton with its interpreter.
"""

import json
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fedloom.engine.planning.tuning import TILES
from fedloom.nn.kernels import gpu
from fedloom.nn.kernels.matmul import choose_tiles
from fedloom.nn.kernels.triton import (
    batch_gather,
    channel_sum,
    convolution,
    cross_entropy,
    dropout,
    lstm,
    matmul,
    pooling,
)


def tensor(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def splits(*shape):
    return tensor(*shape, dtype=torch.bfloat16)


def ids(*shape):
    return tensor(*shape, dtype=torch.int64)


def largest(part):
    """The largest tiles of a convolution."""
    return max(
        ([int(v) for v in algo.split()] for algo in TILES[part]), key=lambda tiles: (tiles[0] + tiles[1]) * tiles[2]
    )


def wide_lstm():
    """Many units and few samples, which take most shared memory."""
    z, states = tensor(50, 3, 10, 400), tensor(50, 3, 10, 100)
    first, w, bias = states[:, 0], tensor(50, 400, 100), tensor(50, 400)
    lstm.forward(z, first, first, w, bias, True, "tf32x3")
    lstm.backward(states, states, z, first, states, w, "tf32x3")


def correlate(tiles):
    shape = [1, 1], [1, 1], False, tiles
    convolution.correlate(splits(2, 3, 8, 9, 9, 64), splits(2, 3, 128, 3, 3, 64), None, *shape)


def weight_gradient(tiles):
    shape = [128, 64], [3, 3], [1, 1], [1, 1], tiles
    convolution.weight_gradient(splits(2, 3, 8, 9, 9, 64), splits(2, 3, 8, 9, 9, 128), *shape)


def on_any_gpu():
    """Kernels without tensor cores."""
    images, pooled = tensor(2, 8, 16, 8, 8), tensor(2, 8, 16, 4, 4)
    places = tensor(pooled.shape, dtype=torch.int8)
    pooling.max_pool(images, [2, 2], [4, 4], True, True)
    pooling.max_unpool(pooled, places, [8, 8], [2, 2])
    channel_sum.channel_sums(pooled, places)
    cross_entropy.terms(tensor(2, 10, 1, 62), ids(2, 10, 1), tensor(2, 10))
    cross_entropy.gradient(tensor(2), tensor(2, 10, 1, 62), ids(2, 10, 1), tensor(2, 10))
    batch_gather.gather_batch(ids(4, 5, 14), ids(1), tensor(100, 1, 28, 28), ids(100), 5, [10], torch.float32)
    dropout.factors(ids(5), 4, 1000, 0.5, 2.0)


def small_products():
    correlate([16, 16, 16, 4, 3])
    matmul.batched_matmul(tensor(2, 16, 64), tensor(2, 64, 16), [16, 16, 16, 4, 3])


def large_products():
    correlate(largest("output"))
    weight_gradient(largest("weights"))
    a, b = tensor(50, 20, 1024), tensor(50, 1024, 512)  # for the largest tiles, with four stages
    matmul.batched_matmul(a, b, choose_tiles(a, b))


CALLS = {
    (7, 0): [on_any_gpu],
    (7, 5): [on_any_gpu, small_products],
    (8, 0): [wide_lstm],
    (8, 6): [wide_lstm, large_products],
}


def compile_for(capability):
    """What the kernels of all calls for a GPU take."""
    found = {}

    def compiled_only(kernel, grid):
        def launch(*args, **options):
            done = kernel.run(*args, grid=grid, warmup=True, **options)
            found[done.metadata.name] = [done.metadata.shared, "mma" in done.asm["ptx"]]

        return launch

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: target.arch, get_current_stream=lambda device: 0
    )
    triton.runtime.driver.set_active(driver)
    JITFunction.__getitem__ = compiled_only
    gpu.CAPABILITY_LIMIT = capability  # without a GPU, an H100 is assumed
    for call in CALLS[capability]:
        call()
    return found


if __name__ == "__main__":
    json.dump([[capability, compile_for(capability)] for capability in CALLS], sys.stdout)
