"""Passes that only measure: how one or several models do on samples of a client."""

from typing import Any

import torch
from torch import Tensor

from fedloom.core.algorithm import Batch, Phase, Slot, Step
from fedloom.core.autodiff import vmap
from fedloom.core.task import Task
from fedloom.core.tree import Params

LOOK = 64  # samples at least in a batch that is only measured


def measuring(task: Task, step: Step, **more: Any) -> Phase:
    """Once over the samples, in order, without training."""
    return Phase(step, batch=max(LOOK, task.batch_size), shuffle=False, train=False, **more)


def tally(task: Task, model: Slot, batch: Batch) -> Tensor:
    """Sums over the batch: correct, loss, samples."""
    return task.score(task.predict(model, batch.x).logits, batch.y, batch.mask).sum(0)


def tally_each(task: Task, model: Slot, others: Params, batch: Batch) -> Tensor:
    """The same of some stacked models, a row each, all with the running statistics of `model`."""
    return vmap(lambda params: tally(task, model._replace(params=params), batch))(others)


def smallest(losses: Tensor) -> Tensor:
    """Which of the losses is the smallest, the first of equals; never that of a model that diverged, if another did
    not."""
    return torch.argmin(torch.where(losses.isnan(), torch.inf, losses))
