"""The mean cross-entropy of stacked clients and its slope: one kernel each, where plain operations are eight.

Small models wait for the number of their kernels. Outside of stacked steps on a GPU the plain operations are as good.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.kernels.clients import over_clients
from fedloom.kernels.ours import ours, triton

ROWS, CLASSES = 1 << 11, 1 << 14  # most labels of a batch, each program counts them anew; most classes


def own_loss(logits: Tensor, y: Tensor) -> bool:
    fits = y.numel() <= ROWS and logits.shape[-1] <= CLASSES
    return fits and ours(logits) and logits.dtype == torch.float32


def mean_loss(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """logits (b, c) or (b, t, c), labels y (b,) or (b, t), mask (b,): the mean over known labels in the mask."""
    if y.dim() == 1:
        logits, y = logits.unsqueeze(1), y.unsqueeze(1)
    return MeanLoss.apply(logits, y, mask)


# -- plain operations ---------------------------------------------------------------------------------------------


def _weights(y: Tensor, mask: Tensor) -> Tensor:
    weight = mask[..., None] * (y >= 0)
    return weight / weight.sum((-2, -1), keepdim=True)


def _terms(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """What every label adds to the mean."""
    likelihood = F.log_softmax(logits, -1).gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)
    return -likelihood * _weights(y, mask)


def _slope(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """To logits, from the gradient g to the mean."""
    hit = torch.arange(logits.shape[-1], device=logits.device) == y[..., None]
    return (g[..., None, None] * _weights(y, mask))[..., None] * (torch.softmax(logits, -1) - hit.to(logits.dtype))


# -- operators over stacked clients -------------------------------------------------------------------------------


@torch.library.custom_op("fedloom::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Terms (n, b, t) of the means of clients."""
    return triton("loss").terms(logits, y, mask) if ours(logits) else _terms(logits, y, mask)


@cross_entropy.register_fake
def _(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return logits.new_empty(y.shape)


@torch.library.custom_op("fedloom::cross_entropy_slope", mutates_args=())
def cross_entropy_slope(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """(n, b, t, c) for gradients g (n,)"""
    return triton("loss").slope(g, logits, y, mask) if ours(logits) else _slope(g, logits, y, mask)


@cross_entropy_slope.register_fake
def _(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


over_clients(cross_entropy, 3)
over_clients(cross_entropy_slope, 4)


# -- one client ---------------------------------------------------------------------------------------------------


class MeanLoss(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return cross_entropy(logits[None], y[None], mask[None])[0].sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logits, y, mask = ctx.saved_tensors
        slope = _Slope.apply(g, logits, y, mask)
        if not ctx.needs_input_grad[2]:
            return slope, None, None
        pull = torch.func.vjp(lambda mask: _terms(logits, y, mask).sum(), mask)[1]
        return slope, None, *pull(g)


class _Slope(torch.autograd.Function):
    """By the operator; its own derivatives are those of the plain operations."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return cross_entropy_slope(*(v[None] for v in (g, logits, y, mask)))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, logits, y, mask = ctx.saved_tensors
        to_g, to_logits, to_mask = torch.func.vjp(lambda g, z, m: _slope(g, z, y, m), g, logits, mask)[1](v)
        return to_g, to_logits, None, to_mask
