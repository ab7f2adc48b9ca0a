"""File formats that several data sets share. Nothing here loads a pickle."""

from __future__ import annotations

import gzip
import io
import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedloom.core.errors import UserError
from fedloom.data.dataset import RawDataset

T = TypeVar("T")
R = TypeVar("R")
BROKEN = (
    OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, SyntaxError, MemoryError,
    NotImplementedError, OverflowError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
    Image.DecompressionBombError,
)  # fmt: skip
NORMALISE = "half: (x - 0.5) / 0.5, as in GPFL; published: by the mean and spread of each channel"


@contextmanager
def reading(path: Path, wanted: str) -> Iterator[None]:
    """A file that cannot be read, or does not hold what is wanted, gets one sentence."""
    try:
        yield
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"{path} cannot be read ({(error.strerror or 'no reason given').lower()}).") from error
        why = (str(error).strip("'\" ").splitlines() or [""])[0].rstrip(".").replace(". ", ", ")
        if "allow_pickle" in why:
            why = "it holds Python objects, which are never loaded"
        raise UserError(
            f"{path} is damaged or not {wanted} ({why or type(error).__name__}); fetch it again."
        ) from error


@contextmanager
def npz(path: Path) -> Iterator[Any]:
    """The arrays of a file in FedLoom's compact layout."""
    with reading(path, "in FedLoom's compact layout"), path.open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with arrays:
            yield arrays


def need(right: bool, what: str) -> None:
    """Inside `reading`: what a file must be."""
    if not right:
        raise ValueError(what)


def idx(path: Path) -> np.ndarray:
    """The IDX format of MNIST, plain or zipped: two zero bytes, the type (8: bytes, 12: integers), the rank, the sizes
    as big-endian integers, then the data."""
    with reading(path, "in IDX format"):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, rank = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{rank}I", raw, 4)
        need(zero == 0 and kind in (8, 12) and rank > 0, "its head is wrong")
        values = np.frombuffer(raw, np.uint8 if kind == 8 else np.dtype(">i4"), offset=4 + 4 * rank)
        need(len(values) == math.prod(shape), "sizes do not match")
        return values.reshape(shape)


def picture(raw: bytes | np.ndarray | Path, mode: str = "RGB") -> np.ndarray:
    """The pixels of an encoded picture, [height, width, channels] (grey: [height, width])."""
    source = raw if isinstance(raw, Path) else io.BytesIO(bytes(raw))
    try:
        with Image.open(source) as image:
            return np.asarray(image.convert(mode))
    except UnidentifiedImageError as error:
        raise ValueError("that is no picture") from error


def together(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What the function makes of each, in their order; Pillow decodes without holding Python's lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(function, items))


def squares(source: np.ndarray | Path, width: int = 32) -> np.ndarray:
    """32x32 pictures that lie below one another in a picture, or each in one row of 1024 pixels: [n, 3, 32, 32]."""
    pixels = picture(source)
    need(pixels.shape[1] == width and pixels.size % (32 * 32 * 3) == 0, f"{pixels.shape} pixels are no such strip")
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


Part = tuple[np.ndarray, np.ndarray]  # pictures, labels


def joined(parts: Iterable[Part]) -> Part:
    x, y = zip(*parts, strict=True)
    return np.concatenate(x), np.concatenate(y)


def pictures(
    name: str, found: Part, test: int, classes: int, full: tuple[int, int], normal: tuple[tuple[float, ...], ...]
) -> RawDataset:
    """The pool of a data set whose last `test` pictures are for testing; one that is not complete says so."""
    (x, y), train = found, len(found[1]) - test
    short = f"{name}: {train:,} of {full[0]:,} training and {test:,} of {full[1]:,} test images"
    return RawDataset(
        x, y, classes, official_test=np.arange(train, len(y)), mean=normal[0], std=normal[1],
        notes=() if (train, test) == full else (f"{short}, so results do not compare with published ones",),
    )  # fmt: skip


def checked_labels(y: np.ndarray, classes: int, count: int) -> np.ndarray:
    """Inside `reading`: as many labels as samples, all of them classes."""
    need(y.shape == (count,) and count > 0, f"{len(y) if y.ndim else 1} labels of {count} samples")
    need(y.dtype.kind in "iu", f"its labels are not whole numbers but {y.dtype}")
    need(bool(y.min() >= 0 and y.max() < classes), f"a label is not in 0..{classes - 1}")
    return y.astype(np.int64)


def by_owner(owner: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rows of each owner, owners in ascending order, rows in the order of the file."""
    order = np.argsort(owner, kind="stable")
    return tuple(np.split(order, np.flatnonzero(np.diff(owner[order])) + 1))
