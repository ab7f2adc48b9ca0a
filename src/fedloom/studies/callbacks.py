"""Callbacks: objects of your own that are called while runs train, see their metrics and models, and can stop them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.config.files import ConfigDict
from fedloom.config.resolve import describe
from fedloom.core.errors import UserError, plural
from fedloom.metrics.registry import column_name, sign
from fedloom.runs.records import Row
from fedloom.studies.build import NO_VALIDATION
from fedloom.studies.client_model import ClientModel
from fedloom.studies.recorded_run import RecordedRun
from fedloom.studies.result import Result


class TrainingRun:
    """A run that trains, as callbacks see it. Runs that differ in seeds or numbers only may train at the same time."""

    def __init__(self, run: RecordedRun, name: str, group: tuple[int, int], together: int) -> None:
        self._run = run
        self.name = name  # the method, with those of its settings that are not the defaults; in a sweep, the values
        self.group = group  # number of its group of runs, from 1, and of all groups; (1, 1) for a single run
        self.together = together  # runs in the group, which train at the same time

    def __repr__(self) -> str:
        return f"TrainingRun({self.name}, seed {self.seed}, round {self.round} of {self.rounds})"

    @property
    def title(self) -> str:
        """What a progress bar calls the runs that train at the same time, such as "2/5 fedrep, 3 runs"."""
        number, total = self.group
        words = [f"{number}/{total} {self.name}" if total > 1 else self.name]
        return ", ".join([*words, plural(self.together, "run")] if self.together > 1 else words)

    @property
    def config(self) -> ConfigDict:
        """The configuration, as in the run's config.yaml."""
        return describe(self._run.config)

    @property
    def seed(self) -> int:
        """The random seed."""
        return self._run.config.settings.seed

    @property
    def folder(self) -> Path | None:
        """The run directory; None for a run in memory."""
        return None if self._run.directory is None else self._run.directory.path

    @property
    def rounds(self) -> int:
        """The number of rounds that it is to have."""
        return self._run.config.settings.rounds

    @property
    def round(self) -> int:
        """The number of rounds that are done."""
        return self._run.done

    @property
    def metric(self) -> str:
        """The metric that selects the best round."""
        return self._run.config.settings.metric

    @property
    def history(self) -> Sequence[Row]:
        """One row of metrics per evaluated round so far, named as in `Result.rounds`."""
        return self._run.records.rounds

    @property
    def metrics(self) -> Row | None:
        """The metrics of this round; None if it was not evaluated."""
        rows = self._run.records.rounds
        return rows[-1] if rows and rows[-1]["round"] == self.round else None

    @property
    def costs(self) -> Sequence[Row]:
        """One row per round so far: seconds, gradients and samples, as in `Result.timings`."""
        return self._run.records.timings

    @property
    def has_validation(self) -> bool:
        """True if there are validation data, so that a best round can be selected."""
        return self._run.has_validation

    def model(self, client: int | str) -> ClientModel:
        """The model that a client would predict with now, as `Result.model` returns it. It costs a forward pass of the
        method's functions, so ask for it only when you need it."""
        return self._now.model(client, when="last")

    def global_model(self) -> ClientModel:
        """The global model as it is now, as `Result.global_model` returns it."""
        return self._now.global_model(when="last")

    @property
    def _now(self) -> Result:
        if not self.history:
            raise UserError("There are no models before the first evaluated round.")
        return self._run.in_memory()

    def stop(self, reason: str = "") -> None:
        """End the run after this round: it is finished then, with the results and the models of the rounds so far."""
        self._run.stopped = reason or "stopped by a callback"

    def pause(self) -> None:
        """Leave the run after this round, with a checkpoint; all runs that train at the same time are left, too. The
        function that was called raises `KeyboardInterrupt`, and `resume=True` continues."""
        if self._run.directory is None:
            raise UserError("A run in memory cannot be continued, so it cannot pause; give it a folder with out.")
        self._run.paused = True


class Callback:
    """Base class of callbacks; override the functions that you need.

    The same object is called for all runs of a comparison or a sweep. What a function raises ends the run, which can be
    resumed from its last checkpoint.

    >>> import fedloom
    >>> class Printer(fedloom.Callback):
    ...     def on_evaluation(self, run):
    ...         print(run.round, run.metrics["pre_acc_mean"] > 0)
    >>> result = fedloom.run("fedavg", rounds=2, clients=5, callbacks=[Printer()])
    1 True
    2 True
    """

    def on_setup(self, run: TrainingRun) -> None:
        """Before the execution plan is made, which may take some seconds; a resumed run has not been read yet."""

    def on_planning(self, run: TrainingRun, step: str) -> None:
        """Before each step of making the execution plan, such as "timing one client"; not if a plan is known."""

    def on_start(self, run: TrainingRun) -> None:
        """When training begins or, after `run.round` rounds, goes on."""

    def on_round(self, run: TrainingRun) -> None:
        """After every round."""

    def on_evaluation(self, run: TrainingRun) -> None:
        """After every evaluated round, before `on_round`; `run.metrics` has its metrics."""

    def on_end(self, run: TrainingRun, result: Result) -> None:
        """After the last round, when everything is written. Not called for runs that were finished before."""


class EarlyStopping(Callback):
    """Ends a run that does not get better on validation data. The settings `early_stopping` and
    `min_delta` do the same."""

    def __init__(self, patience: int, min_delta: float = 0.0) -> None:
        """
        Args:
            patience: rounds without an improvement after which a run ends.
            min_delta: how much better the mean of the run's metric over clients must be to count as an improvement, in
                the metric's unit: percentage points for accuracy.
        """
        for name, value, low in (("patience", patience, 1), ("min_delta", min_delta, 0)):
            if not isinstance(value, int | float) or not low <= value < math.inf:
                raise UserError(f"{name} must be at least {low}, not {value}.")
        self.patience, self.min_delta = patience, min_delta

    def on_setup(self, run: TrainingRun) -> None:
        """Refuse a run without validation data."""
        if not run.has_validation:
            raise UserError(NO_VALIDATION)

    def on_start(self, run: TrainingRun) -> None:
        """End a resumed run that was interrupted when it was about to end."""
        if run.metrics is not None:
            self.on_evaluation(run)

    def on_evaluation(self, run: TrainingRun) -> None:
        """End a run that is no better than `patience` rounds before."""
        column, direction = f"pre_val_{column_name(run.metric)}_mean", sign(run.metric)
        best, best_round = -math.inf, 0
        for row in run.history:  # not remembered from call to call, so that a resumed run stops in the same round
            value = direction * row.get(column, math.nan)
            if value > best + self.min_delta:
                best, best_round = value, row["round"]
        if run.round - best_round >= self.patience:
            run.stop(f"no better on validation data since round {best_round}")


def checked(callbacks: Any) -> list[Callback]:
    """The callbacks as a list; raises UserError for what is none."""
    found = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    for one in found:
        if not isinstance(one, Callback):
            name = one.__name__ if isinstance(one, type) else type(one).__name__
            hint = f"make one: {name}()" if isinstance(one, type) else "derive its class from fedloom.Callback"
            raise UserError(f"callbacks has {name}, which is not a fedloom.Callback; {hint}.")
    return found
