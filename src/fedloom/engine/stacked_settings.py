"""Settings that differ between stacked runs: plain numbers, which become tensors with a value per client."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedloom.core.algorithm import Algorithm, Batch, Draw, Info, Phase
from fedloom.core.task import Task
from fedloom.core.tree import Tree
from fedloom.engine.simulation import Simulation

TASK_NUMBERS = ("lr", "momentum", "weight_decay", "clip")  # settings of a task that may differ between stacked clients
VALUES = "fedloom.values"  # key of a client's values of these settings, in its download and in its work


class Name(NamedTuple):
    """The name of a numeric setting and what it belongs to."""

    owner: str  # task or algorithm
    name: str


def numeric_settings(alg: Algorithm, task: Any) -> dict[Name, float]:
    """The settings that may differ between stacked runs: plain numbers of the algorithm and of local training. `task`
    is a task, or the settings of a run."""
    found = {Name("task", name): getattr(task, name) for name in TASK_NUMBERS}
    found |= {Name("algorithm", f.name): getattr(alg, f.name) for f in dataclasses.fields(alg)}
    return {name: value for name, value in found.items() if isinstance(value, float)}


def differing(each: Sequence[dict[Name, float]]) -> list[Name]:
    """Names of the settings that do not have the same value everywhere."""
    return [name for name in each[0] if len({values[name] for values in each}) > 1]


def differing_settings(runs: Sequence[Simulation]) -> list[Name]:
    """The numeric settings in which runs differ."""
    return differing([numeric_settings(run.alg, run.task) for run in runs])


def values_tree(run: Simulation, names: Sequence[Name]) -> Tree:
    """What the clients of a run receive in addition: the run's values of the settings in which runs differ."""
    if not names:
        return {}
    found = numeric_settings(run.alg, run.task)
    return {VALUES: _by_owner({name: run.task.data.x.new_tensor(found[name], dtype=run.task.dtype) for name in names})}


def _by_owner(values: dict[Name, Any]) -> dict[str, dict[str, Any]]:
    return {owner: {n.name: v for n, v in values.items() if n.owner == owner} for owner in ("algorithm", "task")}


def stacked_algorithm(runs: Sequence[Simulation], names: Sequence[Name]) -> Algorithm:
    """One algorithm for the clients of all runs, which differ in these settings and nothing else."""
    first = runs[0]
    if not names:
        return first.alg
    found = [numeric_settings(run.alg, run.task) for run in runs]
    each = [_by_owner({name: values[name] for name in names}) for values in found]
    algs = tuple(replace(first.alg, **values["algorithm"]) for values in each)
    return StackedSettings(algs, tuple(replace(first.task, **values["task"]) for values in each))


@dataclass(frozen=True)
class StackedSettings(Algorithm):
    """An algorithm whose settings differ between stacked clients: each function is called with the client's values."""

    algs: tuple[Algorithm, ...]  # by run
    tasks: tuple[Task, ...]

    @property
    def global_slot(self) -> str:  # type: ignore[override]
        return self.algs[0].global_slot

    def _with_values(self, values: Tree, task: Task) -> tuple[Algorithm, Task]:
        return replace(self.algs[0], **values["algorithm"]), replace(task, **values["task"])

    def _unpack(self, task: Task, work: Tree, down: Tree) -> tuple[Tree, Algorithm, Task, Tree, Tree]:
        """The client's values, the algorithm and the task with these values, work and download without them."""
        values = work[VALUES]
        return values, *self._with_values(values, task), _without(work), _without(down)

    def begin(self, task: Task, down: Tree, state: Tree, info: Info) -> Tree:
        alg, mine = self._with_values(down[VALUES], task)
        return {**alg.begin(mine, _without(down), state, info), VALUES: down[VALUES]}

    def phases(self, task: Task) -> list[Phase]:
        return self._phases("phases", task)

    def adapt(self, task: Task) -> list[Phase]:
        return self._phases("adapt", task)

    def _phases(self, kind: str, task: Task) -> list[Phase]:
        each = []
        for alg, run_task in zip(self.algs, self.tasks, strict=True):
            mine = replace(task, **{name: getattr(run_task, name) for name in TASK_NUMBERS})
            each.append(getattr(alg, kind)(mine))
        if len({len(phases) for phases in each}) > 1:
            raise TypeError("the number of phases depends on a number that runs differ in")
        return [self._phase(kind, index, phases) for index, phases in enumerate(zip(*each, strict=True))]

    def _phase(self, kind: str, index: int, each: tuple[Phase, ...]) -> Phase:
        """The phase with this index, for the clients of all runs; `each` has the phase of every run."""

        def phase_of(alg: Algorithm, mine: Task) -> Phase:
            return getattr(alg, kind)(mine)[index]

        def step(task: Task, work: Tree, batch: Batch, down: Tree, info: Info) -> Tree:
            values, alg, mine, work, down = self._unpack(task, work, down)
            return {**phase_of(alg, mine).step(mine, work, batch, down, info), VALUES: values}

        def enter(task: Task, work: Tree, down: Tree, info: Info) -> Tree:
            values, alg, mine, work, down = self._unpack(task, work, down)
            phase = phase_of(alg, mine)
            assert phase.enter is not None
            return {**phase.enter(mine, work, down, info), VALUES: values}

        def epochs(task: Task, work: Tree, info: Info) -> Tensor:
            _, alg, mine, work, _ = self._unpack(task, work, {})
            decide = phase_of(alg, mine).epochs
            assert not isinstance(decide, int)
            return decide(mine, work, info)

        def until(work: Tree) -> Tensor:
            _, alg, mine, work, _ = self._unpack(self.tasks[0], work, {})
            done = phase_of(alg, mine).until
            assert done is not None
            return done(work)

        def select(n: int, draw: Draw) -> np.ndarray:
            select_ = each[draw.run].select
            assert not isinstance(select_, str)
            return select_(n, draw)

        first = each[0]
        functions: dict[str, Any] = {"step": step, "enter": enter, "epochs": epochs, "until": until, "select": select}
        for phase in each:
            for field in dataclasses.fields(Phase):
                a, b = getattr(phase, field.name), getattr(first, field.name)
                if a != b and not (callable(a) and callable(b)):
                    raise TypeError(f"'{field.name}' of a phase depends on a number that runs differ in")
        return replace(first, **{name: f for name, f in functions.items() if callable(getattr(first, name))})

    def report(self, task: Task, work: Tree, down: Tree, info: Info) -> dict[str, Tensor]:
        _, alg, mine, work, down = self._unpack(task, work, down)
        return alg.report(mine, work, down, info)

    def finish(self, task: Task, work: Tree, down: Tree, state: Tree, info: Info) -> tuple[Tree, Tree]:
        _, alg, mine, work, down = self._unpack(task, work, down)
        return alg.finish(mine, work, down, state, info)

    def model(self, task: Task, work: Tree, down: Tree, info: Info) -> Any:
        values, alg, mine, work, down = self._unpack(task, work, down)
        return {"model": alg.model(mine, work, down, info), VALUES: values}

    def logits(self, task: Task, model: Any, x: Tensor) -> Tensor:
        alg, mine = self._with_values(model[VALUES], task)
        return alg.logits(mine, model["model"], x)


def _without(tree: Tree) -> Tree:
    return {name: value for name, value in tree.items() if name != VALUES}
