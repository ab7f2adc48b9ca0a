"""Checks that a method keeps the contract, before training: which functions it has, and what they return.

One client makes one step of each phase, and one round is aggregated. Whatever an author's function does wrong becomes
one sentence with the function's name.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.authors import describe_failure
from fedloom.core.errors import UserError, shown
from fedloom.core.task import Task
from fedloom.core.tree import Tree, tree_map
from fedloom.engine import batching
from fedloom.engine.cohort import Cohort
from fedloom.engine.executors.per_client import PerClientExecutor
from fedloom.engine.plan import Plan
from fedloom.engine.simulation import Simulation

NEEDED = ("begin", "phases", "finish", "model")  # functions that have no default


@torch.no_grad()
def check_contract(alg: Algorithm, task: Task, seed: int = 0) -> None:
    """Raise UserError for a function that is missing, fails, or returns something else than the contract asks for."""
    missing = [name for name in NEEDED if getattr(type(alg), name) is getattr(Algorithm, name)]
    if missing:
        listed = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise UserError(f"The method '{alg.name}' has no {listed}; docs/new-method.md says what each returns.")
    Contract(alg, dataclasses.replace(task, data=task.data.participants()), seed).check()


class Contract:
    """Calls the functions of a method in their order, and looks at what they return."""

    def __init__(self, alg: Algorithm, task: Task, seed: int) -> None:
        self.alg, self.task, self.seed = alg, task, seed

    def check(self) -> None:
        alg, task = self.alg, self.task
        self._tree("init_server", self._call(lambda: alg.init_server(task, 0)))
        simulation = self._call(lambda: Simulation(alg, task, self.seed, screening=False))
        cohort = self._call(simulation.first_cohort)
        self._tree("init_client", cohort.client_state)
        server, state = simulation.server, tree_map(lambda v: v[0], cohort.client_state)
        new_state, up = self._client(cohort)
        self._same("finish", "private state", new_state, "init_client", state)
        everyone = tree_map(lambda v: torch.stack([v] * len(cohort)), up)
        info = cohort.info._replace(counts=cohort.info.counts[:, :0])
        new_server = self._call(
            lambda: alg.aggregate(task, server, everyone, info, 0, simulation.driver.key), f"uploads have {_names(up)}"
        )
        if new_server is None:
            raise UserError(f"aggregate of '{alg.name}' returned nothing; return the server's new state.")
        self._tree("aggregate", new_server)
        self._same("aggregate", "server state", new_server, "init_server", server)

    def _client(self, cohort: Cohort) -> tuple[Tree, Tree]:
        """The new state and the upload of the first client, after one step of each phase."""
        alg, task = self.alg, self.task
        executor = self._call(lambda: PerClientExecutor(alg, task, Plan("per-client")))
        self._phases("phases", alg.phases(task))
        self._phases("adapt", alg.adapt(task))
        down = {**cohort.shared, **tree_map(lambda v: v[0], cohort.parts)}
        state, info = (tree_map(lambda v: v[0], tree) for tree in (cohort.client_state, cohort.info))
        received = f"it receives {_names(down)} and keeps {_names(state)}"
        self._tree("begin", self._call(lambda: alg.begin(task, down, state, info), received))
        _, _, _, work = executor.start(cohort, 0)
        begun = work
        for kind in ("adapt", "train"):
            work = begun
            for phase in executor.phases[kind]:
                work = self._phase(phase, work, down, info, cohort)
        model = self._call(lambda: alg.model(task, work, down, info), f"work has {_names(work)}")
        if model is None:
            raise UserError(f"model of '{alg.name}' returned nothing; return the model to evaluate, such as work['w'].")
        self._call(lambda: alg.report(task, work, down, info))
        found = self._call(lambda: alg.finish(task, work, down, state, info), f"work has {_names(work)}")
        if not isinstance(found, tuple) or len(found) != 2:
            what = "nothing" if found is None else f"a {type(found).__name__}"
            raise UserError(
                f"finish of '{alg.name}' returned {what}; return two dictionaries, the client's new private state and "
                "its upload."
            )
        for tree in found:
            self._tree("finish", tree)
        return found

    def _phase(self, phase: Phase, work: Tree, down: Tree, info: Any, cohort: Cohort) -> Tree:
        task = self.task
        if phase.enter is not None:
            enter, before = phase.enter, work
            work = self._call(lambda: enter(task, before, down, info), f"work has {_names(work)}")
            self._tree(_name(enter), work)
        one = cohort.rows(np.zeros(1, np.int64))
        schedule = self._call(lambda: batching.for_cohort(task, phase, one, 1))
        for batch in list(schedule.batches(task, 0))[:1]:
            after = self._call(
                lambda: phase.step(task, work, batch, down, info),  # noqa: B023
                f"work has {_names(work)}",
            )
            self._tree(_name(phase.step), after)
            self._same(_name(phase.step), "work", after, "begin", work)
            return after
        return work

    def _phases(self, name: str, phases: Any) -> None:
        if not isinstance(phases, Sequence) or not all(isinstance(phase, Phase) for phase in phases):
            raise UserError(
                f"{name} of '{self.alg.name}' returned {shown(phases)}; return a list of Phase(step, epochs)."
            )

    def _call(self, function: Callable[[], Any], names: str = "") -> Any:
        """The function's result. Raises UserError, naming the author's function, for what goes wrong in it."""
        try:
            return function()
        except UserError:
            raise
        except Exception as error:  # a function may do anything
            found = describe_failure(error, type(self.alg))
            if found is None:
                raise
            known = f"; {names}" if isinstance(error, KeyError) and names else ""
            raise UserError(f"{found}{known}.") from error

    def _tree(self, function: str, tree: Any) -> None:
        """Raise UserError unless a function returned a dictionary of tensors."""
        who = f"{function} of '{self.alg.name}' returned"
        if tree is None:
            raise UserError(f"{who} nothing; return a dictionary of tensors.")
        if not isinstance(tree, dict):
            raise UserError(f"{who} a {type(tree).__name__}; return a dictionary of tensors.")
        for path, leaf in tree_flatten_with_path(tree)[0]:
            if not isinstance(leaf, Tensor):
                raise UserError(f"{who} a {type(leaf).__name__} as {_path(path)}; everything in it must be a tensor.")

    def _same(self, function: str, what: str, new: Tree, origin: str, old: Tree) -> None:
        """Raise UserError unless a tree has the names, shapes and types of an earlier one."""
        who = f"{function} of '{self.alg.name}' returned"
        found, made = ({_path(p): v for p, v in tree_flatten_with_path(tree)[0]} for tree in (new, old))
        for name in made:
            if name not in found:
                top = name.partition("/")[0]
                gone = top if top not in new else name
                raise UserError(f"{who} no '{gone}' in the {what}, which {origin} makes; return all of it.")
        for name, value in found.items():
            if name not in made:
                raise UserError(f"{who} '{name}' in the {what}, which {origin} does not make; make it there, too.")
            if value.shape != made[name].shape or value.dtype != made[name].dtype:
                is_, was = (f"{tuple(v.shape)} {v.dtype}".replace("torch.", "") for v in (value, made[name]))
                raise UserError(f"{who} '{name}' in the {what} as {is_}, but {origin} makes it {was}; keep one form.")


def _path(path: Any) -> str:
    """`w/head.weight` of a path in a tree."""
    return "/".join(keystr((part,)).strip("[]'.") for part in path)


def _names(tree: Tree) -> str:
    return ", ".join(map(str, tree)) if isinstance(tree, dict) and tree else "nothing"


def _name(function: Any) -> str:
    return getattr(function, "__name__", "step")
