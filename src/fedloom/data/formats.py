"""Readers of file formats that several data sets share. None of them loads a pickle."""

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
from fedloom.data.limits import check_npz, read_blocks, require_file

T = TypeVar("T")
R = TypeVar("R")
READ_ERRORS = (
    OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, SyntaxError, MemoryError,
    OverflowError, RuntimeError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
    Image.DecompressionBombError,
)  # fmt: skip
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")  # not PostScript, which Pillow hands to a program
NORMALISE = "half: (x - 0.5) / 0.5, as in GPFL; published: by mean and standard deviation of each channel"


@contextmanager
def readable(path: Path, expected: str) -> Iterator[None]:
    """Context in which any error of reading a file becomes a UserError.

    Args:
        path: the file.
        expected: what it should be, as the message says it: "PATH is damaged or not EXPECTED".
    """
    if os.path.exists(path):
        require_file(path)
    try:
        yield
    except READ_ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"{path} cannot be read ({(error.strerror or 'no reason given').lower()}).") from error
        reason = (str(error).strip("'\" ").splitlines() or [""])[0].rstrip(".").replace(". ", ", ")
        if "allow_pickle" in reason:
            reason = "it holds Python objects, which are never loaded"
        raise UserError(
            f"{path} is damaged or not {expected} ({reason or type(error).__name__}); fetch it again."
        ) from error


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """Open an .npz file of FedLoom's compact layout; yields its arrays by name."""
    with readable(path, "in FedLoom's compact layout"), path.open("rb") as file:
        check_npz(path, file)
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with arrays:
            yield arrays


def require(condition: bool, message: str) -> None:
    """Inside `readable`: fail with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def read_idx(path: Path) -> np.ndarray:
    """Read an array in the IDX format of MNIST, plain or as .gz: two zero bytes, the type (8: bytes, 12: integers), the
    rank, the sizes as big-endian integers, then the data."""
    with readable(path, "in IDX format"):
        raw = b"".join(read_blocks(path))
        zero, kind, rank = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{rank}I", raw, 4)
        require(zero == 0 and kind in (8, 12) and rank > 0, "its head is wrong")
        values = np.frombuffer(raw, np.uint8 if kind == 8 else np.dtype(">i4"), offset=4 + 4 * rank)
        require(len(values) == math.prod(shape), "sizes do not match")
        return values.reshape(shape)


def decode_image(raw: bytes | np.ndarray | Path, mode: str = "RGB") -> np.ndarray:
    """Decode an image file: [height, width, channels], or [height, width] in grey (mode "L")."""
    source = raw if isinstance(raw, Path) else io.BytesIO(bytes(raw))
    try:
        with Image.open(source, formats=IMAGE_FORMATS) as image:
            return np.asarray(image.convert(mode))
    except UnidentifiedImageError as error:
        raise ValueError("that is no picture") from error


def map_in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """list(map(function, items)) in several threads. It helps to decode images: Pillow releases Python's lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(function, items))


def decode_image_strip(source: np.ndarray | Path, width: int = 32) -> np.ndarray:
    """Decode an image that consists of 32x32 images, to [n, 3, 32, 32].

    They lie below one another (`width` is 32), or each is one row of pixels (`width` is 1024).
    """
    pixels = decode_image(source)
    require(pixels.shape[1] == width and pixels.size % (32 * 32 * 3) == 0, f"{pixels.shape} pixels are no such strip")
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


Labelled = tuple[np.ndarray, np.ndarray]  # images, labels


def join_parts(parts: Iterable[Labelled]) -> Labelled:
    """All parts as one."""
    x, y = zip(*parts, strict=True)
    return np.concatenate(x), np.concatenate(y)


def image_dataset(
    name: str, data: Labelled, test: int, classes: int, full: tuple[int, int], mean_std: tuple[tuple[float, ...], ...]
) -> RawDataset:
    """A raw data set of images.

    Args:
        name: name of the data set.
        data: images and labels, those for training first.
        test: number of test images.
        classes: number of classes.
        full: numbers of training and test images of the complete data set; a note says so if there are fewer.
        mean_std: mean and standard deviation of the pixels, per channel or for all.
    """
    (x, y), train = data, len(data[1]) - test
    sizes = f"{name}: {train:,} of {full[0]:,} training and {test:,} of {full[1]:,} test images"
    return RawDataset(
        x, y, classes, official_test=np.arange(train, len(y)), mean=mean_std[0], std=mean_std[1],
        notes=() if (train, test) == full else (f"{sizes}, so results do not compare with published ones",),
    )  # fmt: skip


def validated_labels(y: np.ndarray, classes: int, count: int) -> np.ndarray:
    """Inside `readable`: the labels as int64; fails unless there are `count`, all of them from 0 to `classes` - 1."""
    require(y.shape == (count,) and count > 0, f"{len(y) if y.ndim else 1} labels of {count} samples")
    require(y.dtype.kind in "iu", f"its labels are not whole numbers but {y.dtype}")
    require(bool(y.min() >= 0 and y.max() < classes), f"a label is not in 0..{classes - 1}")
    return y.astype(np.int64)


def rows_by_client(client: np.ndarray) -> tuple[np.ndarray, ...]:
    """The rows of every client, given the client of every row: clients in ascending order, rows in their order."""
    order = np.argsort(client, kind="stable")
    return tuple(np.split(order, np.flatnonzero(np.diff(client[order])) + 1))
