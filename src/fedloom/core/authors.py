"""Where an author's method failed: the function, the file, the line."""

import linecache
import traceback
from pathlib import Path

from fedloom.core.algorithm import Algorithm

VMAP = ("data-dependent control flow", "torch.vmap", "vmap:", ".item()", "dynamic shape")  # in messages of torch
BRANCH = "branches on the value of a tensor; compute both branches and use where"
DRAW = "draws random numbers without a key; use normal or uniform of fedloom.core.keys with info.key or batch.key"


def is_own(cls: type) -> bool:
    """True for a class that does not come with FedLoom."""
    return not cls.__module__.startswith("fedloom.")


def source_files(cls: type[Algorithm]) -> set[str]:
    """Files in which an author has written functions of a method."""
    found = set()
    for one in cls.__mro__:
        if is_own(one):
            codes = (getattr(f, "__code__", None) for f in vars(one).values())
            found |= {code.co_filename for code in codes if code is not None and code.co_filename != "<string>"}
    return found


def describe_failure(error: BaseException, cls: type[Algorithm], files: set[str] | None = None) -> str | None:
    """What went wrong in an author's function, with its name and the line; None if the error comes from elsewhere."""
    files = source_files(cls) if files is None else files
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not frames:
        return None
    called, last = frames[0], frames[-1]
    line = (last.line or linecache.getline(last.filename, last.lineno or 0)).strip()
    where = f"{Path(last.filename).name}, line {last.lineno}" + (f": {line}" if line else "")
    return f"{called.name} of '{cls.name}' {_what(error)} ({where})"


def _what(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    if isinstance(error, KeyError):
        return f"asks for {text}, which is not there"
    if isinstance(error, RuntimeError) and "random operation" in text:
        return DRAW
    if isinstance(error, RuntimeError) and any(word in str(error) for word in VMAP):
        return BRANCH
    return f"raised {type(error).__name__}" + (f": {text}" if text else "")
