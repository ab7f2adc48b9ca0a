"""What `fedloom doctor` finds out: the machine, what of it FedLoom can use, the cache, and a self-test."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from fedloom import __version__
from fedloom.config.resolve import resolve
from fedloom.core.errors import plural
from fedloom.data.dataset import DATASETS, folders
from fedloom.data.sets.own import OwnData
from fedloom.device.machine import memory_bytes, processor
from fedloom.device.memory import available_memory
from fedloom.nn.kernels.dispatch import DISABLED, KERNELS, TRITON, gpu_obstacle
from fedloom.storage import user_cache
from fedloom.studies.execute import execute

CACHE_KINDS = {"plans": "execution plan", "kernels": "compiled kernel"}
LIBRARIES = {  # modules that the extras of the package install
    "flower": "flwr", "ray": "ray", "onnx": "onnx", "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb",
}  # fmt: skip
TEST = {"dataset": "digits", "clients": 4, "rounds": 2, "eval_every": 2, "seed": 0}
TEST_MODELS = {"cpu": ("mlp",), "cuda": ("mlp", "cnn8")}
MOST_DIFFERENT = 1e-3  # in the mean loss, between clients stacked and one after another, in float32


class Finding(NamedTuple):
    """Something about the machine."""

    part: str  # machine, GPU, packages, cache, data or self-test
    name: str
    value: str
    state: Literal["ok", "missing", "wrong"] = "ok"  # missing: works without it; wrong: something is to be mended


def examine(test: bool = True) -> Iterator[Finding]:
    """All findings, one after another; the self-test trains for some seconds."""
    yield from _machine()
    yield from _gpus()
    yield from _packages()
    yield from _cache()
    yield from _data()
    if test:
        yield from _self_test()


def _machine() -> Iterator[Finding]:
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    yield Finding("machine", "system", platform.platform())
    yield Finding("machine", "processor", f"{processor()}, {plural(cores, 'core')}")
    total, free = memory_bytes() or 0, available_memory(torch.device("cpu"))
    yield Finding("machine", "memory", f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB free")
    limit = os.environ.get("OMP_NUM_THREADS")
    origin = "" if limit is None else f", set by OMP_NUM_THREADS={limit}"
    if threads > cores:
        yield Finding("machine", "threads", f"{threads}{origin}, more than cores: set OMP_NUM_THREADS={cores}", "wrong")
    else:
        yield Finding("machine", "threads", f"{threads}{origin}")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            yield Finding("GPU", "CUDA", "not used: torch was installed without CUDA", "missing")
        else:
            yield Finding("GPU", "CUDA", "not used: no GPU or no driver for it", "missing")
        return
    yield Finding("GPU", "CUDA", f"{torch.version.cuda}, by torch")
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        gpu = torch.cuda.get_device_properties(device)
        free = available_memory(device)
        size = f"{gpu.total_memory / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        yield Finding("GPU", f"cuda:{index}", f"{gpu.name}, {size}, {capability}")
    if TRITON:
        yield Finding("GPU", "Triton", version("triton"))
    else:
        yield Finding("GPU", "Triton", "not installed: custom kernels are not used", "wrong")
    nvrtc = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    yield Finding("GPU", "NVRTC", "with torch" if nvrtc.exists() else "not with this torch", _there(nvrtc.exists()))
    obstacles = {name: "disabled by FEDLOOM_DISABLE_KERNELS" for name in KERNELS if name in DISABLED}
    obstacles |= {name: why for name in KERNELS if name not in obstacles and (why := gpu_obstacle(name))}
    used = [name for name in KERNELS if name not in obstacles]
    yield Finding("GPU", "kernels", ", ".join(used) or "none", _there(bool(used)))
    for name, why in obstacles.items():
        yield Finding("GPU", f"kernel {name}", f"not used: {why}", "missing")


def _there(found: bool) -> Literal["ok", "missing"]:
    return "ok" if found else "missing"


def _packages() -> Iterator[Finding]:
    yield Finding("packages", "fedloom", f"{__version__}, {Path(__file__).parents[1]}")
    yield Finding("packages", "python", platform.python_version())
    for name in ("torch", "numpy", "pyarrow"):
        yield Finding("packages", name, version(name))
    extras = [name for name in LIBRARIES if name in (metadata("fedloom").get_all("Provides-Extra") or ())]
    there = [name for name in extras if find_spec(LIBRARIES[name]) is not None]
    missing = [name for name in extras if name not in there]
    yield Finding("packages", "extras", ", ".join(there) or "none")
    if missing:
        how = f"pip install 'fedloom[{','.join(missing)}]'"
        yield Finding("packages", "other extras", f"not installed: {', '.join(missing)} ({how})", "missing")


def _cache() -> Iterator[Finding]:
    folder = user_cache.cache_folder()
    if not user_cache.is_enabled():
        yield Finding("cache", "folder", f"{folder}, switched off by FEDLOOM_CACHE", "missing")
        return
    why = user_cache.why_not_writable()
    if why is not None:
        text = f"{folder} cannot be written ({why}): every run is planned anew"
        yield Finding("cache", "folder", text, "wrong")
        return
    yield Finding("cache", "folder", str(folder))
    for kind, what in CACHE_KINDS.items():
        count, size = user_cache.contents(kind)
        yield Finding("cache", kind, f"{plural(count, what)}, {size / 1e6:.1f} MB")


def _data() -> Iterator[Finding]:
    names = [name for name in DATASETS.names() if name != OwnData.name]
    there = [n for n in names if DATASETS[n].built_in or any(f.is_dir() for f in folders(DATASETS[n], None))]
    yield Finding("data", "ready", ", ".join(there))
    if missing := [name for name in names if name not in there]:
        yield Finding("data", "not here", f"{', '.join(missing)} (see fedloom data download -h)", "missing")


def _self_test() -> Iterator[Finding]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in ("cpu", *(f"cuda:{index}" for index in range(gpus))):
        for model in TEST_MODELS[device.partition(":")[0]]:
            yield _trained(device, model)


def _trained(device: str, model: str) -> Finding:
    """Whether clients learn the same stacked as one after another."""
    name, start = f"{model} on {device}", time.perf_counter()
    try:
        losses = []
        for how in ({"engine": "reference"}, {"plan": "stacked"}):
            config = {**TEST, "algorithm": "fedrep", "model": model, "device": device, **how}
            losses.append(execute(resolve(config)).last()["pre_train_loss"])
    except Exception as error:  # whatever is wrong with this machine
        return Finding("self-test", name, f"failed: {type(error).__name__}: {str(error).strip()}", "wrong")
    seconds, difference = time.perf_counter() - start, abs(losses[0] - losses[1])
    text = f"loss {losses[0]:.4f}, stacked {losses[1]:.4f}; {seconds:.1f} s"
    if not difference < MOST_DIFFERENT:
        return Finding("self-test", name, f"{text}: they should be equal up to rounding", "wrong")
    return Finding("self-test", name, text)
