"""The mean cross-entropy of a batch. For stacked clients on a GPU, the loss and its gradient are one kernel each, where
plain operations are eight: a small model spends most of its step on launching kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.autodiff import inside_vmap
from fedloom.nn.kernels.dispatch import cuda_kernel, has_cuda_kernels, use_custom_kernel, vmap_over_clients

MAX_LABELS, MAX_CLASSES = 1 << 11, 1 << 14  # of a batch: every Triton program counts all labels of a client


def mean_cross_entropy(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """logits (b, c) or (b, t, c), labels y (b,) or (b, t), mask (b,): the mean over known labels (>= 0) in the mask."""
    if inside_vmap() and has_cuda_kernels(logits) and _use_kernel(logits, y):
        return fused_mean(logits, y, mask)
    likelihood = F.log_softmax(logits, dim=-1)
    if y.dim() == 1:
        return (-likelihood.gather(-1, y[..., None]).squeeze(-1) * mask).sum() / mask.sum()
    known = y >= 0
    losses = -likelihood.gather(-1, torch.where(known, y, 0)[..., None]).squeeze(-1) * known
    weight = mask[:, None] * known
    return (losses * weight).sum() / weight.sum()


def _use_kernel(logits: Tensor, y: Tensor) -> bool:
    fits = y.numel() <= MAX_LABELS and logits.shape[-1] <= MAX_CLASSES and logits.dtype == torch.float32
    return use_custom_kernel("cross_entropy", None if fits else "another type than float32, or a large batch")


def fused_mean(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """`mean_cross_entropy` by the operators below."""
    if y.dim() == 1:
        logits, y = logits.unsqueeze(1), y.unsqueeze(1)
    return _MeanCrossEntropy.apply(logits, y, mask)


# -- plain operations ---------------------------------------------------------------------------------------------


def _weights(y: Tensor, mask: Tensor) -> Tensor:
    weight = mask[..., None] * (y >= 0)
    return weight / weight.sum((-2, -1), keepdim=True)


def _terms(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The contribution of every label to the mean."""
    likelihood = F.log_softmax(logits, -1).gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)
    return -likelihood * _weights(y, mask)


def _gradient(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The gradient to logits, from the gradient g to the mean."""
    hit = torch.arange(logits.shape[-1], device=logits.device) == y[..., None]
    return (g[..., None, None] * _weights(y, mask))[..., None] * (torch.softmax(logits, -1) - hit.to(logits.dtype))


# -- operators over stacked clients -------------------------------------------------------------------------------


@torch.library.custom_op("fedloom::cross_entropy_terms", mutates_args=())
def cross_entropy_terms(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The contributions (n, b, t) of all labels to the means of n clients."""
    return _terms(logits, y, mask)


@cross_entropy_terms.register_fake
def _(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return logits.new_empty(y.shape)


@torch.library.custom_op("fedloom::cross_entropy_gradient", mutates_args=())
def cross_entropy_gradient(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The gradients (n, b, t, c) to logits for gradients g (n,) to the means."""
    return _gradient(g, logits, y, mask)


@cross_entropy_gradient.register_fake
def _(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


for _operator, _tensors, _function in ((cross_entropy_terms, 3, "terms"), (cross_entropy_gradient, 4, "gradient")):
    vmap_over_clients(_operator, _tensors)
    cuda_kernel(_operator, "cross_entropy", "cross_entropy", _function)


# -- one client ---------------------------------------------------------------------------------------------------


class _MeanCrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return cross_entropy_terms(logits[None], y[None], mask[None])[0].sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logits, y, mask = ctx.saved_tensors
        gradient = _Gradient.apply(g, logits, y, mask)
        if not ctx.needs_input_grad[2]:
            return gradient, None, None
        pull = torch.func.vjp(lambda mask: _terms(logits, y, mask).sum(), mask)[1]
        return gradient, None, *pull(g)


class _Gradient(torch.autograd.Function):
    """The gradient by the operator; its own derivatives are those of the plain operations."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return cross_entropy_gradient(*(v[None] for v in (g, logits, y, mask)))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, logits, y, mask = ctx.saved_tensors
        to_g, to_logits, to_mask = torch.func.vjp(lambda g, z, m: _gradient(g, z, y, m), g, logits, mask)[1](v)
        return to_g, to_logits, None, to_mask
