"""The phases of a method as executors carry them out."""

from dataclasses import replace

from fedloom.core.algorithm import Algorithm, Batch, Info, Phase
from fedloom.core.task import Task
from fedloom.core.tree import Tree


def phases_of(alg: Algorithm, task: Task) -> dict[str, list[Phase]]:
    """The phases of training and those before an evaluation, with what steps know of the round (the learning rate of a
    schedule) and of the client (with class weights, its classes)."""
    found = {"train": alg.phases(task), "adapt": alg.adapt(task)}
    if not task.class_weights and task.schedule.constant:
        return found
    return {kind: [_with_client(phase) for phase in phases] for kind, phases in found.items()}


def _with_client(phase: Phase) -> Phase:
    def step(task: Task, work: Tree, batch: Batch, down: Tree, info: Info) -> Tree:
        mine = task.in_round(info.t)
        if task.class_weights:
            mine = replace(mine, class_counts=(info.counts, info.n))
        return phase.step(mine, work, batch, down, info)

    return replace(phase, step=step)
