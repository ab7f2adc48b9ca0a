"""What the benchmarks ask of the machine: which one it is, what it can do at best, and how exactly it computes."""

import contextlib
import gc
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

MATMUL = {"cpu": 2048, "cuda": 8192}  # rows and columns
COPY = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes


def describe(device: torch.device) -> str:
    """Hardware, versions and command, for the head of a table."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{where}, {torch.get_num_threads()} threads, {versions}\npython {shlex.join(sys.argv)}\n"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return f"{platform.processor() or platform.machine()} CPU"


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(f: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    f()
    wait(device)
    return time.perf_counter() - start


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """How float32 numbers are multiplied by what has no setting of its own: in full, or with `tf32` in TF32."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.allow_tf32 = was


def autocast(dtype: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The same for bf16, as one writes it by hand."""
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()


def storage(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32


def ceiling(device: torch.device, dtype: str, quick: bool = False) -> tuple[float, float]:
    """FLOP/s of a large matrix product in this precision, and bytes/s of a large copy (read and written)."""
    n, size = (256, 1 << 22) if quick else (MATMUL[device.type], COPY[device.type])
    exact = torch.bfloat16 if dtype == "bf16" else storage(dtype)
    a, b = (torch.randn(n, n, device=device).to(exact) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = [seconds(lambda: a @ b, device) for _ in range(6)][1:]
    copies = [seconds(lambda: target.copy_(source), device) for _ in range(6)][1:]
    return 2 * n**3 / float(np.median(product)), 2 * size / float(np.median(copies))


def forget_peak(device: torch.device) -> None:
    """From here on memory is counted anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> float:
    """The most bytes since then: taken from the GPU, or resident in memory (all of the process)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return float("nan")


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(*names: str) -> None:
    row(*names)
    print("|---" * len(names) + "|", flush=True)


def give_up(sentence: object) -> None:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)
