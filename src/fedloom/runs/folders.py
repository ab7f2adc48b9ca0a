"""Folders of runs and studies: what they hold, whether they may be used, and who is using them."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedloom.config.resolve import difference
from fedloom.core.errors import UserError, oserror_as_user_error
from fedloom.storage.files import TEMPORARY

log = logging.getLogger("fedloom")

LOCK = ".lock"
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
    """Raise UserError if a folder is to be continued with another configuration than it was started with."""
    changed = difference(old, new)
    if changed is not None:
        name, was, is_ = changed
        raise UserError(f"{path} was started with {name}={was}, not {is_}; resume it as it is, or start a new one.")


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the folder's lock; raises UserError if another process has it."""
    lock = FileLock(path / LOCK)
    with oserror_as_user_error(path):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"{path} is in use by another process; wait for it or stop it.") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Write messages to a file, too, except those that `log_only_to` directs to another folder."""
    with oserror_as_user_error(path):
        handler = logging.FileHandler(path, encoding="utf-8")
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
        handler.close()


def is_empty(path: Path) -> bool:
    """True if the folder has no results: nothing, or only what a run leaves that was killed at its start."""
    leftovers = ("run.log", LOCK)
    return not path.exists() or all(f.name in leftovers or f.name.endswith(TEMPORARY) for f in path.iterdir())


@contextmanager
def log_only_to(folder: Path) -> Iterator[None]:
    """Within this context, messages go to this folder's log, not to those of other runs in the same process."""
    token = _log_target.set(folder)
    try:
        yield
    finally:
        _log_target.reset(token)
