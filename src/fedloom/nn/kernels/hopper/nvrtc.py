"""Compiling CUDA C++ with NVRTC, which comes with torch."""

import ctypes
import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from fedloom.storage import user_cache

CACHED = "kernels"  # their folder in the user's cache
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaModule:
    """The kernels of a file in this folder, compiled for a device with some preprocessor constants."""

    def __init__(self, file: str, device: torch.device, **constants: int | str) -> None:
        self.library, self.module, self.device = _library(), ctypes.c_void_p(), device
        major, minor = torch.cuda.get_device_capability(device)
        suffix = "a" if major == 9 else ""  # with the instructions that only Hopper has
        given = {k: v if isinstance(v, str) else int(v) for k, v in constants.items()}
        options = [f"--gpu-architecture=sm_{major}{minor}{suffix}", *(f"-D{k}={v}" for k, v in given.items())]
        self._check(self.library.cuModuleLoadData(ctypes.byref(self.module), self._compiled(file, options)))

    def _compiled(self, file: str, options: list[str]) -> bytes:
        """The compiled file, if possible from an earlier process."""
        source = files("fedloom.nn.kernels.hopper").joinpath(file).read_bytes()
        inputs = {"source": hashlib.sha256(source).hexdigest(), "options": options, "cuda": torch.version.cuda}
        name = f"{user_cache.digest(inputs)}.cubin"
        found = user_cache.find(CACHED, name, user_cache.without_checksum)
        if found is None:
            found = self._compile(file, source, options)
            user_cache.keep(CACHED, name, user_cache.with_checksum(found))
        return found

    def _compile(self, file: str, source: bytes, options: list[str]) -> bytes:
        program, given = ctypes.c_void_p(), (ctypes.c_char_p * len(options))(*map(str.encode, options))
        self._check(self.library.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), 0, None, None))
        try:
            if self.library.nvrtcCompileProgram(program, len(options), given):
                raise RuntimeError(f"{file}: {self._read(program, 'ProgramLog').value.decode()}")
            return self._read(program, "CUBIN").raw
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> ctypes.Array:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, text))
        return text

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status}.")

    @cache  # noqa: B019
    def _kernel(self, name: str, shared: int) -> ctypes.c_void_p:
        kernel = ctypes.c_void_p()
        self._check(self.library.cuModuleGetFunction(ctypes.byref(kernel), self.module, name.encode()))
        self._check(self.library.cuFuncSetAttribute(kernel, _MAX_DYNAMIC_SHARED, shared))
        return kernel

    def launch(self, name: str, grid: tuple[int, ...], threads: int, shared: int, *args: Tensor | int | float) -> None:
        """Launch a kernel on the current stream with so many bytes of dynamic shared memory. Arguments are passed as
        pointers and 64-bit numbers."""
        values = list(map(_value, args))
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        sides = *grid, *(1,) * (3 - len(grid)), threads, 1, 1
        self._check(self.library.cuLaunchKernel(self._kernel(name, shared), *sides, shared, stream, pointers, None))


def _value(of: Tensor | int | float) -> ctypes.c_int64 | ctypes.c_double:
    if isinstance(of, float):
        return ctypes.c_double(of)
    return ctypes.c_int64(of.data_ptr() if isinstance(of, Tensor) else of)


@cache
def _library() -> ctypes.CDLL:
    """torch's library that gives access to NVRTC and the driver."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
