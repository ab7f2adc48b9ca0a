"""Unpacks zip and tar files: nothing outside of a folder, no links, no more than the disk holds."""

import bz2
import gzip
import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import IO, Any

from fedloom.core.errors import oserror_as_user_error, reason
from fedloom.data.limits import RATIO, BoundedReader, open_zip

BLOCK = 1 << 16
FILE_OVERHEAD = 4096  # bytes that even an empty file takes on disk
TAR_HEADER = 1 << 20  # bytes of the headers of one member of a tar file, which are read into memory
COMPRESSIONS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


class ArchiveError(Exception):
    """An archive cannot be unpacked."""


def extract(archive: Path, into: Path, limit: int) -> None:
    """Extract an archive into a folder. Raises an ArchiveError if it is damaged, has links or devices, would write
    outside of the folder, does not fit on the disk, or unpacks to more than `limit` bytes."""
    free = remaining = shutil.disk_usage(into).free
    allowed = limit
    try:
        for name, kind, size, opened in _members(archive):
            parts = PureWindowsPath(name)  # splits at both kinds of slashes, and knows drives
            if parts.anchor or ".." in parts.parts or "\0" in name:
                raise ArchiveError(f"its member {name!r} would be written outside of the folder")
            if kind == "file" and not parts.parts:
                raise ArchiveError("it has a file without a name")
            if kind == "other":
                raise ArchiveError(f"its member {name!r} is a link or a device, not a file")
            remaining, allowed = remaining - size - FILE_OVERHEAD, allowed - size
            if remaining < 0:
                raise ArchiveError(f"it unpacks to more than the {free} bytes that are free on the disk")
            if allowed < 0:
                raise ArchiveError(f"it unpacks to more than {RATIO} times its size")
            target = into.joinpath(*parts.parts)
            with oserror_as_user_error(target):
                (target if kind == "folder" else target.parent).mkdir(parents=True, exist_ok=True)
            if kind == "file":
                with opened() as member, _open_for_writing(target) as file:
                    while block := member.read(BLOCK):
                        with oserror_as_user_error(target):
                            file.write(block)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ArchiveError(f"it is no whole archive: {reason(error)}") from error
    except (RuntimeError, NotImplementedError, ValueError, OSError, MemoryError) as error:  # encrypted, damaged, ...
        raise ArchiveError(f"it cannot be unpacked: {reason(error)}") from error


@contextmanager
def _open_for_writing(target: Path) -> Iterator[IO[bytes]]:
    """A file open for writing; errors of opening and closing it are UserErrors, others pass."""
    with oserror_as_user_error(target):
        file = target.open("wb")
    try:
        yield file
    finally:
        with oserror_as_user_error(target):
            file.close()


Member = tuple[str, str, int, Callable[[], Any]]  # name, kind ("file", "folder" or "other"), size, function to open it


def _members(archive: Path) -> Iterator[Member]:
    """The members of a zip or tar file. Raises a ValueError if a header is too long or a tar file inflates too much."""
    with archive.open("rb") as file:
        if zipfile.is_zipfile(file):
            with open_zip(file) as zip_file:
                for info in zip_file.infolist():
                    mode = stat.S_IFMT(info.external_attr >> 16)
                    plain = mode in (0, stat.S_IFREG, stat.S_IFDIR)
                    kind = "other" if not plain else "folder" if info.filename.endswith("/") else "file"
                    yield info.filename, kind, info.file_size, partial(zip_file.open, info)
            return
        file.seek(0)
        start = file.read(6)
        file.seek(0)
        inflate = next((opener for magic, opener in COMPRESSIONS.items() if start.startswith(magic)), None)
        stream = BoundedReader(inflate(file) if inflate else file, file, TAR_HEADER)
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps all of them
                stream.budget = None
                kind = "folder" if member.isdir() else "file" if member.isfile() else "other"
                yield member.name, kind, member.size, partial(tar.extractfile, member)
                stream.budget = TAR_HEADER
            stream.budget = None
            while stream.read(BLOCK):
                pass  # read to the end, where gzip's checksum is
