"""CUDA's kernels on a CPU (see kernels/emulated.cpp), by a compiler that knows C++20."""

import ctypes
import shutil
import struct
import subprocess
from importlib.resources import files
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "kernels" / "emulated.cpp"


class Emulated:
    """Those of a file, by name, with some constants."""

    def __init__(self, folder, file, kernels, **constants):
        source = files("fedloom.kernels").joinpath(file)
        library = folder / (file + "_".join(f"{k}{int(v)}" for k, v in constants.items()) + ".so")
        defined = {"SOURCE": f'"{source}"', "KERNELS": " ".join(f"RUN({name})" for name in kernels)}
        options = [f"-D{k}={int(v)}" for k, v in constants.items()] + [f"-D{k}={v}" for k, v in defined.items()]
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-pthread", *options]
        subprocess.run(["c++", *flags, SOURCE, "-o", library], check=True)
        self.library = ctypes.CDLL(str(library))

    def launch(self, name, grid, threads, room, *args):
        assert room <= 227 << 10  # what a processor has
        values = b"".join(map(_packed, args))
        self.library.launch(name.encode(), *grid, *(1,) * (3 - len(grid)), threads, values)


def _packed(value):
    if isinstance(value, float):
        return struct.pack("d", value)
    return struct.pack("q", value.data_ptr() if isinstance(value, torch.Tensor) else value)


def compiles(source):
    if shutil.which("c++") is None:
        return False
    command = ["c++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0
