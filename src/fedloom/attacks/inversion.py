"""Reconstruction of samples from what clients upload.

Two attacks share one idea: look for samples that would change the model as it was changed. `deep_leakage` is the attack
of the GPFL paper on a whole round of training, of which a gradient is a poor account, so it usually fails. `one_step`
attacks an upload after a single step on a small batch: the change of the model is the gradient, and it often succeeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.func import grad, vmap

from fedloom.attacks.lbfgs import Objective, minimise
from fedloom.attacks.uploads import Shown, View
from fedloom.core.keys import fold, normal, stream
from fedloom.core.tree import Params

HISTORY = 100  # of L-BFGS
MAX_NUMBERS = 1 << 28  # in the history of all problems that are solved at once
STARTS = 4  # of the attack on one step, of which the best is kept
STEP = 0.1  # its step size, in halves of the range of samples


class Range(NamedTuple):
    """The smallest and the largest value of a sample, as the model receives it; the server knows them."""

    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low


class Recovered(NamedTuple):
    """Batches that an attack has found, one per problem."""

    x: Tensor  # (problems, samples, ...), in 0..1 for `deep_leakage` and within the range for `one_step`
    distance: Tensor  # (problems,) of the change that these samples would make from the one that was uploaded


class Problems(NamedTuple):
    """Batches of equal size to be recovered, one row each."""

    view: View
    sent: Params  # stacked
    uploaded: Params
    shape: tuple[int, ...]  # (samples, ...) of a batch
    keys: Tensor  # random keys, from which the search starts


def problems(view: View, shown: list[Shown], shape: tuple[int, ...], keys: Tensor) -> Problems:
    """The problems of some uploads, one each."""
    sent, uploaded = (
        {name: torch.stack([getattr(one, kind)[name] for one in shown]) for name in shown[0].uploaded}
        for kind in ("sent", "uploaded")
    )
    return Problems(view, sent, uploaded, shape, keys)


def deep_leakage(given: Problems, steps: int) -> Recovered:
    """The attack of Zhu, Liu and Han, *Deep Leakage from Gradients* (NeurIPS 2019), as GPFL's authors use it in section
    4.7 of their paper.

    Samples `sigmoid(x)` and outputs z are sought for which the gradient of the mean squared error between the network's
    outputs and z, at the *uploaded* parameters, equals the change by local training. Both start as normal numbers;
    L-BFGS as in PyTorch makes `steps` steps of 20 iterations.
    """
    dtype, size = _dtype(given), math.prod(given.shape)
    outputs = _output_shape(given)
    numbers = size + math.prod(outputs)

    def mismatch(point: Tensor, params: Params, change: Params) -> Tensor:
        x, z = torch.sigmoid(point[:size]).view(given.shape), point[size:].view(outputs)

        def error(attacked: Params) -> Tensor:
            return ((given.view.forward({**params, **attacked}, x) - z) ** 2).mean()

        found = grad(error)({name: params[name] for name in change})
        return _sum([((found[name] - change[name]) ** 2).sum() for name in change])

    points, values = [], []
    for rows in torch.arange(len(given.keys)).split(max(1, MAX_NUMBERS // (2 * HISTORY * numbers))):
        params = {name: v[rows] for name, v in given.uploaded.items()}
        change = {name: given.sent[name][rows] - params[name] for name in given.view.attacked}
        objective = _objective(mismatch, params, change)
        start = vmap(lambda key: normal(key, (numbers,), dtype))(given.keys[rows])
        point, value = minimise(objective, start, steps, history=HISTORY)
        points.append(torch.sigmoid(point[:, :size]).view(-1, *given.shape))
        values.append(value)
    return Recovered(torch.cat(points), torch.cat(values))


def _objective(mismatch: Callable[..., Tensor], params: Params, change: Params) -> Objective:
    """Values and gradients at the points of all problems."""

    def of_one(point: Tensor, params: Params, change: Params) -> tuple[Tensor, Tensor]:
        value = mismatch(point, params, change)
        return value, value

    both = vmap(grad(of_one, has_aux=True))

    def objective(points: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = both(points, params, change)
        return value, gradient

    return objective


def one_step(given: Problems, within: Range, steps: int) -> Recovered:
    """The attack on an upload after one step of gradient descent: samples x, and gradients u of the loss to the outputs
    of the network, are sought for which the gradient to the *sent* parameters points the same way as the change by
    training (cosine similarity, as in Geiping et al., *Inverting Gradients*, NeurIPS 2020).

    No learning rate and no labels are needed: u stands for both, and for all that the client does behind the network
    (such as a private head). Adam makes `steps` steps from each of several random starts; the attacker keeps the start
    that comes closest.
    """
    dtype, outputs, size = _dtype(given), _output_shape(given), math.prod(given.shape)
    change = {name: given.sent[name] - given.uploaded[name] for name in given.view.attacked}
    length = torch.sqrt(_sum([(v**2).flatten(1).sum(1) for v in change.values()])).clamp(min=1e-30)
    change = {name: v / length.view(-1, *[1] * (v.dim() - 1)) for name, v in change.items()}
    half, middle = within.width / 2, (within.low + within.high) / 2

    def distance(point: Tensor, params: Params, change: Params) -> Tensor:
        x, u = point[:size].view(given.shape) * half + middle, point[size:].view(outputs)

        def product(attacked: Params) -> Tensor:
            return (given.view.forward({**params, **attacked}, x) * u).sum()

        found = grad(product)({name: params[name] for name in change})
        along = _sum([(found[name] * change[name]).sum() for name in change])
        return 1 - along / torch.sqrt(_sum([(v**2).sum() for v in found.values()]) + 1e-30)

    objective = _objective(distance, given.sent, change)
    runs = []
    for number in range(STARTS):
        keys = fold(given.keys, stream("start"), number)
        point = 0.5 * vmap(lambda key: normal(key, (size + math.prod(outputs),), dtype))(keys)
        point[:, size:] *= 0.2
        runs.append(_adam(objective, point, size, steps))
    points, distances = (torch.stack(each) for each in zip(*runs, strict=True))
    best = torch.where(torch.isfinite(distances), distances, torch.inf).argmin(0), torch.arange(len(given.keys))
    return Recovered(points[best][:, :size].view(-1, *given.shape) * half + middle, distances[best])


def _adam(objective: Objective, point: Tensor, size: int, steps: int) -> tuple[Tensor, Tensor]:
    """The points after Adam with a learning rate that falls to zero, and their values; the first `size` coordinates
    stay within -1..1."""
    m, v = torch.zeros_like(point), torch.zeros_like(point)
    for k in range(1, steps + 1):
        _, g = objective(point)
        g = torch.nan_to_num(g)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        rate = STEP * (1 + math.cos(math.pi * k / steps)) / 2
        point = point - rate * (m / (1 - 0.9**k)) / (torch.sqrt(v / (1 - 0.999**k)) + 1e-12)
        point[:, :size] = point[:, :size].clamp(-1, 1)
    return point, objective(point)[0]


def in_best_order(x: Tensor, found: Tensor) -> Tensor:
    """The samples of a batch that was found, in the order in which they are closest to those of x: gradients do not
    tell the order of samples."""
    gaps = torch.cdist(x.flatten(1).double(), torch.nan_to_num(found).flatten(1).double()) ** 2
    return found[torch.as_tensor(linear_sum_assignment(gaps.cpu().numpy())[1], device=found.device)]


def _output_shape(given: Problems) -> tuple[int, ...]:
    params = {name: v[0] for name, v in given.uploaded.items()}
    like = next(iter(params.values()))
    return tuple(given.view.forward(params, like.new_zeros(given.shape)).shape)


def _dtype(given: Problems) -> torch.dtype:
    return next(iter(given.uploaded.values())).dtype


def _sum(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum(0)
