"""Calling every function of an algorithm once, stacked, to see whether it can be stacked and how much memory it
takes."""

import numpy as np
import torch

from fedloom.core.algorithm import Algorithm
from fedloom.core.autodiff import vmap
from fedloom.core.task import Task
from fedloom.core.tree import size_bytes, tree_flatten
from fedloom.engine import batching
from fedloom.engine.cohort import Cohort
from fedloom.engine.executors.stacked import StackedExecutor
from fedloom.engine.graph.analysis import peak_bytes
from fedloom.engine.graph.stacked_step import StackedStep, flat_inputs
from fedloom.engine.graph.tracing import trace
from fedloom.engine.plan import Plan
from fedloom.nn.kernels.convolution import Algo

STATE_COPIES = 6  # work, its result, what is kept, what is uploaded, one more of each while they are exchanged
PARTS_COPIES = 2  # individual downloads as received, and in the memory that a step reads


@torch.no_grad()
def dry_run(alg: Algorithm, task: Task, few: Cohort, conv_algos: dict[str, Algo] | None = None) -> int:
    """Bytes that these clients take together, from the live memory of traced steps. Raises whatever a function raises
    that cannot be stacked."""
    plan = Plan("stacked", "eager", chunk=len(few), convolutions=conv_algos)
    stacked = StackedExecutor(alg, task, plan)
    work = start = stacked.begin(few)
    most = 0
    for kind in ("adapt", "train"):
        work = start
        for index, phase in enumerate(stacked.phases[kind]):
            work = stacked.enter((kind, index), phase, work, few)
            stacked.epochs(phase, work, few)
            if phase.until is not None:
                vmap(phase.until)(work)
            schedule = batching.for_cohort(task, phase, few, 1)
            columns = schedule.window(task, np.arange(len(few)), 0, 1)
            rows, shared = flat_inputs(few)
            inputs = [*(v[0] for v in columns), *tree_flatten(work)[0], *rows, *shared, task.data.x, task.data.y]
            most = max(most, peak_bytes(trace(StackedStep(task, phase, work, few, plan), inputs)))
    stacked.report(work, few)
    stacked.finish(work, few)
    model = stacked.trained_model(work, few)
    x = task.data.prepare(task.data.x[task.data.splits["train"].flat[:1]])
    vmap(lambda mine: alg.logits(task, mine, x))(model)
    state = STATE_COPIES * (size_bytes(work) + size_bytes(few.client_state)) + PARTS_COPIES * size_bytes(few.parts)
    return state + most
