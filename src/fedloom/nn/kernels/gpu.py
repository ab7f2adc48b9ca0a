"""What kernels ask about a GPU: its compute capability, which says what tensor cores it has, and its size.

The environment variable FEDLOOM_GPU names an older architecture, such as sm_86. Kernels are then chosen as for that
one, so that the choices for other GPUs can be tested. It cannot add what a GPU does not have.
"""

import logging
import os
from functools import cache
from typing import NamedTuple

import torch

log = logging.getLogger("fedloom")

Capability = tuple[int, int]
SHARED_KIB: dict[Capability, int] = {  # that a thread block can have, from NVIDIA's CUDA Programming Guide
    (6, 1): 48,
    (7, 0): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
}


class GpuProperties(NamedTuple):
    """What kernels are chosen by."""

    capability: Capability
    sms: int  # streaming multiprocessors
    shared_bytes: int  # of shared memory that a thread block can have


H100 = GpuProperties((9, 0), 132, SHARED_KIB[9, 0] << 10)


def _capability_limit() -> Capability | None:
    """What FEDLOOM_GPU names, or None."""
    value = os.environ.get("FEDLOOM_GPU", "").strip()
    known = {f"sm_{major}{minor}": (major, minor) for major, minor in SHARED_KIB}
    if value and value not in known:
        log.warning("FEDLOOM_GPU is '%s', which has no effect; known: %s.", value, ", ".join(known))
    return known.get(value)


CAPABILITY_LIMIT = _capability_limit()


def gpu_properties(device: torch.device | None = None) -> GpuProperties:
    """Properties of a GPU, by default of the current one, on which Triton launches kernels. Without a GPU, those of an
    H100, so that choices can be tested."""
    if (device is not None and device.type != "cuda") or not torch.cuda.is_available():
        return limited(H100, CAPABILITY_LIMIT)
    index = None if device is None else device.index
    return _query(torch.cuda.current_device() if index is None else index)


def limited(gpu: GpuProperties, capability: Capability | None) -> GpuProperties:
    """The GPU without what GPUs of that compute capability do not have."""
    if capability is None:
        return gpu
    shared_bytes = min(gpu.shared_bytes, SHARED_KIB[capability] << 10)
    return GpuProperties(min(gpu.capability, capability), gpu.sms, shared_bytes)


@cache
def _query(index: int) -> GpuProperties:
    found = torch.cuda.get_device_properties(index)
    capability = found.major, found.minor
    known = SHARED_KIB.get(capability, 48) << 10  # every GPU has 48 KiB
    shared_bytes = getattr(found, "shared_memory_per_block_optin", known)  # torch 2.6 does not say
    return limited(GpuProperties(capability, found.multi_processor_count, shared_bytes), CAPABILITY_LIMIT)
