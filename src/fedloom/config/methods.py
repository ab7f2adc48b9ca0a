"""Methods from anywhere: the class that `./my_method.py`, `my_method.py:Class` or `package.module:Class` names.

A run directory remembers where its method came from, as one text: the place, and a checksum of the file.
"""

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from fedloom.core.algorithm import ALGORITHMS, Algorithm
from fedloom.core.authors import describe_failure, is_own
from fedloom.core.errors import UserError, check_path, nearest, reason, shown

log = logging.getLogger("fedloom")

FROM = "from"  # key of the section `algorithm`; no setting can have this name, because Python does not allow it
FILE = re.compile(r"(?P<file>.*\.py)(?::(?P<rest>.*))?", re.DOTALL)
MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<cls>[A-Za-z_]\w*)")
CHECKSUM = " sha256="
_places: dict[type[Algorithm], str] = {}  # where classes came from, with checksums


def find_method(text: str) -> type[Algorithm]:
    """The class of a method, by its name or by where it is."""
    return load_method(text) if is_place(text) else ALGORITHMS[text]


def is_place(text: str) -> bool:
    """True for a text that says where a method is, and is not the name of one."""
    return bool(FILE.fullmatch(text) or MODULE.fullmatch(text)) or "/" in text or os.sep in text


def split_settings(text: str) -> tuple[str, str | None]:
    """A method's name or place, and the settings behind it, if there are any: `ditto` and `lam=0.5`, `./my.py:Mine` and
    `lam=0.5`."""
    if found := FILE.fullmatch(text):
        first, colon, rest = (found["rest"] or "").partition(":")
        if found["rest"] is None or (not colon and first.isidentifier()):
            return text, None
        return (found["file"], found["rest"]) if "=" in first else (f"{found['file']}:{first}", rest)
    pieces = text.split(":")
    if len(pieces) > 1 and MODULE.fullmatch(place := ":".join(pieces[:2])) and pieces[0] not in ALGORITHMS.names():
        return place, ":".join(pieces[2:]) if len(pieces) > 2 else None
    name, colon, rest = text.partition(":")
    return name, rest if colon else None


def load_method(place: str) -> type[Algorithm]:
    """The class at a place. Raises UserError, with one sentence, for whatever is wrong with it."""
    check_path(place)
    if found := FILE.fullmatch(place):
        shown_as, wanted = found["file"], found["rest"]
        module, at = _load_file(Path(shown_as)), str(Path(shown_as).absolute())
    elif found := MODULE.fullmatch(place):
        shown_as, wanted = found["module"], found["cls"]
        module, at = _load_module(shown_as), shown_as
    else:
        raise UserError(f"'{shown(place)}' is no method; give a file that ends in .py, or package.module:Class.")
    cls = _chosen(module, wanted, shown_as)
    _check(cls, shown_as)
    if is_own(cls):
        source = inspect.getsourcefile(module)
        _places[cls] = f"{at}:{cls.__name__}" + (f"{CHECKSUM}{_checksum(Path(source))}" if source else "")
    return cls


def place_of(cls: type[Algorithm]) -> str | None:
    """Where a method came from, with a checksum; None if it is registered by name, or was made in Python."""
    return _places.get(cls)


def load_recorded(name: str, recorded: Any) -> type[Algorithm]:
    """The class of a method that a run directory remembers; a warning if its file has changed since then."""
    place, _, checksum = str(recorded).partition(CHECKSUM)
    file = FILE.fullmatch(place)
    if file and not Path(file["file"]).is_file():
        raise UserError(
            f"The method '{name}' is in {file['file']}, which is not there any more; put the file back, or give the "
            "class to fedloom.load(FOLDER, algorithm=...)."
        )
    cls = load_method(place)
    if cls.name != name:
        raise UserError(f"{place} was the method '{name}' and is called '{cls.name}' now; name it '{name}' again.")
    if checksum and not _places.get(cls, checksum).endswith(checksum):
        log.warning("%s has changed since it was used for the method '%s'.", place, name)
    return cls


def blame(error: BaseException) -> str | None:
    """What went wrong in a function of one of the methods that were loaded; None if it was somewhere else."""
    return next((text for cls in _places if (text := describe_failure(error, cls)) is not None), None)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"There is no file {path}; give the path of a Python file with a method.")
    real = path.resolve()
    folder = hashlib.sha256(str(real).encode()).hexdigest()[:8]
    name = f"fedloom_method_{folder}_{re.sub('[^0-9A-Za-z_]', '_', path.stem)}"
    try:
        checksum = _checksum(real)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({reason(error)}).") from None
    known = sys.modules.get(name)
    if known is not None and vars(known).get("__checksum__") == checksum and _registered(known):
        return known
    _add_to_path(real.parent)
    spec = importlib.util.spec_from_file_location(name, real)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    vars(module)["__checksum__"] = checksum
    sys.modules[name] = module  # which dataclasses and type hints need
    try:
        # not by its loader, which may take an older file of the same size and second from a cache
        exec(compile(real.read_bytes(), str(real), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failure(error, str(path), str(real)) from error
    return module


def _registered(module: ModuleType) -> bool:
    """True if all methods of a module are in the registry, from which tests and notebooks may remove them."""
    known = ALGORITHMS.names()
    return all(cls.name in known and ALGORITHMS[cls.name] is cls for cls in _own_classes(module) if "name" in vars(cls))


def _load_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"There is no module {name}; a method is written package.module:Class.") from None
        spec = importlib.util.find_spec(name)
        raise _failure(error, name, (spec.origin if spec else None) or name) from error


def _add_to_path(folder: Path) -> None:
    """Let a method import modules that lie beside it, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _failure(error: BaseException, shown_as: str, file: str) -> UserError:
    if isinstance(error, UserError):
        return error
    if isinstance(error, SyntaxError):
        return UserError(f"{shown_as} is not valid Python, line {error.lineno}: {reason(error)}.")
    if taken := re.fullmatch(r"two algorithms are called '(.*)': (\S+) and \S+", str(error)):
        return UserError(f"{shown_as} calls its method '{taken[1]}', which is the name of {taken[2]}; choose another.")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" in line {lines[-1]}" if lines else ""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return UserError(f"{shown_as} cannot be loaded, because of {what}{where}.")


def _own_classes(module: ModuleType) -> list[type[Algorithm]]:
    """Methods that a module defines itself."""
    found = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Algorithm)]
    return [cls for cls in dict.fromkeys(found) if cls.__module__ == module.__name__]


def _chosen(module: ModuleType, wanted: str | None, shown_as: str) -> type[Algorithm]:
    if wanted:
        cls = vars(module).get(wanted)
        if isinstance(cls, type) and issubclass(cls, Algorithm):
            return cls
        what = f"{shown_as} has no method {shown(wanted)}"
        names = [one.__name__ for one in _own_classes(module)]
        raise UserError(f"{what}; {nearest(wanted, names)}" if cls is None else f"{what}: it is no Algorithm.")
    own = _own_classes(module)
    named = [cls for cls in own if "name" in vars(cls)] or own
    if not named:
        raise UserError(f"{shown_as} has no method; write a class with Algorithm as its base, see docs/new-method.md.")
    if len(named) > 1:
        listed = ", ".join(cls.__name__ for cls in named)
        raise UserError(f"{shown_as} has several methods ({listed}); say which, as in {shown_as}:{named[0].__name__}.")
    return named[0]


def _check(cls: type[Algorithm], shown_as: str) -> None:
    """Raise UserError for a class without a name, or with settings that are not fields of a dataclass."""
    if "name" not in vars(cls) or not isinstance(cls.name, str) or not cls.name:
        raise UserError(f"The method {cls.__name__} in {shown_as} has no name of its own; write name = '...' in it.")
    if not re.fullmatch(r"[\w.+-]+", cls.name):
        raise UserError(f"The name '{shown(cls.name)}' of {cls.__name__} is no word; use letters, digits and '_-.+'.")
    annotated = {k for k, v in vars(cls).get("__annotations__", {}).items() if "ClassVar" not in str(v)}
    if annotated and "__dataclass_params__" not in vars(cls):
        raise UserError(
            f"The settings of {cls.__name__} ({', '.join(sorted(annotated))}) are not seen; write "
            "@dataclass(frozen=True) above the class."
        )
