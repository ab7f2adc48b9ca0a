"""Files that are either complete or not there: written under a temporary name, flushed, renamed, and checked."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from fedloom.core.errors import oserror_as_user_error

TEMPORARY = ".partial"


class Damaged(Exception):
    """A file is missing, unreadable, or not what was once written to it."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; on success it replaces `path` atomically, otherwise `path` is unchanged."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with oserror_as_user_error(path):
            yield temporary
            file = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(temporary, path)
            sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make new, changed and removed names in a folder durable, on systems where that is possible."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, key: str | None = None) -> Any:
    """The contents of a JSON file, or the value of one of its keys."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if key is None else found[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name} cannot be read") from error


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file atomically, with checksums."""
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_table(path: Path) -> pa.Table:
    """Read a Parquet file and verify its checksums."""
    try:
        return pq.read_table(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise Damaged(f"{path.name} cannot be read") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file with a checksum of its contents (and a note) in its header."""
    # one metadata entry, because the order of several is not fixed
    header = {"fedloom": json.dumps({**(note or {}), "checksum": checksum(tensors)}, sort_keys=True)}
    # copies, because safetensors refuses tensors that share memory
    copies = {k: v.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for k, v in tensors.items()}
    data = save(copies, metadata=header)
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the note of a file that `write_tensors` wrote, after verifying its checksum."""
    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads((file.metadata() or {})["fedloom"])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise Damaged(f"{path.name} cannot be read") from error
    if checksum(tensors) != note.pop("checksum", None):
        raise Damaged(f"{path.name} does not have its checksum")
    return tensors, note


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        h.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        h.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return h.hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


BLOCK_BYTES = 64 << 20
DTYPES = {"float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}


def write_stacked(
    path: Path, like: Mapping[str, Tensor], count: int, read: Callable[[np.ndarray], list[Tensor]]
) -> None:
    """Write a safetensors file of tensors with `count` rows each, in blocks, so that they need not fit memory."""
    header: dict[str, Any] = {}
    offsets, end = [], 0
    for name, row in like.items():
        size = count * row.numel() * row.element_size()
        header[name] = {
            "dtype": DTYPES[str(row.dtype).removeprefix("torch.")],
            "shape": [count, *row.shape],
            "data_offsets": [end, end + size],
        }
        offsets.append(end)
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    width = max(1, sum(v.numel() * v.element_size() for v in like.values()))
    block = max(1, BLOCK_BYTES // width)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, count, block):
            rows = read(np.arange(first, min(first + block, count)))
            for offset, value in zip(offsets, rows, strict=True):
                data = value.detach().cpu().contiguous()
                file.seek(start + offset + first * data[0].numel() * data.element_size())
                file.write(data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b"")


def read_stacked(path: Path) -> dict[str, Tensor]:
    """Read a file that `write_stacked` wrote."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path.name} cannot be read") from error
