"""pFedKT's hypernetwork: a fully connected network at a client that generates the client's model, chunk by chunk."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.algorithms.parts import dense
from fedloom.core.keys import Key, fold, normal, stream
from fedloom.core.task import Task
from fedloom.core.tree import Params, Tree, leaves, sub

CHUNK = 400  # parameters that one call of the small hypernetwork generates
WIDTH = 100  # units of its hidden layers


@dataclass(frozen=True)
class PrivateHypernetwork:
    """Its functions, for one client; `down` has what server and clients draw from the seed (`constants`)."""

    emb_dim: int  # e
    n_hidden: int  # hidden layers after the first
    large: bool  # the whole model in one call
    fan_in: bool  # generated values have the scale with which the model's layers are usually initialised

    def chunks(self, task: Task) -> tuple[int, int]:
        """J and the values in a chunk."""
        total = sum(p.numel() for p in task.init(0).values())  # P
        return (1, total) if self.large else (-(-total // CHUNK), CHUNK)

    def widths(self, task: Task) -> tuple[int, ...]:
        """Inputs of the first layer, and outputs of every layer."""
        return (self.emb_dim, *[WIDTH] * (self.n_hidden + 1), self.chunks(task)[1])

    def embeddings(self, task: Task, key: Key) -> Tree:
        """E, one row per chunk."""
        draw = torch.tensor(fold(key, stream("chunks")), device=task.data.device)
        return {"E": normal(draw, (self.chunks(task)[0], self.emb_dim), task.dtype)}

    def usual(self, task: Task, key: Key) -> Tree:
        """For every tensor of the model: the mean of generated values (0, but where all initial values are equal, as in
        a normalisation layer), and their standard deviation."""
        return {name: torch.stack(_mean_and_std(p)) for name, p in task.init(key).items()} if self.fan_in else {}

    def init(self, task: Task, key: Tensor, embeddings: Tensor) -> Params:
        """Layers as torch.nn.Linear begins. With `fan_in`, the last one is then shifted and scaled so that its outputs
        have mean 0 over the chunks and standard deviation 1: otherwise most of their size is common to all chunks."""
        varphi = dense.draw(key, self.widths(task), task.dtype)
        if not self.fan_in:
            return varphi
        last = f"fc{self.n_hidden + 2}"
        made = dense.apply(varphi, embeddings)
        mean = made.mean(0) if len(made) > 1 else made.mean().expand(made.shape[1:])
        gain = 1 / (made - mean).std(correction=0)
        bias = (varphi[f"{last}.bias"] - mean) * gain
        return {**varphi, f"{last}.weight": varphi[f"{last}.weight"] * gain, f"{last}.bias": bias}

    def generate(self, task: Task, varphi: Tree, down: Tree) -> Params:
        """theta0 = HN(E): all chunks in one matrix product."""
        values = dense.apply(varphi, {**down, **varphi}["E"])
        made = dense.cut(values.flatten(), like=task.init(0))
        if not self.fan_in:
            return made
        usual = down["usual"]
        return {name: usual[name][0] + usual[name][1] * v for name, v in made.items()}

    def half_gap(self, task: Task, varphi: Tree, omega: Params, down: Tree) -> Tensor:
        """||theta0 - omega||^2 / 2, whose gradient is J^T (theta0 - omega)."""
        return torch.stack([(d**2).sum() / 2 for d in leaves(sub(self.generate(task, varphi, down), omega))]).sum()

    def pulled(self, task: Task, varphi: Tree, g: Params, down: Tree) -> Tensor:
        """The product of theta0 with g, whose gradient is J^T g."""
        made = self.generate(task, varphi, down)
        return torch.stack([(made[name] * value).sum() for name, value in g.items()]).sum()


def _mean_and_std(p: Tensor) -> tuple[Tensor, Tensor]:
    std = p.std(correction=0)
    if std > 0:
        return torch.zeros_like(std), std
    inputs = p[0].numel() if p.dim() > 1 else p.numel()
    return p.mean(), torch.full_like(std, 1 / math.sqrt(3 * inputs))  # as torch.nn.Linear's weights
