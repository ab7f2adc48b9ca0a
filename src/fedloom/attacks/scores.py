"""How close recovered samples are to the originals."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

WINDOW = 7  # side of the windows in which pictures are compared
RECOVERED = 20.0  # PSNR from which a sample counts as recovered: the error is a tenth of the range of values


def reference_psnr(x: Tensor, found: Tensor) -> float:
    """The PSNR of GPFL's authors, `20 log10(1 / sqrt(mse / 3))`: pixels x in -1..1 are compared with recovered ones in
    0..1, and the error is divided by 3, so values cannot be compared with other papers'."""
    mse = ((x - found) ** 2).double().mean().item()
    return _decibels(1.0, mse / 3)


def psnr(x: Tensor, found: Tensor, width: float) -> float:
    """The peak signal-to-noise ratio in decibels, `10 log10(width^2 / mse)`, where `width` is the range of values (2
    for pixels in -1..1). Identical samples have infinity."""
    return _decibels(width**2, ((x - found) ** 2).double().mean().item())


def _decibels(peak: float, mse: float) -> float:
    if not math.isfinite(mse):
        return math.nan
    return 10 * math.log10(peak / mse) if mse else math.inf


def ssim(x: Tensor, found: Tensor, width: float) -> float:
    """The structural similarity of pictures (samples, channels, height, width): 1 for identical ones, about 0 for
    unrelated ones; NaN for samples that are no pictures of at least 7x7 pixels.

    Wang, Bovik, Sheikh, Simoncelli. Image Quality Assessment: From Error Visibility to Structural Similarity. IEEE
    Transactions on Image Processing, 2004. Windows are uniform and 7x7, covariances those of samples.
    """
    if x.dim() != 4 or min(x.shape[-2:]) < WINDOW:
        return math.nan
    x, y = x.double(), found.double()
    count = WINDOW**2

    def mean(v: Tensor) -> Tensor:
        return F.avg_pool2d(v, WINDOW, stride=1)

    mx, my = mean(x), mean(y)
    vx, vy, both = (
        (mean(a * b) - ma * mb) * count / (count - 1)
        for a, b, ma, mb in ((x, x, mx, mx), (y, y, my, my), (x, y, mx, my))
    )
    c1, c2 = (0.01 * width) ** 2, (0.03 * width) ** 2
    similarity = (2 * mx * my + c1) * (2 * both + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    return float(similarity.mean())
