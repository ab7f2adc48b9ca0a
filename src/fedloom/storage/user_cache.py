"""The folder of the user in which FedLoom keeps what later processes can use again: data sets that were downloaded,
execution plans that were measured, compiled kernels.

Everything in it can be deleted at any time. It never breaks a run: what cannot be read or written, or is damaged, is
made again. FEDLOOM_CACHE=off switches it off for plans and kernels.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError, oserror_as_user_error
from fedloom.storage.files import Writer, write_file

log = logging.getLogger("fedloom")

MOST_FILES = 1000  # of one kind; beyond, those that were used longest ago are removed


def cache_folder() -> Path:
    """The folder, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"


def is_enabled() -> bool:
    """False if the user has switched the cache off."""
    return os.environ.get("FEDLOOM_CACHE", "").lower() not in ("off", "0", "no", "false")


def digest(inputs: Mapping[str, Any]) -> str:
    """The name under which something is kept that was made from these inputs, which are plain data."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def find(kind: str, name: str, read: Callable[[bytes], Any]) -> Any:
    """What was kept under a name, as `read` makes it from the bytes; None if there is nothing that it can read."""
    path = cache_folder() / kind / name
    if not is_enabled():
        return None
    try:
        found = read(path.read_bytes())
        os.utime(path)
    except FileNotFoundError:
        return None
    except Exception:  # a file in a cache may contain anything
        log.debug("%s cannot be used.", path, exc_info=True)
        return None
    return found


def keep(kind: str, name: str, writer: Writer) -> None:
    """Keep something for later processes, if that can be done."""
    folder = cache_folder() / kind
    if not is_enabled():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, writer)
        _remove_oldest(folder)
    except (OSError, UserError, RuntimeError):  # a home that is full, read-only, or not there
        log.debug("%s cannot be written.", folder / name, exc_info=True)


def with_checksum(content: bytes) -> Writer:
    """Writes bytes that are verified when they are read again, by `without_checksum`."""
    return lambda file: file.write(hashlib.sha256(content).digest() + content)


def without_checksum(content: bytes) -> bytes:
    """The bytes that were written by `with_checksum`. Raises ValueError if they have changed."""
    found, rest = content[:32], content[32:]
    if hashlib.sha256(rest).digest() != found:
        raise ValueError("it was changed after it was written")
    return rest


def contents(kind: str) -> tuple[int, int]:
    """The number of files of a kind, and their bytes."""
    try:
        with os.scandir(cache_folder() / kind) as entries:
            sizes = [entry.stat().st_size for entry in entries if entry.is_file()]
    except OSError:
        return 0, 0
    return len(sizes), sum(sizes)


def clear(kind: str) -> int:
    """Remove the files of a kind; returns how many there were."""
    count, _ = contents(kind)
    if count:
        folder = cache_folder() / kind
        with oserror_as_user_error(folder):
            shutil.rmtree(folder)
    return count


def why_not_writable() -> str | None:
    """What keeps this process from writing to the folder, or None."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _remove_oldest(folder: Path) -> None:
    with os.scandir(folder) as entries:
        found = sorted((entry.stat().st_mtime, entry.path) for entry in entries if entry.is_file())
    for _, path in found[:-MOST_FILES]:
        os.unlink(path)
