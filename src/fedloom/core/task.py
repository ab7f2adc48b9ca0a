"""What an algorithm may use: the model, the loss, the optimiser step, and the settings of local training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.algorithm import Batch, Output, Slot
from fedloom.core.autodiff import grad
from fedloom.core.federation import Federation
from fedloom.core.keys import Key
from fedloom.core.optimizers import Optimizer, Schedule
from fedloom.core.privacy import UploadPrivacy
from fedloom.core.server_optimizer import ServerOptimizer
from fedloom.core.tree import Number, Params, Tree

Loss = Callable[[Output, Batch], Tensor]
Maybe = Tensor | None


class Network(Protocol):
    """A model as pure functions of its parameters, split into body and head; implemented by
    `fedloom.nn.network.Network`."""

    body: tuple[str, ...]  # names of the body's parameters
    head: tuple[str, ...]  # names of the head's parameters
    layers: tuple[tuple[str, ...], ...]  # names of parameters by layer
    norms: tuple[str, ...]  # names of the parameters of normalisation layers
    buffers: Params  # initial running statistics
    feature_dim: int
    outputs: int  # number of logits of one prediction
    positions: tuple[int, ...]  # () where a sample has one prediction
    logits: int  # number of logits of one sample
    half: bool  # computes in bfloat16 what tolerates it

    def init(self, seed: int) -> Params: ...
    def apply(
        self, params: Params, buffers: Params, x: Tensor, *, train: bool, mask: Maybe = None, key: Maybe = None
    ) -> Output: ...
    def apply_head(self, params: Params, buffers: Params, features: Tensor) -> Tensor: ...
    def mean_cross_entropy(self, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Task:
    """The learning problem of a run: data, model and the settings of local training.

    Algorithms receive a task in every call. They read settings from it and compute with its functions; they never
    change it, but may derive another one with `dataclasses.replace(task, clip=None)`.
    """

    data: Federation
    network: Network
    lr: Number = 0.01  # eta, local learning rate
    momentum: Number = 0.0
    weight_decay: Number = 0.0
    clip: Number | None = None  # gradient norm, before weight decay
    batch_size: int = 10  # B, samples in a batch
    epochs: int = 1  # E, local epochs per round
    rounds: int = 1  # T, rounds of the run
    participation: float = 1.0  # rho, share of the clients in a round, or their number if above 1
    participation_low: float | None = None  # the share is drawn in every round, from this one to `participation`
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)  # of the learning rate over rounds
    lr_factor: Number = 1.0  # of learning rates in this round, if there is a schedule
    class_weights: bool = False  # a client's classes count equally in its loss, however frequent they are
    class_counts: tuple[Tensor, Tensor] | None = None  # n_{i,c} and n_i of the client whose step this is, if so
    server_optimizer: ServerOptimizer | None = None  # of what the server averages, instead of taking the average
    privacy: UploadPrivacy | None = None  # of updates before they leave a client
    trim: float = 0.0  # where the server averages: share of values left out at either end; 0.5 for the median

    @property
    def classes(self) -> int:
        """Number of classes or labels; 1 for a number."""
        return self.data.classes

    @property
    def clients(self) -> int:
        """N, the number of participating clients."""
        return self.data.clients

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of samples and parameters."""
        return self.data.dtype

    # -- models -------------------------------------------------------------------------------------------------

    def init(self, key: Key) -> Params:
        """The initial model of a seed."""
        return self.network.init(key)

    def slot(self, params: Params) -> Slot:
        """A model copy that starts training now, with a fresh optimiser. Its running statistics are the initial ones;
        the engine replaces them by those that the client kept from its last participation."""
        return Slot(params, self.network.buffers, self.optimizer.init(params, self.momentum))

    def body(self, params: Params) -> Params:
        """The parameters of the body (all layers but the head)."""
        return {name: params[name] for name in self.network.body}

    def head(self, params: Params) -> Params:
        """The parameters of the head (the last layer)."""
        return {name: params[name] for name in self.network.head}

    @property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """Names of parameters by layer."""
        return self.network.layers

    @property
    def body_layers(self) -> tuple[tuple[str, ...], ...]:
        """Names of the body's parameters by layer."""
        return tuple(layer for layer in self.layers if layer[0] in self.network.body)

    # -- passes -------------------------------------------------------------------------------------------------

    def forward(self, slot: Slot, batch: Batch) -> Output:
        """A forward pass in training mode: batch statistics, dropout keyed by the batch."""
        return self.network.apply(slot.params, slot.buffers, batch.x, train=True, mask=batch.mask, key=batch.key)

    def predict(self, slot: Slot, x: Tensor) -> Output:
        """A forward pass in evaluation mode."""
        return self.network.apply(slot.params, slot.buffers, x, train=False)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample (cross-entropy; for numbers, the squared error); for sequences, of every position,
        padding (-1) being 0."""
        return self.data.targets.losses(logits, y)

    def loss(self, out: Output, batch: Batch) -> Tensor:
        """F_B: mean loss over the samples (for sequences: over the positions) that are not padding. With class weights,
        samples of rare classes count more, see `Targets.weights`."""
        targets, logits, y = self.data.targets, out.logits, batch.y
        weights = None
        if self.class_counts is not None:
            weights = targets.weights(y, *(v.to(self.dtype) for v in self.class_counts))
        if targets.kind == "classes":
            if weights is None:
                return self.network.mean_cross_entropy(logits, y, batch.mask)
            weight = batch.mask * weights
            share = weight.sum() / batch.mask.sum().clamp(min=1)
            return self.network.mean_cross_entropy(logits, y, weight) * share
        return (targets.losses(logits, y, weights) * batch.mask).sum() / batch.mask.sum()

    def divergence(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """The Kullback-Leibler divergence of what two models predict, for every sample; the teacher does not learn."""
        return self.data.targets.divergence(logits, teacher.detach())

    def grad(
        self, slot: Slot, batch: Batch, only: Iterable[str] | None = None, loss: Loss | None = None
    ) -> tuple[Params, Slot]:
        """The gradient of the batch loss, and the slot with its running statistics advanced. `only` names the
        parameters to differentiate by (default: all); `loss(output, batch)` replaces the mean loss."""
        at = slot.params if only is None else {name: slot.params[name] for name in only}

        def f(params: Params) -> tuple[Tensor, Params]:
            out = self.forward(slot._replace(params={**slot.params, **params}), batch)
            return (loss or self.loss)(out, batch), out.buffers

        gradient, buffers = grad(f, at)
        return gradient, slot._replace(buffers=buffers)

    def step(self, slot: Slot, gradient: Params, lr: Number | None = None) -> Slot:
        """One step of the optimiser on the parameters named in the gradient, after clipping it to norm `clip`, if set.
        By default it is SGD: g = g + wd*w; v = mom*v + g; w = w - eta*v. `lr` replaces the task's eta."""
        eta = self.eta if lr is None else self.scheduled(lr)
        if self.clip is not None:
            gradient = clip_norm(gradient, self.clip)
        params, moments = self.optimizer.step(
            slot.params, gradient, slot.moments, eta, self.momentum, self.weight_decay
        )
        return Slot(params, slot.buffers, moments)

    def in_round(self, t: Tensor) -> Task:
        """The task with the learning rate of round t. Steps know it; what `finish` computes with eta needs this."""
        if self.schedule.constant:
            return self
        return replace(self, lr_factor=self.schedule.factor(t, self.dtype))

    @property
    def eta(self) -> Number:
        """The learning rate in this round."""
        return self.scheduled(self.lr)

    def scheduled(self, lr: Number) -> Number:
        """A learning rate as it is in this round."""
        return lr * self.lr_factor if isinstance(self.lr_factor, Tensor) else lr

    # -- the server's step -----------------------------------------------------------------------------------------

    def average(self, stacked: Tree, weights: Tensor | None = None) -> Tree:
        """What the server makes of stacked uploads: their mean, weighted (usually by numbers of samples) or plain. With
        `trim`, it is the trimmed mean or median of each coordinate; weights then only tell who counts, being not 0."""
        if self.trim:
            rows = tree.leaves(stacked)[0]
            counts = torch.ones(len(rows), device=rows.device) if weights is None else weights
            return tree.trimmed_mean(stacked, counts, self.trim)
        return tree.uniform_mean(stacked) if weights is None else tree.mean(stacked, weights)

    # -- scores -------------------------------------------------------------------------------------------------

    def score(self, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """(correct, loss, 1) for every sample in the mask, zeros for padding; for sequences, summed over positions. For
        numbers, the squared error is in the place of `correct`. Targets that the data do not score have zeros too, so
        accuracy and loss are of the same targets."""
        targets = self.data.targets
        sequences = targets.kind == "classes" and y.dim() > 1
        weight = mask[:, None] * (y >= 0) if sequences else mask
        for c in self.data.unscored:
            weight = weight * (y != c)
        quality, losses = (torch.where(weight > 0, v, 0) for v in (targets.quality(logits, y), self.losses(logits, y)))
        scores = torch.stack([quality.to(losses.dtype), losses, weight], -1)
        return scores.flatten(1, -2).sum(1) if sequences else scores


def clip_norm(gradient: Params, limit: Number) -> Params:
    """The gradient scaled down to norm `limit` if it is longer (as torch.nn.utils.clip_grad_norm_ does)."""
    factor = torch.clamp(limit / (tree.norm(gradient) + 1e-6), max=1.0)
    return tree.scale(gradient, factor)
