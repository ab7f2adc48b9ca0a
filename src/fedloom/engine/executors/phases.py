"""The phases of a method as executors carry them out."""

from dataclasses import replace

from fedloom.core.algorithm import Algorithm, Batch, Info, Phase
from fedloom.core.task import Task
from fedloom.core.tree import Tree


def phases_of(alg: Algorithm, task: Task) -> dict[str, list[Phase]]:
    """The phases of training and those before an evaluation; with class weights, steps know the client's classes."""
    found = {"train": alg.phases(task), "adapt": alg.adapt(task)}
    if not task.class_weights:
        return found
    return {kind: [_with_class_counts(phase) for phase in phases] for kind, phases in found.items()}


def _with_class_counts(phase: Phase) -> Phase:
    def step(task: Task, work: Tree, batch: Batch, down: Tree, info: Info) -> Tree:
        return phase.step(replace(task, class_counts=(info.counts, info.n)), work, batch, down, info)

    return replace(phase, step=step)
