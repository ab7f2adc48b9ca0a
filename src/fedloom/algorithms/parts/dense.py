"""Fully connected networks as pure functions, and their output as the parameters of another network."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.keys import fold, uniform
from fedloom.core.task import Task
from fedloom.core.tree import Params


def count(widths: tuple[int, ...]) -> int:
    """Parameters of linear layers with biases."""
    return sum(inputs * outputs + outputs for inputs, outputs in pairwise(widths))


def check_memory(task: Task, widths: tuple[int, ...], copies: int, advice: str) -> None:
    """Refuse hypernetworks that do not fit memory while they are drawn: a value comes from three 64-bit words."""
    each, free, dtype = count(widths), task.data.available_memory(), task.dtype
    need = copies * each * (24 + dtype.itemsize)
    if need > free:
        raise UserError(
            f"A hypernetwork of {each:,} parameters ({each * dtype.itemsize / 1e9:.1f} GB) for each of {copies} "
            f"clients takes {need / 1e9:.1f} GB when it is drawn, but {free / 1e9:.1f} GB are free; {advice}."
        )


def draw(key: Tensor, widths: tuple[int, ...], dtype: torch.dtype) -> Params:
    """Initial layers fc1, fc2, ...: uniform within 1/sqrt(inputs), as torch.nn.Linear begins."""
    made: Params = {}
    for j, (inputs, outputs) in enumerate(pairwise(widths), 1):
        for k, (kind, shape) in enumerate((("weight", (outputs, inputs)), ("bias", (outputs,)))):
            made[f"fc{j}.{kind}"] = (2 * uniform(fold(key, j, k), shape, dtype) - 1) / math.sqrt(inputs)
    return made


def apply(params: Params, x: Tensor) -> Tensor:
    """The layers with ReLU between them."""
    depth = sum(name.endswith(".weight") for name in params)
    for j in range(1, depth + 1):
        x = F.linear(x, params[f"fc{j}.weight"], params[f"fc{j}.bias"])
        x = F.relu(x) if j < depth else x
    return x


def cut(flat: Tensor, like: Params) -> Params:
    """A vector as the parameters of a model, in the order of `like`; what is left over at its end is dropped."""
    sizes = [p.numel() for p in like.values()]
    parts = flat[: sum(sizes)].split(sizes)
    return {name: part.view(p.shape) for (name, p), part in zip(like.items(), parts, strict=True)}
