"""What a model predicts of a sample: a class, any number of labels, or a number; and how predictions are judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.kinds import Kind


@dataclass(frozen=True)
class Targets(ABC):
    """The targets of a data set: what their loss is, and how outputs of a model become predictions."""

    kind: ClassVar[Kind]

    @abstractmethod
    def losses(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss of every sample, times its weight; for sequences, of every position, padding (-1) being 0."""

    @abstractmethod
    def quality(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What the first column of scores sums over samples: whether a class is right, the share of labels that are
        right, or the squared error of a number, in its unit."""

    @abstractmethod
    def divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """The Kullback-Leibler divergence of what two models predict of every sample, KL(teacher || outputs)."""

    @abstractmethod
    def predictions(self, outputs: Tensor) -> Tensor:
        """Outputs as probabilities or, for numbers, as values in their unit."""

    def in_unit(self, y: Tensor) -> Tensor:
        """Targets as the user gave them."""
        return y

    @abstractmethod
    def weights(self, y: Tensor, counts: Tensor, n: Tensor) -> Tensor:
        """How much samples (or their labels) count, so that all classes of a client count equally, however rare.

        Args:
            y: targets of a batch.
            counts: n_{i,c}, training samples of the client by class or label.
            n: n_i, all its training samples.
        """


@dataclass(frozen=True)
class Classes(Targets):
    """One class per sample, or at every position of a sequence: cross-entropy."""

    kind = "classes"

    def losses(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        likelihood = F.log_softmax(outputs, dim=-1)
        if y.dim() == 1:
            found = -likelihood.gather(-1, y[..., None]).squeeze(-1)
        else:
            known = y >= 0
            found = -likelihood.gather(-1, torch.where(known, y, 0)[..., None]).squeeze(-1) * known
        return found if weights is None else found * weights

    def quality(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Ties go to the smallest class."""
        best = outputs == outputs.amax(-1, keepdim=True)
        order = torch.arange(outputs.shape[-1], device=outputs.device)
        return torch.where(best, order, outputs.shape[-1]).amin(-1) == y

    def divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        p = F.log_softmax(teacher, -1)
        return (p.exp() * (p - F.log_softmax(outputs, -1))).sum(-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        return torch.softmax(outputs, -1)

    def weights(self, y: Tensor, counts: Tensor, n: Tensor) -> Tensor:
        """n_i / (K_i n_{i,c}) for a sample of class c of a client with K_i classes."""
        return (counts.sum() / ((counts > 0).sum() * counts.clamp(min=1)))[y]


@dataclass(frozen=True)
class Labels(Targets):
    """Any number of labels per sample, each 0 or 1: mean binary cross-entropy of the labels."""

    kind = "labels"

    def losses(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        found = _binary_cross_entropy(outputs, y)
        return (found if weights is None else found * weights).mean(-1)

    def quality(self, outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs >= 0) == (y > 0.5)).to(outputs.dtype).mean(-1)

    def divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Mean over the labels, as the loss is."""
        p = torch.sigmoid(teacher)
        return (_binary_cross_entropy(outputs, p) - _binary_cross_entropy(teacher, p)).mean(-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs)

    def weights(self, y: Tensor, counts: Tensor, n: Tensor) -> Tensor:
        """Of every label of a sample: n_i / (2 n_{i,l}) if it is there, n_i / (2 (n_i - n_{i,l})) if not; 1 if the
        client has the one or the other only."""
        both = (counts > 0) & (counts < n)
        there, absent = n / (2 * counts.clamp(min=1)), n / (2 * (n - counts).clamp(min=1))
        return torch.where(both, torch.where(y > 0.5, there, absent), 1.0)


def _binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return F.softplus(outputs) - outputs * y


@dataclass(frozen=True)
class Number(Targets):
    """A number per sample. Models learn (y - mean) / std, by squared error or by Huber's loss.

    As a likelihood, the squared error is that of a normal distribution with variance 1/2.
    """

    kind = "number"

    mean: float = 0.0  # of the training samples
    std: float = 1.0
    huber: float | None = None  # from so many standard deviations on, errors count linearly

    def losses(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        gap = outputs.squeeze(-1) - y
        found = gap**2
        if self.huber is not None:  # twice Huber's loss, so that small errors count as they do without it
            found = torch.where(gap.abs() <= self.huber, found, self.huber * (2 * gap.abs() - self.huber))
        return found if weights is None else found * weights

    def quality(self, outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs.squeeze(-1) - y) * self.std) ** 2

    def divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        return ((outputs - teacher) ** 2).squeeze(-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1) * self.std + self.mean

    def in_unit(self, y: Tensor) -> Tensor:
        return y.double() * self.std + self.mean

    def weights(self, y: Tensor, counts: Tensor, n: Tensor) -> Tensor:
        """Numbers have no classes, so all samples count alike."""
        return torch.ones_like(y)


TARGETS: dict[Kind, type[Targets]] = {"classes": Classes, "labels": Labels, "number": Number}
