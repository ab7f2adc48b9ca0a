"""Several models that learn from the same batch: one backward pass, then a step of each."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from fedloom.core.autodiff import grad
from fedloom.core.task import Task, clip_norm
from fedloom.core.tree import Params, Tree

Losses = Callable[[dict[str, Params]], tuple[Tensor, dict[str, Params]]]


def step(task: Task, work: Tree, names: Iterable[str], loss: Losses, one_norm: bool = False) -> Tree:
    """SGD on the named slots of `work`. `loss` maps their parameters to a sum of losses and to the running statistics
    of the slots that have some. Each gradient is clipped for itself, or all as one (`one_norm`)."""
    slots = {name: work[name] for name in names}
    g, statistics = grad(loss, {name: slot.params for name, slot in slots.items()})
    if one_norm and task.clip is not None:
        g, task = clip_norm(g, task.clip), replace(task, clip=None)
    slots |= {name: slots[name]._replace(buffers=found) for name, found in statistics.items()}
    return {**work, **{name: task.step(slot, g[name]) for name, slot in slots.items()}}
