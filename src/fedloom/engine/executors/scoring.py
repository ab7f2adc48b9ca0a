"""Scoring one model on some samples, in batches that fit memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.core.task import Task
from fedloom.engine.worker_threads import raise_if_stopped

EVAL_BATCH = {"cpu": 1 << 9, "cuda": 1 << 11}  # samples that one model scores at once
EVAL_BATCH_CPU_IMAGES = 128  # more images at once need activations that no longer fit the caches: a quarter slower
MAX_LOGITS = 1 << 24  # at once; a language model has a logit for every position and word


def fitting_rows(task: Task, most: int) -> int:
    """How many samples to score at once: `most`, or fewer if their logits would take too much memory."""
    return max(1, min(most, MAX_LOGITS // task.network.logits))


def eval_batch(task: Task, most: int | None = None) -> int:
    """How many samples a single model scores at once."""
    device = task.data.device.type
    most = most or EVAL_BATCH[device]
    images_on_cpu = device == "cpu" and task.data.x.dim() == 4
    return fitting_rows(task, min(most, EVAL_BATCH_CPU_IMAGES) if images_on_cpu else most)


def logits_of_rows(task: Task, predict: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Outputs of one model, one row per sample of the given rows."""
    found = [predict(task.data.samples(some)) for some in torch.split(rows, eval_batch(task)) if len(some)]
    shape = (0, *task.network.positions, task.network.outputs)
    return torch.cat(found) if found else torch.zeros(shape, dtype=task.dtype, device=task.data.device)


def score_rows(task: Task, predict: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """(correct predictions, summed loss, samples) of one model on the given rows, without padding."""
    data = task.data
    total = torch.zeros(3, dtype=task.dtype, device=data.device)
    for some in torch.split(rows, eval_batch(task)):
        raise_if_stopped()
        mask = torch.ones(len(some), dtype=task.dtype, device=data.device)
        total = total + task.score(predict(data.samples(some)), data.y[some], mask).sum(0)
    return total
