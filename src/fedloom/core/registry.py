"""Registries: methods, data sets, partitions and models by name.

A registry is filled by importing every module of a package, so a new file is enough to add an entry. Other packages add
theirs through entry points; the group is the package's name, such as `fedloom.algorithms`.
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
    """Classes by name, loaded when first asked for.

    Args:
        kind: what an entry is, for messages, such as "model".
        package: package whose modules define the entries; also the name of the entry-point group.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self.package = kind, package
        self._known: dict[str, T] = {}
        self._package_loaded = self._plugins_loaded = False

    def add(self, name: str, entry: T) -> None:
        """Register an entry. Raises ValueError if another class has the name already."""
        if not _qualified_name(entry).startswith("fedloom."):
            self._load_package()  # so that a name that is taken is refused at once
        known = self._known.get(name)
        if known is not None and _qualified_name(known) != _qualified_name(entry):
            raise ValueError(
                f"two {self.kind}s are called '{name}': {_qualified_name(known)} and {_qualified_name(entry)}"
            )
        self._known[name] = entry  # a class defined again (a notebook cell run twice) replaces itself

    def _load_package(self) -> None:
        """Import every module of the package."""
        if not self._package_loaded:
            self._package_loaded = True
            package = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self.package}.{module.name}")

    def _load_all(self) -> None:
        """Import the package and the entry points of other packages."""
        self._load_package()
        if not self._plugins_loaded:
            self._plugins_loaded = True
            for point in entry_points(group=self.package):
                try:
                    point.load()  # defining a class registers it
                except (Exception, SystemExit) as error:  # another package's mistake must not stop FedLoom
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    log.warning("The %s '%s' of another package cannot be used (%s).", self.kind, point.name, reason)

    def __getitem__(self, name: str) -> T:
        self._load_all()
        if name not in self._known:
            raise unknown(self.kind, name, self._known)
        return self._known[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load_all()
        return sorted(self._known)


def _qualified_name(entry: object) -> str:
    return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', repr(entry))}"
