"""CUDA C++ kernels on a CPU (see nn/kernels/emulated.cpp), built by a compiler that knows C++20."""

import ctypes
import os
import shutil
import struct
import subprocess
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from filelock import FileLock

SOURCE = Path(__file__).parent / "nn" / "kernels" / "emulated.cpp"
MAX_SHARED = 227 << 10  # bytes of shared memory that a thread block can have on a Hopper GPU


class Emulated:
    """The kernels of a .cu file, compiled for the CPU with some preprocessor constants; used as a `CudaModule`."""

    def __init__(self, folder, file, kernels, **constants):
        source = files("fedloom.nn.kernels.hopper").joinpath(file)
        library = folder / (file + "_".join(f"{k}{int(v)}" for k, v in constants.items()) + ".so")
        defined = {"SOURCE": f'"{source}"', "KERNELS": " ".join(f"RUN({name})" for name in kernels)}
        options = [f"-D{k}={int(v)}" for k, v in constants.items()] + [f"-D{k}={v}" for k, v in defined.items()]
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-pthread", *options]
        with FileLock(f"{library}.lock"):
            if not library.exists():
                subprocess.run(["c++", *flags, SOURCE, "-o", library], check=True)
        self.library = ctypes.CDLL(str(library))

    def launch(self, name, grid, threads, shared, *args):
        """Run a kernel; arguments are tensors and numbers."""
        assert shared <= MAX_SHARED
        values = b"".join(map(_packed, args))
        self.library.launch(name.encode(), *grid, *(1,) * (3 - len(grid)), threads, values)


def _packed(value):
    if isinstance(value, float):
        return struct.pack("d", value)
    return struct.pack("q", value.data_ptr() if isinstance(value, torch.Tensor) else value)


def session_folder(tmp_path_factory):
    """A folder for the whole test session: all workers of pytest-xdist share it, so that each file is built once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    folder.mkdir(exist_ok=True)
    return folder


@cache
def compiles(source):
    """True if there is a C++ compiler that accepts the source."""
    if shutil.which("c++") is None:
        return False
    command = ["c++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0
