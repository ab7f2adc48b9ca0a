"""What all trackers have in common: what they log of a run, under which name, and when."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from fedloom.config.resolve import flat
from fedloom.core.errors import UserError
from fedloom.runs.records import Row
from fedloom.studies.callbacks import Callback, TrainingRun
from fedloom.studies.result import Result

log = logging.getLogger("fedloom")

LONGEST = 200  # characters of another library's message


class Tracker(Callback):
    """Logs the settings of a run at its start, seconds, gradients and samples after every round, metrics after every
    evaluated one, and the metrics of the best round at the end. Subclasses say how."""

    extra = ""  # of the package, with which the tracker's library is installed
    library = ""  # that is imported

    def __init__(self) -> None:
        require(self.library, self.extra, type(self).__name__)
        self._open: dict[TrainingRun, Any] = {}  # what `begin` returned

    def begin(self, run: TrainingRun) -> Any:
        """Open the record of a run, which may have had some rounds before, and log its settings."""
        raise NotImplementedError

    def log(self, record: Any, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers of a round."""
        raise NotImplementedError

    def finish(self, record: Any, best: Mapping[str, float]) -> None:
        """Log the metrics of the best round, and close the record."""
        raise NotImplementedError

    def on_start(self, run: TrainingRun) -> None:
        name = type(self).__name__
        try:
            self._open[run] = self.begin(run)
        except UserError:
            raise
        except Exception as error:  # of another library
            raise UserError(f"{name} cannot log this run: {_first_sentence(error)}.") from error

    def on_round(self, run: TrainingRun) -> None:
        found = {**numbers(run.costs[-1]), **numbers(run.metrics or {})}
        self._try(run, lambda record: self.log(record, found, run.round))

    def on_end(self, run: TrainingRun, result: Result) -> None:
        best = {f"best_{name}": value for name, value in numbers(result.best_on_validation()).items()}
        self._try(run, lambda record: self.finish(record, best))
        self._open.pop(run, None)

    def _try(self, run: TrainingRun, job: Callable[[Any], None]) -> None:
        """Do something with the record of a run. If that fails, say so and go on without: training is worth more."""
        if run not in self._open:
            return
        try:
            job(self._open[run])
        except Exception as error:  # of another library
            del self._open[run]
            what = f"{run.name}, seed {run.seed}, from round {run.round} on"
            log.warning("%s has stopped logging %s: %s.", type(self).__name__, what, _first_sentence(error))


def _first_sentence(error: Exception) -> str:
    """The beginning of an error's message, without its full stop."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition(". ")[0].rstrip(".")[:LONGEST]


def require(library: str, extra: str, name: str) -> Any:
    """The library of a tracker. Raises UserError that says what to install if it is not there."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UserError(
            f"{name} needs the package '{error.name or library}', which is not installed; install it with "
            f"pip install 'fedloom[{extra}]'."
        ) from None


def numbers(row: Row) -> dict[str, float]:
    """The finite numbers of a row of metrics, without the number of the round."""
    found = {k: v for k, v in row.items() if k != "round" and isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def settings(run: TrainingRun) -> dict[str, Any]:
    """The settings of a run, such as `lr` and `algorithm.lam`."""
    return flat(run.config)


def title(run: TrainingRun) -> str:
    """The name of a run: its folder or, in a study, those of study, method and seed."""
    if run.folder is None:
        return f"{run.name}/seed-{run.seed}"
    parts = run.folder.absolute().parts
    in_study = parts[-3:-2] == ("runs",) and parts[-1] == f"seed-{run.seed}"
    return "/".join((parts[-4], *parts[-2:])) if in_study else parts[-1]
