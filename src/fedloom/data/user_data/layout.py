"""The layout of a user's data: which files there are, and which client, class and split their paths stand for."""

import difflib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fedloom.core.errors import UserError
from fedloom.data.limits import require_file
from fedloom.data.user_data.issues import UNPRINTABLE, Issues, error_text, join_names, printable

TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".pq")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
ARRAYS = (".npz",)
KINDS = {"table": TABLES, "image": IMAGES, "array": ARRAYS}
NOUNS = {"table": "table", "image": "picture", "array": "file of arrays"}
READABLE = "CSV (.csv, .tsv), Parquet (.parquet), NumPy (.npz) and pictures (.png, .jpg)"
SPLITS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
SKIPPED = ("thumbs.db", "desktop.ini", "__macosx")
MAX_DEPTH = 20  # folders below the path of the data
SHARD = re.compile(r"(part|shard|data|chunk|train|test)[-_ ]?\d+", re.IGNORECASE)


@dataclass(frozen=True)
class File:
    """A file of the user's data, and what its path says about its samples."""

    path: Path
    parts: tuple[str, ...]  # folders between the path of the data and the file
    split: str | None = None  # train, val or test
    client: str | None = None
    label: str | None = None

    @property
    def stem(self) -> str:
        """The file's name without its suffix, which may be a double one such as .csv.gz."""
        name = self.path.name
        return name[: -len(_suffix(name))]


@dataclass(frozen=True)
class Layout:
    """The files of the user's data, all of one kind."""

    kind: str  # table, image, array or huggingface
    files: tuple[File, ...]
    about: str  # for the user, such as "a table per client"


def _suffix(name: str) -> str:
    return next((s for suffixes in KINDS.values() for s in suffixes if name.lower().endswith(s)), Path(name).suffix)


def file_kind(path: Path) -> str | None:
    """The kind of a file by its suffix: "table", "image", "array", or None if it is not read."""
    name = path.name.lower()
    return next((kind for kind, suffixes in KINDS.items() if name.endswith(suffixes)), None)


def detect_layout(path: Path, issues: Issues, labelled: bool = True) -> Layout:
    """Find the files at a path, and the client, class and split that each stands for.

    Pictures must be in folders of their classes if they are `labelled`; otherwise their folders are not looked at.
    """
    status = _read_status(path)
    if not stat.S_ISDIR(status.st_mode):
        kind = file_kind(path)
        if kind is None or (kind == "image" and labelled):
            raise UserError(f"{path} is not a file that FedLoom reads; it reads {READABLE}, and folders of them.")
        return Layout(kind, (File(path, ()),), f"one {NOUNS[kind]}")
    if any(os.path.isfile(path / name) for name in ("dataset_dict.json", "state.json", "dataset_info.json")):
        return Layout("huggingface", (File(path, ()),), "a Hugging Face data set on disk")
    files, empty, others = _find_files(path, issues)
    if not files and any(file.suffix == ".arrow" for file in others):
        raise UserError(
            f"{path} has Arrow files, but no state.json and no dataset_info.json; write the data set again with "
            "save_to_disk."
        )
    if not files:
        what = f", only {join_names([file.name for file in others], 3)}" if others else ""
        raise UserError(f"{path} has nothing that FedLoom reads{what}; it reads {READABLE}.")
    kinds = Counter(file_kind(file.path) for file in files)
    if len(kinds) > 1:
        examples = [next(_relative(f.path, path) for f in files if file_kind(f.path) == kind) for kind in kinds]
        raise UserError(f"{path} has files of different kinds, such as {' and '.join(examples)}; give one kind a path.")
    for folder in empty:
        issues.problem("empty", f"{folder} is an empty folder; remove it, or put its data there.")
    if others:
        names = join_names([_relative(file, path) for file in others], 5)
        issues.remark("ignored", f"Files of other kinds are not read: {names}.")
    kind = next(iter(kinds))
    assert kind is not None
    files, split = _assign_splits(files)
    if kind != "image":
        about, files = _assign_clients(kind, files, issues)
    else:
        about, files = _assign_image_folders(path, files, issues) if labelled else ("pictures", files)
    return Layout(kind, tuple(files), about + (", folders for training and test" if split else ""))


def short_path(path: str) -> Path:
    """The path relative to the current folder if it lies below it; otherwise as it is."""
    try:
        return Path(path).relative_to(Path.cwd())
    except (ValueError, OSError):
        return Path(path)


def _read_status(path: Path) -> os.stat_result:
    """The status of the path of the data, which must be a file or a folder."""
    if UNPRINTABLE.search(str(path)):
        raise UserError(_name_problem(path))
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist{_suggestion(path)}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error_text(error).lower()}).") from None
    if not stat.S_ISDIR(status.st_mode):
        require_file(path)
    return status


def _suggestion(path: Path) -> str:
    """The end of the message about a path that does not exist: a similar one, if there is any."""
    try:
        names = [name for name in os.listdir(path.parent) if not UNPRINTABLE.search(name)]
    except OSError:
        return f", nor does {path.parent}." if not os.path.exists(path.parent) else "."
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean '{path.parent / close[0]}'?" if close else "."


def _name_problem(path: Path) -> str:
    return (
        f"The name of {printable(str(path))} has a line break, a control character or bytes that are not UTF-8; "
        "rename it."
    )


class Entry(NamedTuple):
    """A file or folder that was found."""

    path: Path
    parts: tuple[str, ...]  # names below the path of the data, the last is its own
    status: os.stat_result | None  # None if it is not read
    problem: str = ""  # a sentence, if it should be read but cannot


def walk(root: Path) -> Iterator[Entry]:
    """Everything below a folder, depth first, in the order of names. Every folder is visited once, even if several
    links lead to it, and what is neither a file nor a folder is not opened."""
    visited: dict[tuple[int, int], Path] = {}
    pending: list[tuple[Path, tuple[str, ...]]] = [(root, ())]
    while pending:
        path, parts = pending.pop()
        if parts and UNPRINTABLE.search(parts[-1]):
            yield Entry(path, parts, None, _name_problem(path))
            continue
        try:
            status = os.stat(path)
            names = sorted(os.listdir(path), reverse=True) if stat.S_ISDIR(status.st_mode) else []
        except FileNotFoundError:
            yield Entry(path, parts, None, f"{path} is a link that leads nowhere; remove it or repair it.")
            continue
        except (OSError, ValueError) as error:
            yield Entry(path, parts, None, f"{path} cannot be read ({error_text(error).lower()}).")
            continue
        problem = ""
        if stat.S_ISDIR(status.st_mode):
            first = visited.setdefault((status.st_dev, status.st_ino), path)
            if first in path.parents:
                problem = f"{path} is a link that leads back to {first}; remove it."
            elif first is not path:
                problem = f"{first} and {path} are the same folder, by a link; remove one of them."
            elif len(parts) > MAX_DEPTH:
                problem = f"{path} lies {len(parts)} folders deep, and at most {MAX_DEPTH} are read; move it up."
            elif _holds_results(set(names)):
                yield Entry(path, parts, None)
                continue
            else:
                shown = [name for name in names if not name.startswith(".") and name.lower() not in SKIPPED]
                pending += [(path / name, (*parts, name)) for name in shown]
        elif not stat.S_ISREG(status.st_mode):
            problem = f"{path} is a pipe, a socket or a device, not a file; remove it."
        yield Entry(path, parts, None if problem else status, problem)


def _holds_results(names: set[str]) -> bool:
    """Whether a folder with these files is a run, a comparison or a sweep, which was started where the data are."""
    run = "config.yaml" in names and bool(names & {"checkpoints", "partition.parquet"})
    return run or bool(names & {"compare.yaml", "sweep.yaml"})


def _find_files(root: Path, issues: Issues) -> tuple[list[File], list[Path], list[Path]]:
    """All files below a folder that can be read, the folders directly below it without any, and other files."""
    files: list[File] = []
    others: list[Path] = []
    folders: dict[str, Path] = {}  # directly below, by name, as long as nothing was found in them
    for path, parts, status, problem in walk(root):
        if problem:
            issues.problem("unreadable", problem)
        elif status is None:
            pass
        elif stat.S_ISDIR(status.st_mode):
            if len(parts) == 1:
                folders[parts[0]] = path
            continue
        elif file_kind(path) is None:
            others.append(path)
            continue
        else:
            files.append(File(path, parts[:-1]))
        if len(parts) > 1:
            folders.pop(parts[0], None)
    return files, list(folders.values()), others


def _assign_splits(files: list[File]) -> tuple[list[File], bool]:
    """If the first parts of all paths are names of splits, such as train and test: the files with their split, and
    without that part. Also returns whether this was so."""
    names = {_first_part(file).lower() for file in files}
    if not {"train", "test"} <= {SPLITS.get(name) for name in names} or not names <= set(SPLITS):
        return files, False
    splits = [SPLITS[_first_part(file).lower()] for file in files]
    parts = [file.parts[1:] if file.parts else ("",) for file in files]
    return [replace(file, parts=p, split=s) for file, p, s in zip(files, parts, splits, strict=True)], True


def _first_part(file: File) -> str:
    """The first folder below the path of the data, or the name of a file that lies there."""
    return file.parts[0] if file.parts else file.stem


def _assign_clients(kind: str, files: list[File], issues: Issues) -> tuple[str, list[File]]:
    """The files with the client that the first part of their path names, and the layout in words. A single file has no
    client."""
    noun = NOUNS[kind]
    names = {_first_part(file) for file in files}
    if len(names) == 1 and not any(len(file.parts) and file.parts[0] for file in files):
        return f"one {noun}", files
    if names == {""}:
        return f"one {noun} per part", files
    locations: dict[tuple[str | None, str], Path] = {}
    assigned = []
    for file in files:
        client = _first_part(file)
        location = file.path.parents[len(file.parts) - 1] if file.parts else file.path
        first = locations.setdefault((file.split, client), location)
        if first != location:
            issues.problem(
                "client twice", f"Client '{client}' is there twice, as {first} and as {location}; merge them."
            )
            continue
        assigned.append(replace(file, client=client))
    if all(SHARD.match(name) for name in names):
        issues.remark(
            "shards",
            f"Files are taken for clients, but {join_names(sorted(names), 2)} may be pieces of one table: "
            "if so, say which column has the client (client=NAME).",
        )
    return f"a {noun} per client", assigned


def _assign_image_folders(root: Path, files: list[File], issues: Issues) -> tuple[str, list[File]]:
    """Images with the client and class of their folders (CLIENT/CLASS or CLASS), and the layout in words."""
    depth = Counter(len(file.parts) for file in files).most_common(1)[0][0]
    if depth not in (1, 2):
        raise UserError(
            f"Pictures lie in folders CLIENT/CLASS or CLASS, but {_relative(files[0].path, root)} in {root} does not."
        )
    assigned = []
    for file in files:
        if len(file.parts) != depth:
            expected = "CLIENT/CLASS" if depth == 2 else "CLASS"
            issues.problem(
                "misplaced", f"{file.path} does not lie in a folder {expected} as the other pictures do; move it."
            )
            continue
        assigned.append(replace(file, client=file.parts[0] if depth == 2 else None, label=file.parts[-1]))
    return "pictures in folders " + ("CLIENT/CLASS" if depth == 2 else "CLASS"), assigned


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root))
