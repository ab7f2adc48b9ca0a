"""FedOpt: the server takes the change of its average as a gradient, and steps by an optimiser of its own.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. Adaptive Federated Optimization. ICLR 2021. Server
momentum is FedAvgM: Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. 2019.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm, Info
from fedloom.core.keys import Key
from fedloom.core.tree import Params, Tree, tree_map

if TYPE_CHECKING:
    from fedloom.core.task import Task

STATE = "fedloom.server_optimizer"  # key of the optimiser's state in the server's


@dataclass(frozen=True)
class ServerOptimizer:
    """The server's step from x to x + eta m / (sqrt(v) + tau), where m and v are moments of Delta, the change that its
    average would make; with `momentum`, to x + eta m."""

    kind: Literal["momentum", "adam", "yogi", "adagrad"]
    lr: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3

    def init(self, server: Tree) -> Tree:
        """The state before the first round; v starts at tau^2, as the paper demands at least."""
        state = {"m": tree_map(torch.zeros_like, server)}
        if self.kind != "momentum":
            state["v"] = tree_map(lambda x: torch.full_like(x, self.tau**2), server)
        return state

    def step(self, old: Tree, new: Tree, state: Tree) -> tuple[Tree, Tree]:
        """The server's state, and that of the optimiser, after a round in which the method made `new` of `old`."""
        delta = tree_map(lambda a, b: b - a, old, new)
        b1, b2 = self.betas
        if self.kind == "momentum":
            m = tree_map(lambda m, d: b1 * m + d, state["m"], delta)
            return tree_map(lambda x, m: x + self.lr * m, old, m), {"m": m}
        m = tree_map(lambda m, d: b1 * m + (1 - b1) * d, state["m"], delta)
        v = tree_map(lambda v, d: self._second(v, d**2, b2), state["v"], delta)
        stepped = tree_map(lambda x, m, v: x + self.lr * m / (v.sqrt() + self.tau), old, m, v)
        return stepped, {"m": m, "v": v}

    def _second(self, v: Tensor, square: Tensor, b2: float) -> Tensor:
        if self.kind == "adagrad":
            return v + square
        if self.kind == "yogi":
            return v - (1 - b2) * square * torch.sign(v - square)
        return b2 * v + (1 - b2) * square


class _SteppingServer(Algorithm):
    """A method whose server steps by the task's server optimiser. What the method sees of its server's state is without
    that of the optimiser."""

    def init_server(self, task: Task, key: Key) -> Tree:
        server = super().init_server(task, key)
        assert task.server_optimizer is not None
        return {**server, STATE: task.server_optimizer.init(server)}

    def download(self, task: Task, server: Tree, ids: Tensor, t: int, key: Key) -> tuple[Tree, Tree]:
        return super().download(task, _plain(server), ids, t, key)

    def aggregate(self, task: Task, server: Tree, up: Tree, info: Info, t: int, key: Key) -> Tree:
        old = _plain(server)
        new = super().aggregate(task, old, up, info, t, key)
        assert task.server_optimizer is not None
        stepped, state = task.server_optimizer.step(old, new, server[STATE])
        return {**stepped, STATE: state}

    def admit(self, task: Task, server: Tree, ids: Tensor, key: Key) -> Tree:
        return {**super().admit(task, _plain(server), ids, key), STATE: server[STATE]}

    def welcome(self, task: Task, server: Tree, up: Tree, info: Info, t: int, key: Key) -> Tree:
        return {**super().welcome(task, _plain(server), up, info, t, key), STATE: server[STATE]}

    def global_model(self, task: Task, server: Tree) -> Params | None:
        return super().global_model(task, _plain(server))

    def score_server(self, task: Task, server: Tree, stats: Tree, key: Key) -> Tensor | None:
        return super().score_server(task, _plain(server), stats, key)

    def report_server(self, task: Task, server: Tree, info: Info) -> dict[str, Tensor]:
        return super().report_server(task, _plain(server), info)


def _plain(server: Tree) -> Tree:
    return {name: value for name, value in server.items() if name != STATE}


@functools.cache
def _stepping(cls: Any) -> Any:
    return type(f"{cls.__name__}WithServerOptimizer", (_SteppingServer, cls), {"__doc__": cls.__doc__})


def with_server_optimizer(alg: Algorithm, task: Task) -> Algorithm:
    """The method with the task's server optimiser, if it has one."""
    nothing_to_step = type(alg).aggregate is Algorithm.aggregate
    if task.server_optimizer is None or nothing_to_step or isinstance(alg, _SteppingServer):
        return alg
    cls: Any = type(alg)
    return _stepping(cls)(**{f.name: getattr(alg, f.name) for f in dataclasses.fields(alg)})
