"""Several runs of one method in one: seeds, and settings that are plain numbers, stack along the client axis.

Each run keeps its own server, clients, sampling and records, and goes through a round as it would alone. What they ask
of the executor at the same time is merged into one cohort, done once, and divided again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Batch, Draw, Info, Phase
from fedloom.core.task import Task
from fedloom.core.tree import Tree, take, tree_flatten, tree_map
from fedloom.engines.choose import choose, make_executor, rehearse
from fedloom.engines.cohort import Cohort
from fedloom.engines.lockstep import Request, lockstep
from fedloom.engines.plan import Plan
from fedloom.engines.rounds import Round, Rounds

log = logging.getLogger("fedloom")

NUMBERS = ("lr", "momentum", "weight_decay", "clip")  # of a task, that may differ between clients of a stack
VALUES = "fedloom.values"  # where a client's own values of settings are, in what it receives and in its work


class Name(NamedTuple):
    """A setting that runs differ in."""

    owner: str  # task or algorithm
    name: str


def numbers(alg: Algorithm, task: Any) -> dict[Name, float]:
    """The settings that could differ between runs in one: plain numbers, of the method and of local training."""
    found = {Name("task", name): getattr(task, name) for name in NUMBERS}
    found |= {Name("algorithm", f.name): getattr(alg, f.name) for f in dataclasses.fields(alg)}
    return {name: value for name, value in found.items() if isinstance(value, float)}


def differing(runs: Sequence[Rounds]) -> list[Name]:
    each = [numbers(run.alg, run.task) for run in runs]
    return [name for name in each[0] if len({values[name] for values in each}) > 1]


class Together:
    def __init__(self, runs: Sequence[Rounds], plan: Plan | str = "auto") -> None:
        """Runs that wait for a plan, alike in everything but seeds and numbers."""
        self.runs, first = runs, runs[0]
        names = differing(runs)
        self.values = [_values(run, names) for run in runs]
        for number, run in enumerate(runs):
            run.number, run.companions = number, len(runs)
            if len(runs) > 1:
                mine = numbers(run.alg, run.task)
                run.label = ", ".join([f" of seed {run.seed}", *(f"{name.name}={mine[name]:g}" for name in names)])
        alg = _varied(runs, names)
        if isinstance(plan, Plan):
            executor = make_executor(alg, first.task, plan)
        else:
            cohort = self._merged([run.first_cohort() for run in runs])
            plan, executor = choose(alg, first.task, cohort, sum(len(run.evaluated) for run in runs), plan)
            if len(runs) > 1:
                plan = replace(plan, runs=len(runs), reason=f"for {len(runs)} runs; {plan.reason}")
        self.executor = executor
        self.stacked = plan.mode == "stacked"
        for run in runs:  # one client after another, each is on its own
            run.follow(plan, executor if self.stacked else make_executor(run.alg, run.task, plan))
        log.info("Execution plan: %s (%s)", plan.mode, plan.reason)

    @torch.no_grad()
    def advance(self, evaluate: bool = True, some: Sequence[int] | None = None) -> list[Round]:
        """A round of all runs, or of some that are equally far."""
        which = range(len(self.runs)) if some is None else some
        steps = [self.runs[number].steps(evaluate) for number in which]
        return lockstep(steps, lambda places, requests: self._answer([which[place] for place in places], requests))

    def _answer(self, which: list[int], requests: list[Request]) -> list[Any]:
        if not self.stacked or len(self.runs) == 1 or requests[0].job == "score_global":  # a pass over a run's samples
            return [self.runs[number].answer(request) for number, request in zip(which, requests, strict=True)]
        cohorts = [request.cohort for request in requests if request.cohort is not None]
        executor = self.executor.serving(self.runs[0].everyone) if requests[0].newcomers else self.executor
        done = requests[0]._replace(cohort=self._merged(cohorts)).carry_out(executor)
        ends = np.cumsum([0, *map(len, cohorts)]).tolist()
        return [take(done, slice(a, b)) for a, b in pairwise(ends)]

    def _merged(self, cohorts: list[Cohort]) -> Cohort:
        if len(self.runs) == 1:
            return cohorts[0]

        def joined(*trees: Tree) -> Tree:
            return tree_map(lambda *rows: torch.cat(rows), *trees)

        parts, own, stats, info = (
            joined(*(getattr(cohort, name) for cohort in cohorts)) for name in ("parts", "own", "stats", "info")
        )
        ids, seeds, run, scored = (
            np.concatenate([getattr(c, name) for c in cohorts]) for name in ("ids", "seeds", "run", "scored")
        )
        by_run = {number: {**c.shared, **self.values[number]} for c in cohorts for number in (int(c.run[0]),)}
        coming = [cohort.coming for cohort in cohorts if cohort.coming is not None]
        later = np.concatenate(coming) if len(coming) == len(cohorts) else None
        return Cohort(ids, cohorts[0].t, {}, parts, own, stats, info, seeds, run, scored, by_run, later)


def _values(run: Rounds, names: Sequence[Name]) -> Tree:
    """What a client receives in addition: its run's values of the settings that runs differ in."""
    if not names:
        return {}
    found = numbers(run.alg, run.task)
    return {VALUES: _by_owner({name: run.task.data.x.new_tensor(found[name], dtype=run.task.dtype) for name in names})}


def _by_owner(values: dict[Name, Any]) -> dict[str, dict[str, Any]]:
    return {owner: {n.name: v for n, v in values.items() if n.owner == owner} for owner in ("algorithm", "task")}


def _varied(runs: Sequence[Rounds], names: Sequence[Name]) -> Algorithm:
    """The method of all runs, where they differ in these settings and are otherwise as the first is."""
    first = runs[0]
    if not names:
        return first.alg
    found = [numbers(run.alg, run.task) for run in runs]
    each = [_by_owner({name: values[name] for name in names}) for values in found]
    algs = tuple(replace(first.alg, **values["algorithm"]) for values in each)
    return Varied(algs, tuple(replace(first.task, **values["task"]) for values in each))


def groups(runs: Sequence[Rounds], plan: str = "auto") -> list[list[int]]:
    """The places of runs in as few groups as can be stacked. A number that a method decides by in Python, or makes
    shapes of, has one value in a group; which ones these are shows by trying."""
    names = differing(runs)
    everyone = list(range(len(runs)))
    if not names or plan == "per-client":
        return [everyone]
    kinds: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        kinds.setdefault(_kind(run), []).append(place)
    if len(kinds) > 1:
        each = [(places, groups([runs[place] for place in places], plan)) for places in kinds.values()]
        return [[places[place] for place in group] for places, found in each for group in found]
    why = _refusal(runs, names)
    if why is None or _refusal(runs, []) is not None:  # it cannot be stacked anyhow
        return [everyone]
    bad = [name for name in names if _refusal(runs, [name]) is not None] or names
    log.warning(
        "Runs that differ in %s go one after another: %s decides by it, or makes shapes of it.",
        " or ".join(name.name for name in bad), runs[0].alg.name,
    )  # fmt: skip
    log.debug("%s", why)
    found: dict[tuple[float, ...], list[int]] = {}
    for place, run in enumerate(runs):
        mine = numbers(run.alg, run.task)
        found.setdefault(tuple(mine[name] for name in bad), []).append(place)
    return list(found.values())


def _kind(run: Rounds) -> str:
    """What clients have and receive: only where that is the same can they be stacked."""
    cohort = run.first_cohort()
    return str(tree_flatten((cohort.shared, cohort.parts, cohort.own, cohort.stats))[1])


def _refusal(runs: Sequence[Rounds], names: Sequence[Name]) -> str | None:
    """Why runs cannot be stacked that differ in these settings."""
    first, twice = runs[0], np.zeros(2, dtype=np.int64)
    cohort = replace(first.first_cohort(), by_run={first.number: _values(first, names)}).rows(twice)
    try:
        rehearse(_varied(runs, names), first.task, cohort)
    except Exception as error:  # whatever the method does with a number that is not one
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


@dataclass(frozen=True)
class Varied(Algorithm):
    """One method with settings that differ between the clients of a stack: each function is that of the method whose
    settings are the client's own."""

    of_run: tuple[Algorithm, ...]
    tasks: tuple[Task, ...]

    @property
    def global_slot(self) -> str:  # type: ignore[override]
        return self.of_run[0].global_slot

    def _own(self, values: Tree, task: Task) -> tuple[Algorithm, Task]:
        return replace(self.of_run[0], **values["algorithm"]), replace(task, **values["task"])

    def _opened(self, task: Task, work: Tree, down: Tree) -> tuple[Tree, Algorithm, Task, Tree, Tree]:
        """The client's values, the method and task that have them, work and download without them."""
        values = work[VALUES]
        return values, *self._own(values, task), _without(work), _without(down)

    def begin(self, task: Task, down: Tree, own: Tree, info: Info) -> Tree:
        alg, mine = self._own(down[VALUES], task)
        return {**alg.begin(mine, _without(down), own, info), VALUES: down[VALUES]}

    def phases(self, task: Task) -> list[Phase]:
        return self._phases("phases", task)

    def adapt(self, task: Task) -> list[Phase]:
        return self._phases("adapt", task)

    def _phases(self, kind: str, task: Task) -> list[Phase]:
        each = []
        for alg, of_run in zip(self.of_run, self.tasks, strict=True):
            mine = replace(task, **{name: getattr(of_run, name) for name in NUMBERS})
            each.append(getattr(alg, kind)(mine))
        if len({len(phases) for phases in each}) > 1:
            raise TypeError("the number of phases depends on a number that runs differ in")
        return [self._phase(kind, index, phases) for index, phases in enumerate(zip(*each, strict=True))]

    def _phase(self, kind: str, index: int, each: tuple[Phase, ...]) -> Phase:
        """The phase with this index, of whichever run a client belongs to; `each` has the runs'."""

        def own(alg: Algorithm, mine: Task) -> Phase:
            return getattr(alg, kind)(mine)[index]

        def step(task: Task, work: Tree, batch: Batch, down: Tree, info: Info) -> Tree:
            values, alg, mine, work, down = self._opened(task, work, down)
            return {**own(alg, mine).step(mine, work, batch, down, info), VALUES: values}

        def enter(task: Task, work: Tree, down: Tree, info: Info) -> Tree:
            values, alg, mine, work, down = self._opened(task, work, down)
            phase = own(alg, mine)
            assert phase.enter is not None
            return {**phase.enter(mine, work, down, info), VALUES: values}

        def epochs(task: Task, work: Tree, info: Info) -> Tensor:
            _, alg, mine, work, _ = self._opened(task, work, {})
            decide = own(alg, mine).epochs
            assert not isinstance(decide, int)
            return decide(mine, work, info)

        def until(work: Tree) -> Tensor:
            _, alg, mine, work, _ = self._opened(self.tasks[0], work, {})
            done = own(alg, mine).until
            assert done is not None
            return done(work)

        def select(n: int, draw: Draw) -> np.ndarray:
            choose_ = each[draw.run].select
            assert not isinstance(choose_, str)
            return choose_(n, draw)

        first = each[0]
        ours: dict[str, Any] = {"step": step, "enter": enter, "epochs": epochs, "until": until, "select": select}
        for phase in each:
            for field in dataclasses.fields(Phase):
                a, b = getattr(phase, field.name), getattr(first, field.name)
                if a != b and not (callable(a) and callable(b)):
                    raise TypeError(f"'{field.name}' of a phase depends on a number that runs differ in")
        return replace(first, **{name: f for name, f in ours.items() if callable(getattr(first, name))})

    def report(self, task: Task, work: Tree, down: Tree, info: Info) -> dict[str, Tensor]:
        _, alg, mine, work, down = self._opened(task, work, down)
        return alg.report(mine, work, down, info)

    def finish(self, task: Task, work: Tree, down: Tree, own: Tree, info: Info) -> tuple[Tree, Tree]:
        _, alg, mine, work, down = self._opened(task, work, down)
        return alg.finish(mine, work, down, own, info)

    def model(self, task: Task, work: Tree, down: Tree, info: Info) -> Any:
        values, alg, mine, work, down = self._opened(task, work, down)
        return {"model": alg.model(mine, work, down, info), VALUES: values}

    def logits(self, task: Task, model: Any, x: Tensor) -> Tensor:
        alg, mine = self._own(model[VALUES], task)
        return alg.logits(mine, model["model"], x)


def _without(tree: Tree) -> Tree:
    return {name: value for name, value in tree.items() if name != VALUES}
