"""Is a game at rest? What each player of PAGE would gain by acting otherwise, alone, in one more round (Eq. 8)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fedloom.algorithms.page import PAGE
from fedloom.algorithms.parts.ddpg import DDPG
from fedloom.config import resolve
from fedloom.core.errors import UserError
from fedloom.core.keys import rng
from fedloom.engines.rounds import Round, Rounds
from fedloom.experiment import make_task
from fedloom.runs.directory import Directory

SERVER = -1


def deviations(folder: str | Path, size: float = 0.1, tries: int = 8) -> pa.Table:
    """From where a finished run of PAGE ended, one more round is played as the agents would, and again with actions
    shifted by `size` in [-1, 1]: those of the clients in each direction, those of the server in `tries` random ones.

    A client's reward depends on no other's action of the same round, so one repetition serves all clients. A row per
    player (the server is client -1) and deviation: the reward with and without it, and the gain.
    """
    return play(_resume(Path(folder)), size, tries)


def play(rounds: Rounds, size: float, tries: int) -> pa.Table:
    alg, clients = rounds.alg, rounds.task.clients
    assert isinstance(alg, PAGE)
    base = _repeat(rounds)
    rows: list[dict[str, Any]] = []

    def add(who: int, what: str, before: float, after: float) -> None:
        gain = float(after - before)
        rows.append({"client": who, "deviation": what, "reward": before, "deviating": after, "gain": gain})

    for j, name in enumerate(("eta", "alpha")):
        for sign in (1, -1) if getattr(alg, f"tune_{name}") else ():
            found = _repeat(rounds, client_shift=tuple(sign * size * (k == j) for k in range(2)))
            for i, before, after in zip(base.cohort, base.reports["reward"], found.reports["reward"], strict=True):
                add(int(i), f"{name}{sign * size:+g}", float(before), float(after))
    for j in range(tries if alg.tune_p else 0):
        signs = rng("deviation", rounds.seed, j).choice([-1.0, 1.0], clients)
        found = _repeat(rounds, server_shift=tuple(size * signs))
        add(SERVER, f"p {j + 1}", base.server_report["reward_CS"], found.server_report["reward_CS"])
    if not rows:
        raise UserError("No agent acts in this run: tune_p, tune_eta and tune_alpha are all off.")
    return pa.Table.from_pylist(rows)


def _resume(folder: Path) -> Rounds:
    directory = Directory(folder)
    config = resolve(directory.config())
    if not isinstance(config.algorithm, PAGE):
        raise UserError(f"{folder} is a run of {config.algorithm.name}; only page has agents that could deviate.")
    if directory.store.exists():
        raise UserError(f"{folder} keeps its clients' state in store/; repeat it with store=memory.")
    if not directory.finished:
        raise UserError(f"{folder} is not finished; continue the run with --resume {folder}.")
    task = make_task(config)
    rounds = Rounds(config.algorithm, task, config.settings.seed, plan=directory.plan(task.data.device) or "auto")
    directory.checkpoints.restore(rounds)
    return rounds


def _repeat(rounds: Rounds, **shifts: Any) -> Round:
    """The next round of a copy of the run."""
    given = {f.name: getattr(rounds.alg, f.name) for f in fields(rounds.alg)}
    copy = Rounds(Deviating(**given, **shifts), rounds.task, rounds.seed, plan=rounds.plan)
    everyone = np.arange(rounds.task.clients)
    copy.t, copy.server = rounds.t, rounds.server
    copy.store.write(everyone, rounds.store.read(everyone))
    return copy.advance(evaluate=False)


@dataclass(frozen=True)
class Deviating(PAGE):
    """PAGE whose players do not quite do what their agents chose."""

    client_shift: tuple[float, ...] = (0.0, 0.0)
    server_shift: tuple[float, ...] = (0.0,)

    def client_agent(self, task):  # type: ignore[no-untyped-def]
        return _shifted(super().client_agent(task), self.client_shift)

    def server_agent(self, task):  # type: ignore[no-untyped-def]
        return _shifted(super().server_agent(task), self.server_shift)


@dataclass(frozen=True)
class Shifted(DDPG):
    shift: tuple[float, ...] = ()

    def act(self, agent, s, key, random):  # type: ignore[no-untyped-def]
        agent, a = super().act(agent, s, key, random)
        return agent, (a + torch.tensor(self.shift, dtype=a.dtype, device=a.device)).clamp(-1, 1)


def _shifted(agent: DDPG, shift: tuple[float, ...]) -> Shifted:
    return Shifted(**{f.name: getattr(agent, f.name) for f in fields(agent)}, shift=shift)
