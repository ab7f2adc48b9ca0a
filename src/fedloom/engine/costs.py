"""What a method costs: bytes that are sent, floating-point operations (FLOPs), and state that is kept.

FLOPs are those of products: matrix products, convolutions, recurrent layers and attention, 2 for each multiply-add.
Biases, sums, elementwise operations and operators of other packages count as 0. They are counted by carrying out one
step of each phase at one client, and one aggregation, under PyTorch's `FlopCounterMode`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core.algorithm import Algorithm, Batch
from fedloom.core.task import Task
from fedloom.core.tree import Tree, size_bytes, tree_map
from fedloom.device.transfer import to_device
from fedloom.engine import batching
from fedloom.engine.budget import expected_computation, expected_visits
from fedloom.engine.cohort import Cohort
from fedloom.engine.executors.per_client import PerClientExecutor
from fedloom.engine.plan import Plan
from fedloom.engine.simulation import Simulation

Shape = tuple[int, ...]


class ModelSize(NamedTuple):
    """How large a model is."""

    parameters: int
    flops: int  # of a forward pass for one sample


class Costs(NamedTuple):
    """What a method costs on a task. What a client sends and computes is per round, on average over clients."""

    parameters: int  # of the model
    flops_forward: int  # of the model, for one sample
    bytes_down: float  # in the second round: some methods have nothing to send in the first
    bytes_up: float
    gradients: float
    samples: float  # see `fedloom.engine.budget`
    flops: float
    client_bytes: int  # private state that a client keeps between rounds
    server_bytes: int  # state of the server
    server_flops: int  # of aggregating the uploads of a round and making the next downloads
    cohort: int  # clients in a round
    exact: bool  # False if the method chooses its number of epochs while it trains


@torch.no_grad()
def method_costs(run: Simulation) -> Costs:
    """The costs of a method, from a run that has not begun; nothing of it is changed."""
    alg, task, driver = run.alg, run.task, run.driver
    cohort, clients = run.first_cohort(), len(driver.sample(0))
    turns = clients // len(cohort)  # aggregations in a round
    flops, up = _client_round(alg, task, cohort)
    uploads = tree_map(lambda v: v.expand(len(cohort), *v.shape), up)
    info = cohort.info._replace(counts=cohort.info.counts[:, :0])
    server, aggregation = counted(alg.aggregate, task, driver.server, uploads, info, 0, driver.key)
    ids = to_device(task.data.device, cohort.ids)
    (shared, parts), download = counted(alg.download, task, server, ids, 1, driver.key)
    computed = expected_computation(alg, task, cohort)
    return Costs(
        *model_size(task),
        bytes_down=size_bytes(shared) + alg.size_of_parts(parts) / len(cohort),
        bytes_up=size_bytes(up),
        gradients=computed.gradients,
        samples=computed.samples,
        flops=flops,
        client_bytes=run.clients.bytes_per_client,
        server_bytes=size_bytes(driver.server),
        server_flops=turns * (aggregation + download),
        cohort=clients,
        exact=computed.exact,
    )


@torch.no_grad()
def model_size(task: Task) -> ModelSize:
    """The size of a task's model."""
    params, x = task.init(0), task.data.samples(task.data.splits["train"].flat[:1])
    _, flops = counted(task.predict, task.slot(params), x)
    return ModelSize(sum(v.numel() for v in params.values()), flops)


def counted(f: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """f(*args), and its FLOPs. Tensors must be on the CPU: kernels for GPUs hide their products."""
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    with sdpa_kernel(SDPBackend.MATH), counter:  # attention as two products, which torch counts on any device
        found = f(*args)
    return found, counter.get_total_flops()


def _client_round(alg: Algorithm, task: Task, cohort: Cohort) -> tuple[float, Tree]:
    """FLOPs of a client in a round, on average over all clients, and what the cohort's first client would upload after
    one step of each phase. FLOPs of a step are taken to grow linearly with the samples of its batch."""
    executor = PerClientExecutor(alg, task, Plan("per-client"))
    one = cohort.rows(np.zeros(1, np.int64))
    (down, state, info, work), total = counted(executor.start, cohort, 0)
    visits, _ = expected_visits(alg, task)
    for phase, (steps, samples) in zip(executor.phases["train"], visits, strict=True):
        if phase.enter is not None:
            work, entering = counted(phase.enter, task, work, down, info)
            total += entering
        full = batching.for_cohort(task, phase, one, 1).full_batch(task)
        half = _first_half(full)
        of_half = counted(phase.step, task, work, half, down, info)[1] if half.mask.numel() else 0
        work, of_full = counted(phase.step, task, work, full, down, info)
        per_sample = (of_full - of_half) / (full.mask.numel() - half.mask.numel())
        total += per_sample * samples + (of_full - per_sample * full.mask.numel()) * steps
    (_, up), finishing = counted(alg.finish, task, work, down, state, info)
    return total + finishing, up


def _first_half(batch: Batch) -> Batch:
    """The first half of a batch's samples, or of each batch of a group."""
    at = (*[slice(None)] * (batch.mask.dim() - 1), slice(batch.mask.shape[-1] // 2))
    return batch._replace(x=batch.x[at], y=batch.y[at], mask=batch.mask[at])


# Products that torch's counter does not know, or counts wrongly; arguments are shapes where they are tensors


def _convolution_backward(
    gradient: Shape, x: Shape, w: Shape, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, wanted: list[bool], **_: Any,
) -> int:  # fmt: skip
    """The gradients to input and weights take as many products as the output. torch counts all pairs of channels, also
    of different groups, which is what stacked models are under `vmap`."""
    return 2 * math.prod(x if transposed else gradient) * math.prod(w[1:]) * sum(wanted[:2])


def _lstm(x: Shape, w_ih: Shape, w_hh: Shape, *_: Any, **__: Any) -> int:
    """x is (time, samples, inputs)."""
    return 2 * x[0] * x[1] * (math.prod(w_ih) + math.prod(w_hh))


FORMULAS = {
    torch.ops.aten.dot: lambda a, b, **_: 2 * a[0],
    torch.ops.aten.mv: lambda a, b, **_: 2 * math.prod(a),
    torch.ops.aten.addmv: lambda c, a, b, **_: 2 * math.prod(a),
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten.mkldnn_rnn_layer: _lstm,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda *args, **_: 2 * _lstm(*args),
}
