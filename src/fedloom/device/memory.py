"""How much memory a device has free, and recognising that it ran out."""

import gc
import os

import torch


def available_memory(device: torch.device) -> int:
    """Bytes that are free on a CUDA device, or in main memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # this operating system does not say
        return 4 << 30


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
