"""A network that generates the parameters of other networks: a trunk, and one output layer per generated tensor."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.keys import Key
from fedloom.core.task import Task
from fedloom.core.tree import Params

WIDTH = 100  # of the trunk


class _Layers(nn.Module):
    """Draws the initial values; what is computed with them is `generate`."""

    def __init__(self, inputs: int, hidden: int, targets: Mapping[str, torch.Size], rank: int | None) -> None:
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(inputs if i == 0 else WIDTH, WIDTH) for i in range(hidden + 1)])
        sizes = [math.prod(shape) for shape in targets.values()]
        if rank is None:
            self.out = nn.ModuleList([nn.Linear(WIDTH, size) for size in sizes])
        else:
            self.low = nn.ModuleList([nn.Linear(WIDTH, rank) for _ in sizes])
            self.out = nn.ModuleList([nn.Linear(rank, size) for size in sizes])


def size(inputs: int, hidden: int, targets: Mapping[str, torch.Size], rank: int | None) -> int:
    """Number of parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in _Layers(inputs, hidden, targets, rank).parameters())


def init(task: Task, key: Key, inputs: int, hidden: int, rank: int | None) -> Params:
    """PyTorch's own initial values under a seed."""
    targets = {name: v.shape for name, v in task.init(key).items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key & ((1 << 63) - 1))
        layers = _Layers(inputs, hidden, targets, rank)
    return {k: p.detach().to(task.data.device, task.dtype) for k, p in layers.named_parameters()}


def generate(phi: Params, v: Tensor, targets: Mapping[str, torch.Size]) -> Params:
    """Parameters for every row of v, stacked."""
    x, depth = v, sum(k.startswith("trunk.") and k.endswith(".weight") for k in phi)
    for i in range(depth):
        x = _linear(phi, f"trunk.{i}", x if i == 0 else F.relu(x))
    made = {}
    for j, (name, shape) in enumerate(targets.items()):
        y = _linear(phi, f"low.{j}", x) if f"low.{j}.weight" in phi else x
        made[name] = _linear(phi, f"out.{j}", y).view(-1, *shape)
    return made


def _linear(phi: Params, name: str, x: Tensor) -> Tensor:
    return F.linear(x, phi[f"{name}.weight"], phi[f"{name}.bias"])
