"""The ends of captured steps: many small tensors written by one kernel."""

import torch
from torch import Tensor

from fedloom.kernels.ours import ours, triton


@torch.library.custom_op("fedloom::update", mutates_args=("w", "count"))
def update(w: list[Tensor], g: list[Tensor], alphas: list[float], copies: list[bool], count: Tensor) -> None:
    """w -= alpha * g one by one, or w = g for copies. A g with one more axis, the second, is summed over it. The count
    goes up by one."""
    if ours(w[0]):
        return triton("updates").update(w, g, alphas, copies, count)
    for mine, new, alpha, copy in zip(w, g, alphas, copies, strict=True):
        new = new.sum(1) if new.dim() > mine.dim() else new
        mine.copy_(new) if copy else mine.sub_(new, alpha=alpha)
    count.add_(1)
    return None


@update.register_fake
def _(w: list[Tensor], g: list[Tensor], alphas: list[float], copies: list[bool], count: Tensor) -> None:
    return None


UPDATE = torch.ops.fedloom.update.default
