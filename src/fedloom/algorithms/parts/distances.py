"""Distances between what two models say about the same samples: their logits, or any other vectors."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.algorithm import Batch
from fedloom.core.targets import Classes


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the angle; 0, and without a gradient, where a vector is zero (ReLU features can be)."""
    lengths = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    zero = lengths == 0
    return ((a * b).sum(-1) / lengths.masked_fill(zero, 1)).masked_fill(zero, 0)


def cos(a: Tensor, b: Tensor) -> Tensor:
    """One minus the cosine of every pair."""
    return 1 - cosine(a, b)


def l2(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distance of every pair."""
    return torch.linalg.vector_norm(a - b, dim=-1)  # where a = b its gradient is 0; that of sqrt would be NaN


def mse(a: Tensor, b: Tensor) -> Tensor:
    """The square of l2: a sum over classes, not a mean."""
    return ((a - b) ** 2).sum(-1)


kl = Classes().divergence
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "cos": cos, "l2": l2, "mse": mse}


def contrast(z: Tensor, near: Tensor, far: Tensor, tau: float = 0.5) -> Tensor:
    """MOON's loss of every sample, -log(e^{cos(z, near)/tau} / (e^{cos(z, near)/tau} + e^{cos(z, far)/tau}))."""
    return F.softplus((cosine(z, far) - cosine(z, near)) / tau)


def batch_mean(values: Tensor, batch: Batch) -> Tensor:
    """Mean over the samples (for sequences: over the positions) that are not padding."""
    return (values * batch.weight).sum() / batch.weight.sum()
