"""Limits on what is read: regular files only, and no small file that inflates until memory or the disk is full."""

import gzip
import lzma
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from fedloom.core.errors import UserError, reason
from fedloom.device.memory import available_memory

INFLATED = 256 << 20  # bytes that any compressed file may inflate to
RATIO = 200  # larger contents are at most so many times the size of the compressed file
ZIP_DIRECTORY = 32 << 20  # bytes of the list of members of a zip file, which is read into memory
JSON_BYTES = 64 << 20  # of a JSON file that describes data
BLOCK = 1 << 20
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


class BoundedReader:
    """A binary file that gives, while `budget` is set, so many more bytes, and not too many if it inflates `raw`."""

    def __init__(self, file: IO[bytes], raw: IO[bytes], budget: int) -> None:
        self._file, self._raw = file, raw
        self.budget: int | None = budget

    def read(self, size: int = -1) -> bytes:
        """As of a file. Raises a ValueError beyond a bound, when hardly more than the bound has been read."""
        if self._file is not self._raw and self._file.tell() > inflated_limit(self._raw.tell()):
            raise ValueError(f"it inflates to more than {RATIO} times its size")
        if self.budget is None:
            return self._file.read(size)
        data = self._file.read(self.budget + 1 if size < 0 else min(size, self.budget + 1))
        self.budget -= len(data)
        if self.budget < 0:
            raise ValueError("its header is too long")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def require_file(path: Path) -> None:
    """Raise a UserError unless a path is a regular file: to open a pipe or a device may wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}).") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise UserError(f"{path} is {what}, not a file; remove it or give another path.")


def memory_limit() -> int:
    """Half of the memory that is available: the most that one file's contents may take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        available = available_memory(torch.device("cpu"))
    return available // 2


def inflated_limit(compressed: int) -> int:
    """The number of bytes that so many compressed bytes may inflate to."""
    return max(INFLATED, RATIO * compressed)


def check_memory(path: Path, size: int) -> None:
    """Raise a UserError if the contents of a file, `size` bytes, take over half of the free memory."""
    if size > (limit := memory_limit()):
        raise UserError(
            f"{path} holds more than {limit / 2**30:.1f} GiB, half of the free memory; use a part of it, or a machine "
            "with more memory."
        )


def check_inflated(path: Path, size: int, compressed: int, remedy: str = "unpack it first") -> None:
    """Raise a UserError if a file inflates from `compressed` to `size` bytes and that is too much, or for memory."""
    if size > inflated_limit(compressed):
        raise UserError(f"{path} inflates to more than {RATIO} times its size; if that is right, {remedy}.")
    check_memory(path, size)


def read_blocks(path: Path) -> Iterator[bytes]:
    """The contents of a file in blocks, inflated if its name ends with .gz or .xz.

    Raises a UserError as soon as it has inflated too much of what it has read, so time follows the file's size.
    """
    inflate = OPENERS.get(path.suffix.lower())
    size = 0
    with path.open("rb") as raw:
        check_memory(path, os.fstat(raw.fileno()).st_size)
        file = inflate(raw) if inflate else raw
        while block := file.read(BLOCK):
            size += len(block)
            check_inflated(path, size, raw.tell())
            yield block


def open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip file. Raises a ValueError if the list of its members is too long."""
    bounded = BoundedReader(file, file, ZIP_DIRECTORY)
    opened = zipfile.ZipFile(bounded)
    bounded.budget = None
    return opened


def check_npz(path: Path, file: IO[bytes]) -> None:
    """Raise a UserError if the arrays of an .npz file inflate to more than they may; a ValueError if it is none."""
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no zip file")
    with open_zip(file) as members:
        size = sum(member.file_size for member in members.infolist())
    check_inflated(path, size, path.stat().st_size, "save its arrays without compression")
    file.seek(0)
