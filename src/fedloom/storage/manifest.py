"""The manifest of a folder: checksums of its files, so that what is read is what FedLoom wrote."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedloom.core.errors import oserror_as_user_error
from fedloom.storage.files import (
    Damaged,
    Writer,
    file_checksum,
    json_writer,
    read_json,
    sync_folder,
    temporary_path,
    write_file,
    write_temporary,
)

MANIFEST = "manifest.json"
Checksums = dict[str, list[str | None]]


class Manifest:
    """Writes the files of a folder, and verifies that they have not changed since.

    Files are replaced in three steps: all are written under temporary names, the manifest is written with the checksums
    before and after, the files get their names. So after a kill at any moment the manifest knows every file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / MANIFEST
        self.files: Checksums = {}  # checksums that a file may have; None if it may be missing

    def exists(self) -> bool:
        """True if the folder has a manifest."""
        return os.path.lexists(self.path)

    def load(self) -> None:
        """Read the manifest."""
        found = read_json(self.path)
        if not isinstance(found, dict) or found.get("checksum") != _checksum(found.get("files")):
            raise Damaged(f"{MANIFEST} was changed after it was written")
        self.files = found["files"]

    def verify(self, names: Iterable[str]) -> None:
        """Raise Damaged unless these files are as they were written. Another process may replace them meanwhile."""
        for name in names:
            while (found := self._found(name)) not in (known := self.files.get(name, [None])):
                self.load()
                if self.files.get(name, [None]) == known:
                    raise Damaged(f"{name} {'is missing' if found is None else 'was changed after it was written'}")

    def _found(self, name: str) -> str | None:
        path = self.folder / name
        try:
            return file_checksum(path) if path.is_file() else "no file" if os.path.lexists(path) else None
        except OSError:
            return "unreadable"

    def adopt(self, names: Iterable[str]) -> None:
        """Begin with the files as they are, in a folder that was written without a manifest."""
        self.files = {name: [found] for name in names if (found := self._found(name)) is not None}
        self.save()

    def write(self, contents: Mapping[str, Writer]) -> None:
        """Replace some files."""
        paths = {name: self.folder / name for name in contents}
        try:
            after = {}
            for name, writer in contents.items():
                with oserror_as_user_error(paths[name]):
                    after[name] = file_checksum(write_temporary(paths[name], writer))
            for name, new in after.items():
                known = self.files.get(name, [None])
                before = known[0] if len(known) == 1 else self._found(name)
                self.files[name] = [new] if before == new else [before, new]
            self.save()
            for path in paths.values():
                with oserror_as_user_error(path):
                    os.replace(temporary_path(path), path)
            for folder in {path.parent for path in paths.values()}:
                with oserror_as_user_error(folder):
                    sync_folder(folder)
        except BaseException:
            for path in paths.values():
                temporary_path(path).unlink(missing_ok=True)
            raise
        self.files |= {name: [new] for name, new in after.items()}

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they are there."""
        gone = [name for name in names if name in self.files]
        if not gone:
            return
        self.files |= {name: [*self.files[name], None] for name in gone}
        self.save()
        for name in gone:
            with oserror_as_user_error(self.folder / name):
                (self.folder / name).unlink(missing_ok=True)
                sync_folder((self.folder / name).parent)
            del self.files[name]
        self.save()

    def save(self) -> None:
        """Write the manifest."""
        write_file(self.path, json_writer({"files": self.files, "checksum": _checksum(self.files)}))


def _checksum(files: object) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
