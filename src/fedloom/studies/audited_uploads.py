"""What an audit attacks: uploads of a run as they leave its clients, and uploads after one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.attacks.uploads import Upload, UploadRecorder, shown
from fedloom.core.errors import UserError, unknown
from fedloom.core.federation import Ragged
from fedloom.core.keys import rng
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.studies.callbacks import Callback, TrainingRun

ATTACKS = ("round", "step", "membership")
RECONSTRUCTIONS = {"round", "step"}
SIZES = (0, 1, 3)  # samples by which a client's batch grows that makes no step with fewer


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What is attacked, and how long."""

    attacks: tuple[str, ...] = ATTACKS
    gap: int | None = None  # rounds between attacked ones, from the first on; None: the first and the last round
    victims: int | None = 4  # clients of a round whose uploads are attacked; None for all
    batches: int = 2  # of each of them that are to be recovered from the upload of a round
    samples: int = 1  # that a client has in the attack on one step
    iterations: int = 100
    every_part: bool = False  # "round" attacks all networks that an upload shows, not only the largest

    def check(self) -> None:
        """Raise UserError for values that mean nothing."""
        for name in self.attacks:
            if name not in ATTACKS:
                raise unknown("attack", name, ATTACKS)
        if not self.attacks:
            raise UserError(f"An audit needs an attack; name one or several of {', '.join(ATTACKS)}.")
        for name in ("gap", "victims", "batches", "samples", "iterations"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (value is None and name in ("gap", "victims")):
                raise UserError(f"{name} must be a whole number of at least 1, not {value}.")

    def rounds(self, total: int) -> list[int]:
        """Numbers, from 0, of the rounds that are attacked."""
        if not RECONSTRUCTIONS & set(self.attacks):
            return []
        return sorted({0, total - 1}) if self.gap is None else list(range(0, total, self.gap))


class Watcher(Callback):
    """Keeps what victims upload in the attacked rounds and, for the attack on one step, what they would upload in these
    rounds if they had a few samples only."""

    def __init__(self, options: AuditOptions, rounds: Sequence[int], stop: bool = False) -> None:
        """With `stop`, the run ends after the last attacked round."""
        self.options, self.rounds, self.stop = options, rounds, stop
        self.after_step: list[tuple[Upload, Tensor]] = []  # an upload, and rows of the samples

    def on_start(self, run: TrainingRun) -> None:
        """Begin to watch the clients."""
        self.run: Simulation = run._run.simulation
        self.wanted = {t: self._victims(t) for t in self.rounds}
        local = self.run.local
        self.recorder = UploadRecorder(local.initial.constants, self.wanted)
        local.on_upload = self.recorder
        self._ask_for_one_step()

    def on_round(self, run: TrainingRun) -> None:
        """Ask for uploads after one step with what is sent in the next round, if it is attacked."""
        self._ask_for_one_step()
        if self.stop and run.round > max(self.rounds):
            run.stop("the audit has seen enough")

    def _victims(self, t: int) -> list[int]:
        cohort, most = self.run.driver.sample(t), self.options.victims
        if most is None or most >= len(cohort):
            return cohort.tolist()
        return np.sort(rng("victims", self.run.seed, t).choice(cohort, most, replace=False)).tolist()

    def _ask_for_one_step(self) -> None:
        t = self.run.t
        if t not in self.wanted or "step" not in self.options.attacks or not self.run.alg.uploads:
            return
        for more in SIZES:
            found = self._one_step(self.wanted[t], self.options.samples + more)
            changes = [_change(self.run, upload) for upload, _ in found]
            if any(changes) or None in changes or more == SIZES[-1]:
                self.after_step += found
                return

    def _one_step(self, ids: list[int], count: int) -> list[tuple[Upload, Tensor]]:
        """What clients upload that have so many samples, all in one step."""
        task, alg = self.run.population, self.run.alg
        group = max((phase.group for phase in alg.phases(task)), default=1)  # batches in a step
        size = max(-(-count // group), 2 if task.network.buffers else 1)
        small = dataclasses.replace(task, batch_size=size, epochs=1)
        count = max(size * group, alg.min_samples(small))
        train = task.data.splits["train"]
        lists = train.lists()
        for i in ids:
            draw = rng("one-step", self.run.seed, self.run.t, i)
            lists[i] = np.sort(draw.choice(lists[i], min(count, len(lists[i])), replace=False))
        few = Ragged.of(lists).to(task.data.device)
        data = dataclasses.replace(task.data, splits={**task.data.splits, "train": few})
        fork = Simulation(alg, dataclasses.replace(small, data=data), self.run.seed, screening=False)
        fork.restore(self.run.state())
        recorder = UploadRecorder(fork.local.initial.constants, {fork.t: ids}, self.recorder.latest)
        fork.local.on_upload = recorder
        RunGroup([fork], REFERENCE).advance(evaluate=False, cohort=np.array(ids) if alg.partial else None)
        return [(upload, few[upload.client]) for upload in recorder.uploads]


def _change(run: Simulation, upload: Upload) -> bool | None:
    """True if the upload shows that the client has trained; None if it shows no parameters."""
    seen = shown(run.alg, run.task, upload, run.seed)
    if not seen.uploaded:
        return None
    return any(not torch.equal(seen.sent[name], v) for name, v in seen.uploaded.items())
