"""Which files there are, and what their names say: the client, the class, what a sample is for."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from fedloom.core.errors import UserError
from fedloom.data.user_data.findings import Findings, listed, reason

TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".pq")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
ARRAYS = (".npz",)
KINDS = {"table": TABLES, "picture": PICTURES, "array": ARRAYS}
READABLE = "CSV (.csv, .tsv), Parquet (.parquet), NumPy (.npz) and pictures (.png, .jpg)"
SPLITS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
SKIPPED = ("thumbs.db", "desktop.ini", "__macosx")
SHARD = re.compile(r"(part|shard|data|chunk|train|test)[-_ ]?\d+", re.IGNORECASE)


@dataclass(frozen=True)
class File:
    path: Path
    parts: tuple[str, ...]  # folders between the data's path and the file
    split: str | None = None
    client: str | None = None
    label: str | None = None

    @property
    def stem(self) -> str:
        name = self.path.name
        return name[: -len(_suffix(name))]


@dataclass(frozen=True)
class Layout:
    kind: str  # table, picture, array or huggingface
    files: tuple[File, ...]
    about: str


def _suffix(name: str) -> str:
    return next((s for suffixes in KINDS.values() for s in suffixes if name.lower().endswith(s)), Path(name).suffix)


def kind_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for kind, suffixes in KINDS.items() if name.endswith(suffixes)), None)


def look(path: Path, findings: Findings) -> Layout:
    """Recognise how the data at a path are laid out."""
    _check_there(path)
    if not path.is_dir():
        kind = kind_of(path)
        if kind is None or kind == "picture":
            raise UserError(f"{path} is not a file that FedLoom reads; it reads {READABLE}, and folders of them.")
        return Layout(kind, (File(path, ()),), f"one {'table' if kind == 'table' else 'file of arrays'}")
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json", "dataset_info.json")):
        return Layout("huggingface", (File(path, ()),), "a Hugging Face data set on disk")
    found, empty, others = _walk(path, findings)
    if not found and any(file.suffix == ".arrow" for file in others):
        raise UserError(
            f"{path} has Arrow files, but no state.json and no dataset_info.json; write the data set again with "
            "save_to_disk."
        )
    if not found:
        what = f"only {listed([file.name for file in others], 3)}" if others else "nothing"
        raise UserError(f"{path} has nothing that FedLoom reads, {what}; it reads {READABLE}.")
    kinds = Counter(kind_of(file.path) for file in found)
    if len(kinds) > 1:
        examples = [next(_relative(f.path, path) for f in found if kind_of(f.path) == kind) for kind in kinds]
        raise UserError(f"{path} has files of different kinds, such as {' and '.join(examples)}; give one kind a path.")
    for folder in empty:
        findings.problem("empty", f"{folder} is an empty folder; remove it, or put its data there.")
    if others:
        names = listed([_relative(file, path) for file in others], 5)
        findings.remark("ignored", f"Files of other kinds are not read: {names}.")
    kind = next(iter(kinds))
    assert kind is not None
    files, split = _without_splits(found)
    about, files = _pictures(path, files, findings) if kind == "picture" else _per_client(path, kind, files, findings)
    return Layout(kind, tuple(files), about + (", folders for training and test" if split else ""))


def near(path: str) -> Path:
    """A path as short as a reader knows it: relative, where it lies below the current folder."""
    try:
        return Path(path).relative_to(Path.cwd())
    except (ValueError, OSError):
        return Path(path)


def _check_there(path: Path) -> None:
    try:
        path.stat()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist{_similar(path)}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({reason(error).lower()}).") from None


def _similar(path: Path) -> str:
    try:
        names = [entry.name for entry in os.scandir(path.parent)]
    except OSError:
        return f", nor does {path.parent}." if not path.parent.exists() else "."
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean '{path.parent / close[0]}'?" if close else "."


def _walk(top: Path, findings: Findings) -> tuple[list[File], list[Path], list[Path]]:
    """Files that can be read, folders below the first without any, other files."""
    found: list[File] = []
    others: list[Path] = []
    empty: list[Path] = []

    def visit(folder: Path, parts: tuple[str, ...], above: frozenset[str]) -> int:
        try:
            names = sorted(entry.name for entry in os.scandir(folder))
        except OSError as error:
            findings.problem("unreadable", f"{folder} cannot be read ({reason(error).lower()}).")
            return 1
        if {"config.yaml", "checkpoints"} <= set(names) or "compare.yaml" in names:
            return 1  # runs that were started where the data are
        count = 0
        for name in names:
            path = folder / name
            if name.startswith(".") or name.lower() in SKIPPED:
                continue
            if path.is_dir():
                real = os.path.realpath(path)
                if real in above:
                    findings.problem("unreadable", f"{path} is a link that leads back to {real}; remove it.")
                else:
                    count += visit(path, (*parts, name), above | {real})
            elif not path.is_file():
                findings.problem("unreadable", f"{path} is a link that leads nowhere; remove it or repair it.")
            elif kind_of(path) is None:
                others.append(path)
            else:
                found.append(File(path, parts))
                count += 1
        if not count and len(parts) == 1:
            empty.append(folder)
        return count

    visit(top, (), frozenset({os.path.realpath(top)}))
    return found, empty, others


def _without_splits(files: list[File]) -> tuple[list[File], bool]:
    """Folders (or files) called train and test say what samples are for; the rest of the path says what it did."""
    tops = {(file.parts[0] if file.parts else file.stem).lower() for file in files}
    if not {"train", "test"} <= {SPLITS.get(top) for top in tops} or not tops <= set(SPLITS):
        return files, False
    return [
        replace(file, parts=file.parts[1:] if file.parts else ("",), split=SPLITS[_top(file).lower()]) for file in files
    ], True


def _top(file: File) -> str:
    return file.parts[0] if file.parts else file.stem


def _per_client(top: Path, kind: str, files: list[File], findings: Findings) -> tuple[str, list[File]]:
    """A file, or a folder of files, per client; a single file is a table like any other."""
    thing = "table" if kind == "table" else "file of arrays"
    names = {_top(file) for file in files}
    if len(names) == 1 and not any(len(file.parts) and file.parts[0] for file in files):
        return f"one {thing}", files
    if names == {""}:
        return f"one {thing} per part", files
    places: dict[tuple[str | None, str], Path] = {}
    kept = []
    for file in files:
        client = _top(file)
        place = file.path.parents[len(file.parts) - 1] if file.parts else file.path
        first = places.setdefault((file.split, client), place)
        if first != place:
            findings.problem(
                "client twice", f"Client '{client}' is there twice, as {first} and as {place}; merge them."
            )
            continue
        kept.append(replace(file, client=client))
    if all(SHARD.match(name) for name in names):
        findings.remark(
            "shards",
            f"Files are taken for clients, but {listed(sorted(names), 2)} may be pieces of one table: "
            "if so, say which column has the client (client=NAME).",
        )
    return f"a {thing} per client", kept


def _pictures(top: Path, files: list[File], findings: Findings) -> tuple[str, list[File]]:
    """client/class/picture, or class/picture."""
    depth = Counter(len(file.parts) for file in files).most_common(1)[0][0]
    if depth not in (1, 2):
        raise UserError(
            f"Pictures lie in folders CLIENT/CLASS or CLASS, but {_relative(files[0].path, top)} in {top} does not."
        )
    kept = []
    for file in files:
        if len(file.parts) != depth:
            wanted = "CLIENT/CLASS" if depth == 2 else "CLASS"
            findings.problem(
                "misplaced", f"{file.path} does not lie in a folder {wanted} as the other pictures do; move it."
            )
            continue
        kept.append(replace(file, client=file.parts[0] if depth == 2 else None, label=file.parts[-1]))
    return "pictures in folders " + ("CLIENT/CLASS" if depth == 2 else "CLASS"), kept


def _relative(path: Path, top: Path) -> str:
    return str(path.relative_to(top))
