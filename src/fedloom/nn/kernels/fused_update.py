"""The end of a captured step: many small tensors written by one kernel."""

import torch
from torch import Tensor

from fedloom.nn.kernels.dispatch import cuda_kernel


@torch.library.custom_op("fedloom::fused_update", mutates_args=("w", "count"))
def fused_update(w: list[Tensor], g: list[Tensor], alphas: list[float], copies: list[bool], count: Tensor) -> None:
    """w -= alpha * g for every pair, or w = g where `copies` is true; a g with an additional second axis is summed over
    it. `count` is increased by one."""
    for mine, new, alpha, copy in zip(w, g, alphas, copies, strict=True):
        new = new.sum(1) if new.dim() > mine.dim() else new
        mine.copy_(new) if copy else mine.sub_(new, alpha=alpha)
    count.add_(1)


@fused_update.register_fake
def _(w: list[Tensor], g: list[Tensor], alphas: list[float], copies: list[bool], count: Tensor) -> None:
    return None


cuda_kernel(fused_update, "fused_update", "fused_update", "fused_update")
FUSED_UPDATE = torch.ops.fedloom.fused_update.default
