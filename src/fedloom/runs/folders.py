"""Folders of runs and studies: what they hold, whether they may be used, and who is using them."""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from fedloom.config.files import check_format, written_format
from fedloom.config.resolve import difference
from fedloom.core.errors import UserError, oserror_as_user_error
from fedloom.storage.files import TEMPORARY, Damaged
from fedloom.storage.manifest import MANIFEST, Manifest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("fedloom")

LOCK = ".lock"
NO_FOLDER_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_log_target: ContextVar[Path | None] = ContextVar("log_target", default=None)

KINDS = {  # by the file with the configuration: what the folder is, and the command that continues it
    "config.yaml": ("run directory", "a single run", "run"),
    "compare.yaml": ("comparison", "a comparison", "compare"),
    "sweep.yaml": ("sweep", "a sweep", "sweep"),
}


def check_kind(path: Path, file: str) -> None:
    """Raise UserError unless the folder has this file, which says whether it is a run, a comparison or a sweep."""
    what = KINDS[file][0]
    if not path.is_dir():
        raise UserError(f"There is no {what} {path}.")
    if (path / file).exists():
        return
    for other, (_, name, command) in KINDS.items():
        if (path / other).exists():
            raise UserError(f"{path} holds {name}; use 'fedloom {command} --resume {path}'.")
    raise UserError(f"{path} is not a {what}: it has no {file}.")


def open_manifest(path: Path, file: str, skip: str | None = None) -> Manifest:
    """The manifest of a folder of a run or a study, of which `file` has the configuration, after all its files were
    verified, except those in the subfolder `skip`. A folder of format 1 has none, and cannot be verified."""
    check_kind(path, file)
    with reported_damage(path):
        _refuse_pipes(path)
    written, manifest = written_format(path / file), Manifest(path)
    check_format({"format": written}, str(path / file))
    with reported_damage(path):
        if manifest.exists():
            manifest.load()
            manifest.verify([name for name in manifest.files if skip is None or not name.startswith(f"{skip}/")])
        elif written > 1:
            raise Damaged(f"{MANIFEST} is missing")
    return manifest


def _refuse_pipes(path: Path) -> None:
    """Raise Damaged for a pipe or a device in a folder or a folder in it: to open one may wait for ever."""
    for pattern in ("*", "*/*"):
        for found in path.glob(pattern):
            if found.exists() and not found.is_file() and not found.is_dir():
                raise Damaged(f"{found.relative_to(path)} is a pipe, a socket or a device")


@contextmanager
def reported_damage(path: Path) -> Iterator[None]:
    """Within this context, damage of a file in this folder becomes a UserError."""
    try:
        yield
    except Damaged as error:
        raise UserError(f"{path} is damaged: {error}; restore that file, or start a new run.") from None


def check_empty(path: Path) -> None:
    """Raise UserError unless the folder does not exist yet or is empty."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; give a folder that does not exist yet.")
    with oserror_as_user_error(path):
        if any((path / name).exists() for name in KINDS):
            raise UserError(f"{path} is in use already; continue with --resume {path}, or give another folder.")
        if not is_empty(path):
            raise UserError(f"{path} is not empty; give a folder that does not exist yet.")


def check_same(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Raise UserError if a folder is to be continued with another configuration than it was started with. It may get
    more rounds."""
    before = old.get("rounds")
    if isinstance(before, int) and new["rounds"] > before:
        old = {**old, "rounds": new["rounds"]}
    changed = difference(old, new)
    if changed is not None:
        name, was, is_ = changed
        raise UserError(f"{path} was started with {name}={was}, not {is_}; resume it as it is, or start a new one.")


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the folder's lock; raises UserError if another process has it.

    The folder itself is locked, because a file in it could be removed while a process holds its lock. Where folders
    cannot be locked, as on Windows and on some network drives, a file is.
    """
    with contextlib.ExitStack() as stack:
        with oserror_as_user_error(path):
            _lock_folder(path, stack)
        yield


def _lock_folder(path: Path, stack: contextlib.ExitStack) -> None:
    in_use = UserError(f"{path} is in use by another process; wait for it or stop it.")
    if fcntl is not None:
        handle = os.open(path, os.O_RDONLY)
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            raise in_use from None
        except OSError as error:
            if error.errno not in NO_FOLDER_LOCKS:
                raise
    try:
        stack.enter_context(FileLock(path / LOCK, timeout=0))
    except Timeout:
        raise in_use from None


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Write messages to a file, too, except those that `log_only_to` directs to another folder."""
    with oserror_as_user_error(path):
        handler = logging.StreamHandler(_open_log(path))
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a failing log does not stop a run
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(lambda record: _log_target.get() in (None, path.parent))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk
            handler.stream.close()


def _open_log(path: Path) -> TextIO:
    """A log file to append to; nothing but a file is opened, and links are not followed."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise UserError(f"{path} is not a file; remove it.")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return open(os.open(path, flags, 0o666), "a", encoding="utf-8")


def is_empty(path: Path) -> bool:
    """True if the folder has no results: nothing, or only what a run leaves that was killed at its start."""
    leftovers = ("run.log", MANIFEST, LOCK)
    return not path.exists() or all(f.name in leftovers or f.name.endswith(TEMPORARY) for f in path.iterdir())


@contextmanager
def log_only_to(folder: Path) -> Iterator[None]:
    """Within this context, messages go to this folder's log, not to those of other runs in the same process."""
    token = _log_target.set(folder)
    try:
        yield
    finally:
        _log_target.reset(token)
