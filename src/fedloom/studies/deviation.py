"""PAGE's equilibrium: what each player would gain by acting differently, alone, in one more round (Eq. 8)."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fedloom.algorithms.page import PAGE
from fedloom.algorithms.parts.ddpg import DDPG
from fedloom.config.resolve import resolve
from fedloom.core.errors import UserError
from fedloom.core.keys import rng
from fedloom.engine.driver import Round
from fedloom.engine.plan import Plan
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.runs.directory import RunDirectory
from fedloom.studies.build import make_task

SERVER = -1


def deviations(folder: str | Path, size: float = 0.1, tries: int = 8) -> pa.Table:
    """Play one more round after a finished run of PAGE, as the agents would and with shifted actions.

    Actions of clients are shifted in each direction, those of the server in random ones. A client's reward does not
    depend on the actions of others in the same round, so one repetition serves all clients.

    Args:
        folder: directory of a finished run of PAGE.
        size: how far an action in [-1, 1] is shifted; it is clipped to this range.
        tries: random directions in which the server's action is shifted.

    Returns:
        A table with a row per player and deviation, and the columns client (-1: server), deviation, reward (without
        it), deviating (reward with it) and gain.
    """
    run, plan = _resume(Path(folder))
    return play(run, plan, size, tries)


def play(run: Simulation, plan: Plan | str, size: float, tries: int) -> pa.Table:
    """`deviations` from the present state of a run."""
    alg, clients = run.alg, run.task.clients
    assert isinstance(alg, PAGE)
    base = _next_round(run, plan)
    rows: list[dict[str, Any]] = []

    def add(who: int, what: str, before: float, after: float) -> None:
        gain = float(after - before)
        rows.append({"client": who, "deviation": what, "reward": before, "deviating": after, "gain": gain})

    for j, name in enumerate(("eta", "alpha")):
        for sign in (1, -1) if getattr(alg, f"tune_{name}") else ():
            found = _next_round(run, plan, client_shift=tuple(sign * size * (k == j) for k in range(2)))
            for i, before, after in zip(base.cohort, base.reports["reward"], found.reports["reward"], strict=True):
                add(int(i), f"{name}{sign * size:+g}", float(before), float(after))
    for j in range(tries if alg.tune_p else 0):
        signs = rng("deviation", run.seed, j).choice([-1.0, 1.0], clients)
        found = _next_round(run, plan, server_shift=tuple(size * signs))
        add(SERVER, f"p {j + 1}", base.server_report["reward_CS"], found.server_report["reward_CS"])
    if not rows:
        raise UserError("No agent acts in this run: tune_p, tune_eta and tune_alpha are all off.")
    return pa.Table.from_pylist(rows)


def _resume(folder: Path) -> tuple[Simulation, Plan | str]:
    directory = RunDirectory(folder)
    config = resolve(directory.config())
    if not isinstance(config.algorithm, PAGE):
        raise UserError(f"{folder} is a run of {config.algorithm.name}; only page has agents that could deviate.")
    if not directory.finished:
        raise UserError(f"{folder} is not finished; continue the run with --resume {folder}.")
    task = make_task(config)
    run = Simulation(config.algorithm, task, config.settings.seed)
    directory.restore(run)
    return run, directory.plan(task.data.device) or "auto"


def _next_round(run: Simulation, plan: Plan | str, **shifts: Any) -> Round:
    """The next round of a copy of the run, with shifted actions."""
    settings = {f.name: getattr(run.alg, f.name) for f in fields(run.alg)}
    copy = Simulation(Deviating(**settings, **shifts), run.task, run.seed)
    everyone = np.arange(run.task.clients)
    copy.driver.t, copy.driver.server = run.t, run.server
    copy.store.write(everyone, run.store.read(everyone))
    return RunGroup([copy], plan).advance(evaluate=False)[0]


@dataclass(frozen=True)
class Deviating(PAGE):
    """PAGE with actions that are shifted after the agents chose them."""

    client_shift: tuple[float, ...] = (0.0, 0.0)
    server_shift: tuple[float, ...] = (0.0,)

    def client_agent(self, task):  # type: ignore[no-untyped-def]
        return _shifted(super().client_agent(task), self.client_shift)

    def server_agent(self, task):  # type: ignore[no-untyped-def]
        return _shifted(super().server_agent(task), self.server_shift)


@dataclass(frozen=True)
class Shifted(DDPG):
    """An agent whose actions are shifted."""

    shift: tuple[float, ...] = ()

    def act(self, agent, s, key, random):  # type: ignore[no-untyped-def]
        agent, a = super().act(agent, s, key, random)
        return agent, (a + torch.tensor(self.shift, dtype=a.dtype, device=a.device)).clamp(-1, 1)


def _shifted(agent: DDPG, shift: tuple[float, ...]) -> Shifted:
    return Shifted(**{f.name: getattr(agent, f.name) for f in fields(agent)}, shift=shift)
