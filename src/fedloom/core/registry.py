"""Names to things. A registry is filled by importing every module of a package: a new file is all it takes.

Other packages add theirs through entry points; the group is the package's name, such as `fedloom.algorithms`.
"""

import importlib
import logging
import pkgutil
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from fedloom.core.errors import unknown

log = logging.getLogger("fedloom")

T = TypeVar("T")


class Registry(Generic[T]):
    def __init__(self, kind: str, package: str) -> None:
        self.kind, self._package = kind, package
        self._known: dict[str, T] = {}
        self._has_own = self._has_others = False

    def add(self, name: str, thing: T) -> None:
        if not _origin(thing).startswith("fedloom."):
            self._load_own()  # a name that is taken is refused at once
        known = self._known.get(name)
        if known is not None and _origin(known) != _origin(thing):
            raise ValueError(f"two {self.kind}s are called '{name}': {_origin(known)} and {_origin(thing)}")
        self._known[name] = thing  # a class defined again (a notebook cell run twice) replaces itself

    def _load_own(self) -> None:
        if not self._has_own:
            self._has_own = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")

    def _load(self) -> None:
        self._load_own()
        if not self._has_others:
            self._has_others = True
            for point in entry_points(group=self._package):
                try:
                    point.load()  # defining a class registers it
                except (Exception, SystemExit) as error:  # somebody else's code must not take ours down
                    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    log.warning("The %s '%s' of another package cannot be used (%s).", self.kind, point.name, why)

    def __getitem__(self, name: str) -> T:
        self._load()
        if name not in self._known:
            raise unknown(self.kind, name, self._known)
        return self._known[name]

    def names(self) -> list[str]:
        self._load()
        return sorted(self._known)


def _origin(thing: object) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', repr(thing))}"
