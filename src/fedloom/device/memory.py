"""How much memory a device has free, limits for it, and recognising that it ran out."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_limits: dict[str, int] = {}  # bytes that this process may take, by type of device


def available_memory(device: torch.device) -> int:
    """Bytes that are free on a CUDA device, or in main memory, and within the limit of this process."""
    if device.type == "cuda":
        free, taken = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    else:
        free, taken = _free_main_memory(), memory_of_process()
    limit = limit_of_memory(device)
    return free if limit is None else min(free, max(0, limit - taken))


def _free_main_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # this operating system does not say
        return 4 << 30


def memory_of_process() -> int:
    """Bytes of main memory that this process takes now; 0 if the operating system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def limit_of_memory(device: torch.device) -> int | None:
    """The limit within which this process is now (`limited_memory`), or None."""
    return _limits.get(device.type)


@contextmanager
def limited_memory(device: torch.device, limit: int | None) -> Iterator[None]:
    """Within this context, plans are made for so many bytes of the device's memory. A GPU then has no more for tensors
    of this process. None is no limit."""
    if limit is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    before = _limits.get(device.type)
    _limits[device.type] = limit
    try:
        if total:
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        yield
    finally:
        del _limits[device.type]
        if before is not None:
            _limits[device.type] = before
        if total:
            torch.cuda.set_per_process_memory_fraction(1.0 if before is None else min(1.0, before / total), device)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an out-of-memory error is anywhere in the exception chain."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def free_memory() -> None:
    """Collect garbage and return cached CUDA memory to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
