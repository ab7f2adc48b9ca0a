"""A run with its directory and its records."""

import dataclasses
import logging
from functools import partial

from fedloom.config.resolve import Config, describe
from fedloom.core.task import Task
from fedloom.engine.client_store import MemoryStore, make_store
from fedloom.engine.driver import Round
from fedloom.engine.plan import Plan
from fedloom.engine.simulation import Simulation
from fedloom.runs.directory import RunDirectory
from fedloom.runs.records import Records, Row
from fedloom.studies.build import eval_client_ids, eval_unseen_ids
from fedloom.studies.result import Result, make_result

log = logging.getLogger("fedloom")


class RecordedRun:
    """One run: its configuration, state, directory and records."""

    def __init__(self, config: Config, task: Task, directory: RunDirectory | None, label: str) -> None:
        self.config, self.task, self.directory, self.label = config, task, directory, label
        self.partition = directory.keep_partition(task.data) if directory else task.data.digest()
        self.plan = directory.plan(task.data.device) if directory else None  # of an earlier start
        self.records = Records()
        self.done = 0  # rounds

    def start(self) -> Simulation:
        """Make the initial state."""
        s, data, directory = self.config.settings, self.task.data, self.directory
        folder, unverified = (directory.store, directory.unverified) if directory is not None else (None, False)
        self.simulation = Simulation(
            self.config.algorithm,
            self.task,
            s.seed,
            eval_client_ids=eval_client_ids(s, data),
            make_store=partial(make_store, kind=s.store, folder=folder, unverified=unverified),
            unseen=eval_unseen_ids(s, data),
            join_rounds=s.join_rounds,
            screening=s.screening,
            screen_directions=s.screen_directions,
            clip_updates=s.clip_updates,
            label=self.label,
        )
        return self.simulation

    def bytes_in_memory(self) -> int:
        """Memory of the private state of all clients."""
        store, size = self.simulation.store, self.simulation.clients.bytes_per_client
        return len(store) * size if isinstance(store, MemoryStore) else 0

    def begin(self, plan: Plan, up_to: int | None) -> None:
        """Continue from the newest checkpoint, if possible from none after round `up_to`."""
        if self.directory is not None:
            self.records = self.directory.begin(self.simulation, plan, up_to)
        self.done = self.simulation.t

    def add(self, done: Round) -> Row | None:
        """Record a round; returns its row if it was evaluated."""
        row = self.records.add(done)
        if row is not None:
            row |= self.config.algorithm.report_round(self.records.rounds)
        self.done = self.simulation.t
        return row

    @property
    def ended(self) -> bool:
        """True after the last round, or when the method stops the run."""
        if self.done == self.config.settings.rounds:
            return True
        return bool(self.records.rounds) and self.config.algorithm.should_stop(self.records.rounds)

    def result(self, plan: Plan) -> Result:
        """The results; in a directory, the final files are written."""
        found = make_result(describe(self.config), plan.record(), self.partition, self.records)
        if found.all_diverged:
            log.warning("All clients diverged%s, so the results mean nothing; use a smaller lr.", self.label)
        if self.directory is None:
            state = self.simulation.server, self.simulation.store.everyone()["own"]
            return dataclasses.replace(found, state=state)
        self.directory.finish(self.simulation, found.summary())
        return dataclasses.replace(found, folder=self.directory.path)
