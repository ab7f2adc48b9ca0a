"""Files that are either complete or not there: written under a temporary name, flushed, renamed, and checked."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from fedloom.core.errors import UserError, oserror_as_user_error

TEMPORARY = ".partial"
PUBLIC, PRIVATE = 0o666, 0o600  # modes of files, of which the first is what the process's umask makes of it

Writer = Callable[[BinaryIO], Any]  # writes the contents of a file


class Damaged(Exception):
    """A file is missing, unreadable, or not what was once written to it."""


# -- writing ------------------------------------------------------------------------------------------------------


def temporary_path(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f".{path.name}{TEMPORARY}")


def write_temporary(path: Path, writer: Writer, mode: int = PUBLIC) -> Path:
    """Write a file durably under its temporary name. What is there, such as a link, is removed and not followed."""
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w+b") as file:
        writer(file)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def write_file(path: Path, writer: Writer, mode: int = PUBLIC) -> None:
    """Write a file atomically: it is replaced when it is complete, otherwise it stays as it was. `mode` says who may
    read it."""
    try:
        with oserror_as_user_error(path):
            os.replace(write_temporary(path, writer, mode), path)
            sync_folder(path.parent)
    except BaseException:
        temporary_path(path).unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Make a folder if it is not there; a link in its place is refused."""
    with oserror_as_user_error(path):
        if path.is_symlink():
            raise UserError(f"{path} is a link; remove it.")
        path.mkdir(parents=True, exist_ok=True)


def remove_temporary(folder: Path) -> None:
    """Remove files that a killed process has not completed."""
    for file in folder.glob(f".*{TEMPORARY}"):
        if file.is_symlink() or file.is_file():
            file.unlink()


def sync_folder(folder: Path) -> None:
    """Make new, changed and removed names in a folder durable, on systems where that is possible."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def text_writer(text: str) -> Writer:
    """Writes a text file."""
    return lambda file: file.write(text.encode())


def json_writer(value: Any) -> Writer:
    """Writes a JSON file."""
    return text_writer(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def table_writer(table: pa.Table) -> Writer:
    """Writes a Parquet file, with checksums."""
    return lambda file: pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def tensors_writer(tensors: Mapping[str, Tensor], note: Mapping[str, Any] | None = None) -> Writer:
    """Writes a safetensors file with a checksum of its contents, and a note, in its header."""
    # one metadata entry, because the order of several is not fixed
    content = {**(note or {}), "checksum": checksum(tensors, note or {})}
    header = {"fedloom": json.dumps(content, sort_keys=True)}
    # copies, because safetensors refuses tensors that share memory
    copies = {k: v.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for k, v in tensors.items()}
    return lambda file: file.write(save(copies, metadata=header))


BLOCK_BYTES = 64 << 20
DTYPES = {"float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}


def stacked_writer(
    like: Mapping[str, Tensor],
    count: int,
    blocks: Callable[[], Iterable[Mapping[str, Tensor]]],
    fixed: Mapping[str, Tensor] | None = None,
    note: Mapping[str, Any] | None = None,
) -> Writer:
    """Writes a safetensors file of tensors with `count` rows each, in blocks, so that they need not fit memory.

    Args:
        like: one row of each of these tensors, for its type and shape.
        count: number of rows.
        blocks: returns the rows of all of them, in consecutive blocks.
        fixed: tensors that are written as they are.
        note: kept in the header of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"fedloom": json.dumps(note, sort_keys=True)}} if note else {}
    offsets, end = {}, 0
    shapes = {name: (count, *row.shape) for name, row in like.items()}
    fixed = {} if fixed is None else fixed
    for name, value in {**fixed, **like}.items():
        shape = shapes.get(name, tuple(value.shape))
        size = math.prod(shape) * value.element_size()
        dtype = DTYPES[str(value.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        offsets[name] = end
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        places = dict(offsets)
        for block in (fixed, *blocks()) if like else (fixed,):
            for name, value in block.items():
                data = _bytes(value.detach().cpu().contiguous())
                file.seek(start + places[name])
                file.write(data)
                places[name] += len(data)
        assert all(places[name] == header[name]["data_offsets"][1] for name in offsets)

    return write


def row_blocks(count: int, row_bytes: int) -> Iterator[np.ndarray]:
    """Consecutive row numbers, in blocks of about BLOCK_BYTES."""
    most = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, count, most):
        yield np.arange(first, min(first + most, count))


# -- reading ------------------------------------------------------------------------------------------------------


def read_json(path: Path, key: str | None = None) -> Any:
    """The contents of a JSON file, or the value of one of its keys."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if key is None else found[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{path.name} cannot be read") from error


def read_table(path: Path) -> pa.Table:
    """Read a Parquet file and verify its checksums."""
    try:
        return pq.read_table(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise Damaged(f"{path.name} cannot be read") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the note of a file of `tensors_writer`, after verifying its checksum."""
    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads((file.metadata() or {})["fedloom"])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        written = note.pop("checksum")
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise Damaged(f"{path.name} cannot be read") from error
    if written not in (checksum(tensors, note), checksum(tensors)):
        raise Damaged(f"{path.name} does not match its checksum")
    return tensors, note


def read_note(path: Path) -> dict[str, Any]:
    """The note in the header of a safetensors file; its tensors are not read."""
    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads((file.metadata() or {})["fedloom"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise Damaged(f"{path.name} cannot be read") from error
    if not isinstance(note, dict):
        raise Damaged(f"{path.name} cannot be read")
    return note


def read_stacked(path: Path) -> dict[str, Tensor]:
    """Read a file of `stacked_writer`."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path.name} cannot be read") from error


def checksum(tensors: Mapping[str, Tensor], note: Mapping[str, Any] | None = None) -> str:
    """SHA-256 over names, types, shapes and values, and a note."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        h.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        h.update(_bytes(value))
    if note is not None:
        h.update(json.dumps(note, sort_keys=True).encode())
    return h.hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes(value: Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU."""
    return value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""
