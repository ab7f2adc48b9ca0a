"""Kernels in CUDA's own language, compiled by the library for it that comes with torch (NVRTC)."""

import ctypes
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernels:
    """Those of a file beside this one, compiled for a device with some constants."""

    def __init__(self, file: str, device: torch.device, **constants: int | str) -> None:
        self.library, self.module, self.device = _library(), ctypes.c_void_p(), device
        major, minor = torch.cuda.get_device_capability(device)
        own = "a" if major == 9 else ""  # with what only these chips have
        given = {k: v if isinstance(v, str) else int(v) for k, v in constants.items()}
        options = [f"--gpu-architecture=sm_{major}{minor}{own}", *(f"-D{k}={v}" for k, v in given.items())]
        self._check(self.library.cuModuleLoadData(ctypes.byref(self.module), self._compiled(file, options)))

    def _compiled(self, file: str, options: list[str]) -> ctypes.Array:
        source = files("fedloom.kernels").joinpath(file).read_bytes()
        program, given = ctypes.c_void_p(), (ctypes.c_char_p * len(options))(*map(str.encode, options))
        self._check(self.library.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), 0, None, None))
        try:
            if self.library.nvrtcCompileProgram(program, len(options), given):
                raise RuntimeError(f"{file}: {self._read(program, 'ProgramLog').value.decode()}")
            return self._read(program, "CUBIN")
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
            raise RuntimeError(f"CUDA answers with error {status}.")

    @cache  # noqa: B019
    def _kernel(self, name: str, room: int) -> ctypes.c_void_p:
        kernel = ctypes.c_void_p()
        self._check(self.library.cuModuleGetFunction(ctypes.byref(kernel), self.module, name.encode()))
        self._check(self.library.cuFuncSetAttribute(kernel, _MOST_SHARED, room))
        return kernel

    def launch(self, name: str, grid: tuple[int, ...], threads: int, room: int, *args: Tensor | int | float) -> None:
        """On the current stream, with that many bytes of shared memory; a kernel takes pointers and 64-bit numbers."""
        values = list(map(_value, args))
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        sides = *grid, *(1,) * (3 - len(grid)), threads, 1, 1
        self._check(self.library.cuLaunchKernel(self._kernel(name, room), *sides, room, stream, pointers, None))


def _value(of: Tensor | int | float) -> ctypes.c_int64 | ctypes.c_double:
    if isinstance(of, float):
        return ctypes.c_double(of)
    return ctypes.c_int64(of.data_ptr() if isinstance(of, Tensor) else of)


@cache
def _library() -> ctypes.CDLL:
    """torch's, which brings NVRTC and the driver along."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
