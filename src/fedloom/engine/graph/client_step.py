"""The step of one client as a traced graph: traced once for full batches, without autograd, and with results written
over buffers that are no longer needed, because a CPU spends much of a small step on memory that is not in its
caches."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedloom.core.algorithm import Batch, Info, Phase
from fedloom.core.federation import channels_last
from fedloom.core.task import Task
from fedloom.core.tree import Tree, tree_flatten, tree_unflatten
from fedloom.engine.graph.in_place import reuse_buffers
from fedloom.engine.graph.tracing import trace
from fedloom.engine.worker_threads import raise_if_stopped


def single_model_layout(x: Tensor) -> Tensor:
    """The memory format in which single clients compute: on a CPU, images and convolution weights are channels-last."""
    return channels_last(x) if x.dim() == 4 and x.device.type == "cpu" else x.contiguous()


class TracedClientStep:
    """A phase's step for one client; batches that are not full run untraced."""

    def __init__(self, task: Task, phase: Phase, work: Tree, batch: Batch, down: Tree, info: Info) -> None:
        """`batch` is a full one. The graph's result is compared with the step's: some kernels, such as oneDNN's LSTM,
        cannot be traced in their backward pass, which only shows when they run."""
        self.task, self.phase, self.shape = task, phase, batch.x.shape
        state, self.work_spec = tree_flatten(work)
        rest, self.rest_spec = tree_flatten((down, info))
        # a tensor that is passed twice (work may start as the download) would be traced as one input
        inputs = [*batch, *(v.clone() for v in (*state, *rest))]
        self.graph = trace(self._step, inputs)
        reuse_buffers(self.graph)
        torch.testing.assert_close(list(self.graph(*inputs)), self._step(*inputs), rtol=0, atol=0, equal_nan=True)

    def _step(self, *flat: Tensor) -> list[Tensor]:
        cut = len(Batch._fields) + self.work_spec.num_leaves
        batch, work = Batch(*flat[: len(Batch._fields)]), tree_unflatten(flat[len(Batch._fields) : cut], self.work_spec)
        down, info = tree_unflatten(flat[cut:], self.rest_spec)
        leaves, spec = tree_flatten(self.phase.step(self.task, work, batch, down, info))
        if spec != self.work_spec:
            raise TypeError(
                f"Phase.step must return `work` with the structure that it received: {self.work_spec}, not {spec}"
            )
        return [single_model_layout(v) for v in leaves]  # the graph relies on the layout of its inputs

    def run(self, work: Tree, batches: Iterable[Batch], down: Tree, info: Info) -> Tree:
        """The work after a step for every batch."""
        state, rest = ([single_model_layout(v) for v in tree_flatten(tree)[0]] for tree in (work, (down, info)))
        for batch in batches:
            raise_if_stopped()
            state = (self.graph.forward if batch.x.shape == self.shape else self._step)(*batch, *state, *rest)
        return tree_unflatten(state, self.work_spec)
