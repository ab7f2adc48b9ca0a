"""Image files as arrays of pixels, all of one size."""

import io
import math
import warnings
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedloom.core.errors import UserError
from fedloom.data.formats import IMAGE_FORMATS
from fedloom.data.limits import memory_limit
from fedloom.data.user_data.issues import Issues, error_text

GREY_MODES = ("1", "L", "LA")
COLOUR_MODES = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB", "RGBX", "RGBa", "La")


class ImageSource(NamedTuple):
    """An encoded image and the name by which messages refer to it."""

    name: str
    content: bytes | str | Image.Image  # the bytes of the file, its path, or what is in it


class Header(NamedTuple):
    """What an image file says about its pixels."""

    size: tuple[int, int]  # width, height
    grey: bool


def load_images(images: list[ImageSource], side: int | None, issues: Issues) -> tuple[np.ndarray, np.ndarray]:
    """Decode images of training data to uint8 [images, channels, height, width]; also returns which could be read.

    Args:
        images: the images.
        side: resize all images to side x side pixels; None if they have one size already.
        issues: where unreadable images and different sizes are reported.
    """
    headers = [read_header(image, issues) for image in images]
    sizes = Counter(header.size for header in headers if header is not None)
    if not sizes:
        raise UserError(f"{images[0].name} is not a picture that can be read, nor is any other.")
    common_size = sizes.most_common(1)[0][0]
    if len(sizes) > 1 and side is None:
        a, b = (
            next(p.name for p, h in zip(images, headers, strict=True) if h and h.size == size)
            for size in list(sizes)[:2]
        )
        (wa, ha), (wb, hb) = list(sizes)[:2]
        issues.problem(
            "sizes",
            f"Pictures have {len(sizes)} sizes, such as {wa}x{ha} ({a}) and {wb}x{hb} ({b}); bring all to one with "
            f"resize={min(common_size)}.",
        )
        side = min(common_size)
    width, height = (side, side) if side is not None else common_size
    grey = all(header.grey for header in headers if header is not None)
    if not grey and any(header.grey for header in headers if header is not None):
        issues.remark("channels", "Some pictures are grey and some in colour; all are used in colour.")
    readable = np.array([header is not None for header in headers])
    return decode_images(images, readable, (1 if grey else 3, height, width), issues)


def decode_images(
    images: list[ImageSource], readable: np.ndarray, shape: tuple[int, int, int], issues: Issues
) -> tuple[np.ndarray, np.ndarray]:
    """Decode those images that are readable to uint8 [images, *shape]; also returns which could be decoded.

    Args:
        images: the images.
        readable: which of them have a header that can be read.
        shape: channels, height and width that all are brought to.
        issues: where damaged images are reported.
    """
    channels, height, width = shape
    size = len(images) * math.prod(shape)
    if size > memory_limit():
        raise UserError(
            f"{len(images)} pictures of {width}x{height} pixels take {size / 2**30:.1f} GiB, over half of the free "
            "memory; set resize=64 or so."
        )
    x, decoded = np.zeros((len(images), *shape), dtype=np.uint8), readable.copy()
    for i in np.flatnonzero(readable):
        pixels = _pixels(images[i], channels == 1, (width, height), issues)
        decoded[i] = pixels is not None
        if pixels is not None:
            x[i] = pixels
    return x, decoded


def _open(image: ImageSource) -> AbstractContextManager[Image.Image]:
    content = image.content
    if isinstance(content, Image.Image):
        return nullcontext(content)
    return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=IMAGE_FORMATS)


def read_header(image: ImageSource, issues: Issues) -> Header | None:
    """The header of an image, without decoding it; None if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with _open(image) as opened:
                size, mode = opened.size, opened.mode
    except UnidentifiedImageError:
        empty = not image.content or (isinstance(image.content, str) and not Path(image.content).stat().st_size)
        what = "is empty" if empty else "is not a picture, whatever its name says"
        issues.problem("unreadable", f"{image.name} {what}; remove it or replace it.")
        return None
    except Exception as error:  # decoders raise all kinds of exceptions
        issues.problem("unreadable", f"{image.name} cannot be read ({error_text(error)}).")
        return None
    if mode not in GREY_MODES and mode not in COLOUR_MODES:
        issues.problem("unreadable", f"{image.name} has pixels of a kind ({mode}) other than 8 bits; convert it.")
        return None
    return Header(size, mode in GREY_MODES)


def _pixels(image: ImageSource, grey: bool, size: tuple[int, int], issues: Issues) -> np.ndarray | None:
    """Pixels [channels, height, width] of an image resized to (width, height); None if it is damaged."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _open(image) as opened:
                decoded = opened.convert("L" if grey else "RGB")
        if decoded.size != size:
            decoded = decoded.resize(size, Image.Resampling.BILINEAR)
    except Exception as error:
        issues.problem("unreadable", f"{image.name} is damaged ({error_text(error)}); remove it or replace it.")
        return None
    pixels = np.asarray(decoded, dtype=np.uint8)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)
