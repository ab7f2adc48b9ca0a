"""Pictures become arrays of pixels, all of one size."""

from __future__ import annotations

import io
import math
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from fedloom.core.errors import UserError
from fedloom.data.user_data.findings import Findings, reason
from fedloom.device.memory import available_memory

GREY = ("1", "L", "LA")
COLOUR = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB", "RGBX", "RGBa", "La")


class Picture(NamedTuple):
    name: str
    content: bytes | str  # the file, or its path


def stacked(pictures: list[Picture], side: int | None, findings: Findings) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of those that can be read [n, channels, height, width], and which those are."""
    heads = [_head(picture, findings) for picture in pictures]
    sizes = Counter(head[0] for head in heads if head is not None)
    if not sizes:
        raise UserError(f"{pictures[0].name} is not a picture that can be read, nor is any other.")
    common = sizes.most_common(1)[0][0]
    if len(sizes) > 1 and side is None:
        a, b = (
            next(p.name for p, h in zip(pictures, heads, strict=True) if h and h[0] == size) for size in list(sizes)[:2]
        )
        (wa, ha), (wb, hb) = list(sizes)[:2]
        findings.problem(
            "sizes",
            f"Pictures have {len(sizes)} sizes, such as {wa}x{ha} ({a}) and {wb}x{hb} ({b}); bring all to one with "
            f"resize={min(common)}.",
        )
        side = min(common)
    width, height = (side, side) if side is not None else common
    grey = all(head[1] for head in heads if head is not None)
    if not grey and any(head[1] for head in heads if head is not None):
        findings.remark("channels", "Some pictures are grey and some in colour; all are used in colour.")
    shape = (sum(head is not None for head in heads), 1 if grey else 3, height, width)
    if math.prod(shape) > available_memory(torch.device("cpu")) // 2:
        raise UserError(
            f"{shape[0]} pictures of {width}x{height} pixels take {math.prod(shape) / 2**30:.1f} GiB, over half of the "
            "free memory; set resize=64 or so."
        )
    x, good = np.zeros(shape, dtype=np.uint8), np.zeros(len(pictures), dtype=bool)
    count = 0
    for i, (picture, head) in enumerate(zip(pictures, heads, strict=True)):
        pixels = None if head is None else _pixels(picture, grey, (width, height), findings)
        if pixels is not None:
            x[count], good[i], count = pixels, True, count + 1
    return x[:count], good


def _open(picture: Picture) -> Image.Image:
    content = picture.content
    return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)


def _head(picture: Picture, findings: Findings) -> tuple[tuple[int, int], bool] | None:
    """Size, and whether it is grey, without reading the pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with _open(picture) as image:
                size, mode = image.size, image.mode
    except UnidentifiedImageError:
        empty = not picture.content or (isinstance(picture.content, str) and not Path(picture.content).stat().st_size)
        what = "is empty" if empty else "is not a picture, whatever its name says"
        findings.problem("unreadable", f"{picture.name} {what}; remove it or replace it.")
        return None
    except Exception as error:  # whatever a decoder raises is about this file
        findings.problem("unreadable", f"{picture.name} cannot be read ({reason(error)}).")
        return None
    if mode not in GREY and mode not in COLOUR:
        findings.problem("unreadable", f"{picture.name} has pixels of a kind ({mode}) other than 8 bits; convert it.")
        return None
    return size, mode in GREY


def _pixels(picture: Picture, grey: bool, size: tuple[int, int], findings: Findings) -> np.ndarray | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _open(picture) as image:
                made = image.convert("L" if grey else "RGB")
        if made.size != size:
            made = made.resize(size, Image.Resampling.BILINEAR)
    except Exception as error:
        findings.problem("unreadable", f"{picture.name} is damaged ({reason(error)}); remove it or replace it.")
        return None
    pixels = np.asarray(made, dtype=np.uint8)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)
