"""A run with its directory and its records."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from fedloom.cluster.run import at_home, maker
from fedloom.config.resolve import Config, describe
from fedloom.core.algorithm import Algorithm
from fedloom.core.task import Task
from fedloom.core.tree import Tree
from fedloom.engine.client_store import MemoryStore, make_store
from fedloom.engine.clients import Clients
from fedloom.engine.cohort import global_slot
from fedloom.engine.driver import Round
from fedloom.engine.plan import Plan
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.metrics.registry import find_metric
from fedloom.metrics.scores import basic_metric
from fedloom.runs import final
from fedloom.runs.directory import METRICS_FILE, RunDirectory
from fedloom.runs.metrics import Blocks, metrics_table
from fedloom.runs.models import models_writer, portable
from fedloom.runs.records import Records, Row
from fedloom.storage.files import Writer, table_writer, tensors_writer
from fedloom.storage.trees import named
from fedloom.studies.build import eval_client_ids, eval_unseen_ids
from fedloom.studies.result import Result, best_on_validation, make_result

log = logging.getLogger("fedloom")

MakeClients = Callable[[Algorithm, Task], Clients]
Models = Callable[[bool], Iterator[tuple[np.ndarray, Tree]]]  # after the last (False) or best (True) round, in blocks


class RecordedRun:
    """One run: its configuration, state, directory and records."""

    def __init__(
        self,
        config: Config,
        task: Task,
        directory: RunDirectory | None,
        label: str,
        make_clients: MakeClients | None = None,
    ) -> None:
        """`make_clients` makes the clients of a run that does not have them in this process."""
        self.config, self.task, self.directory, self.label = config, task, directory, label
        self.make_clients = make_clients
        self.partition = directory.keep_partition(task.data) if directory else task.data.digest()
        self.plan = directory.plan(task.data.device) if directory else None  # of an earlier start
        self.records = Records()
        self.done = 0  # rounds
        self.stopped = ""  # why it ends before its last round, if it does
        self.paused = False  # it is to be left with a checkpoint

    def start(self) -> Simulation:
        """Make the initial state."""
        s, data, directory = self.config.settings, self.task.data, self.directory
        folder, unverified = (directory.store, directory.unverified) if directory is not None else (None, False)
        store = partial(make_store, kind=s.store, folder=folder, unverified=unverified)
        best_store = partial(make_store, kind=s.store, folder=None if folder is None else folder / "best")
        self.simulation = Simulation(
            self.config.algorithm,
            self.task,
            s.seed,
            clients=None if self.make_clients is None else self.make_clients(self.config.algorithm, self.task),
            make_local=maker(s, data.clients, data.device, self.plan),
            eval_client_ids=eval_client_ids(s, data),
            make_store=store,
            make_best_store=best_store if s.keep == "best" and self.has_validation else None,
            metric=None if s.metric == basic_metric(data.kind) else find_metric(s.metric, data.kind),
            unseen=eval_unseen_ids(s, data),
            join_rounds=s.join_rounds,
            screening=s.screening and s.dp_clip is None,  # noise makes all updates large
            screen_directions=s.screen_directions,
            clip_updates=s.clip_updates,
            label=self.label,
        )
        return self.simulation

    @property
    def has_validation(self) -> bool:
        """True if a participating client has validation data."""
        data = self.task.data
        return bool(data.splits["val"].sizes[: data.clients].any())

    def bytes_in_memory(self) -> int:
        """Memory of the private state of all clients."""
        stores, size = self.simulation.stores, self.simulation.clients.bytes_per_client
        return sum(len(store) * size for store in stores if isinstance(store, MemoryStore))

    def begin(self, plan: Plan, up_to: int | None) -> None:
        """Continue from the newest checkpoint, if possible from none after round `up_to`."""
        if self.directory is not None:
            self.records = self.directory.begin(self.simulation, plan, up_to)
            self.records.drop_unevaluated(self.evaluates)
        self.done = self.simulation.t
        if self.simulation.driver.best is None:
            self._keep_best()  # a finished run that is given more rounds: its last round may have been the best

    def evaluates(self, done: int) -> bool:
        """True if models are evaluated when so many rounds are done."""
        s = self.config.settings
        return done % s.eval_every == 0 or done == s.rounds or bool(self.stopped)

    def add(self, done: Round, planning: float = 0.0) -> Row | None:
        """Record a round, and the seconds of planning before it; returns its row if it was evaluated."""
        if not self.evaluates(done.t + 1):  # another run of the group was, because it ends
            done = dataclasses.replace(done, scores={})
        row = self.records.add(done, planning)
        self.done = self.simulation.t
        if row is not None:
            row |= self.config.algorithm.report_round(self.records.rounds)
            if self.task.privacy is not None and self.config.algorithm.uploads:
                row["epsilon"] = self.task.privacy.epsilon(int(self.simulation.store.trained.max()))
            self._keep_best()
        return row

    def _keep_best(self) -> None:
        """Keep the models of the last round if none was better on validation data. The last round of a run that is not
        one of those that are evaluated anyway is left out, because it is not evaluated if the run gets more rounds."""
        rounds = self.records.rounds
        if not rounds or rounds[-1]["round"] != self.done or self.done % self.config.settings.eval_every:
            return
        for view in ("pre", "global"):
            if best_on_validation(rounds, view, self.config.settings.metric) is rounds[-1]:
                self.simulation.keep_best(view)

    @property
    def ended(self) -> bool:
        """True after the last round, and after an evaluated one if the method or a callback stops the run."""
        if self.done == self.config.settings.rounds:
            return True
        rounds = self.records.rounds
        if not rounds or rounds[-1]["round"] != self.done:
            return False
        return bool(self.stopped) or self.config.algorithm.should_stop(rounds)

    def in_memory(self, plan: dict[str, Any] | None = None) -> Result:
        """The results of the rounds so far, with the models that the run has now."""
        found = make_result(describe(self.config), plan or {}, self.partition, self.records)
        return dataclasses.replace(found, simulation=self.simulation)

    def result(self, group: RunGroup, number: int) -> Result:
        """The results; in a directory, the final files are written. The run is the one of this number in the group,
        which computes its models."""
        metrics = self._metrics(partial(group.predictions, number)) if self.simulation.is_local else None
        plan = group.plan(number).record()
        early = self.done < self.config.settings.rounds
        more = {"metrics": metrics, "stopped": self.stopped if early else ""}
        found = make_result(describe(self.config), plan, self.partition, self.records, **more)
        if found.all_diverged:
            log.warning("All clients diverged%s, so the results mean nothing; use a smaller lr.", self.label)
        elif not self.label and (warning := found.useless()):  # of several runs, tables show it
            log.warning("%s.", warning)
        if self.directory is None:
            self.simulation.clients = at_home(self.simulation.clients)
            return dataclasses.replace(found, simulation=self.simulation)
        own = {"algorithm": self.config.algorithm, "model": self.config.model}
        files = self._final_files(partial(group.models, number))
        kept = {file for file in final.MODELS if self._stays(file)}
        files |= {} if metrics is None else {METRICS_FILE: table_writer(metrics)}
        self.directory.finish(files, set(final.MODELS) - set(files) - kept, found.summary())
        return dataclasses.replace(found, folder=self.directory.path, own=own)

    def _metrics(self, predictions: Callable[[bool], Blocks]) -> pa.Table:
        """All metrics of the clients' models after the last and the best round."""
        run, s = self.simulation, self.config.settings
        rounds, best = {run.t: predictions(False)}, run.driver.best
        if best is not None and best.t != run.t:
            rounds = {best.t: predictions(True), **rounds}
        own = run.clients.metric
        found = metrics_table(run, rounds, own)
        if best is None and s.keep == "best" and self.directory is not None:  # it was given more rounds
            found = self.directory.with_earlier_metrics(found, run.t)
        return found

    def _final_files(self, models: Models) -> dict[str, Writer]:
        """The files of the final state and of the models that are kept."""
        run, keep = self.simulation, self.config.settings.keep
        if keep == "none":
            return {}
        files, clients = final.state_files(run), self.task.data.clients + self.task.data.held_out
        if run.is_local:
            files[final.models_name(False)] = models_writer(clients, lambda: models(False), run.t)
        if run.driver.best is not None and run.driver.best.t != run.t:
            files[final.models_name(True)] = models_writer(clients, lambda: models(True), run.driver.best.t)
        for best in (False, True):
            found = run.driver.global_model(best)
            if found is not None and best == (found.t != run.t):
                slot = global_slot(run.alg, run.task, found.params, found.stats)
                files[final.global_name(best)] = tensors_writer(named(portable(slot)), {"round": found.t})
        return files

    def _stays(self, file: str) -> bool:
        """True for the models of the best round of a run that was given more rounds, if none of them was better."""
        views = {final.models_name(True): "pre", final.global_name(True): "global"}
        s = self.config.settings
        rounds = [row for row in self.records.rounds if row["round"] % s.eval_every == 0]  # as in `_keep_best`
        return (
            file in views and bool(rounds) and best_on_validation(rounds, views[file], s.metric)["round"] != self.done
        )
