"""The results of a run, from memory or from its directory."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fedloom.config.files import ConfigDict
from fedloom.core.tree import Tree
from fedloom.metrics.scores import convergence_round
from fedloom.runs.directory import RunDirectory
from fedloom.runs.records import Records, Row

VIEWS = ("pre", "post", "global")


@dataclass
class Result:
    """The results of a run.

    `rounds` has one row per evaluated round, `clients` one per client and evaluated round. Columns are named
    `<view>_<metric>`: `pre` is the personal model as a client would use it next, `post` the one right after its last
    local training, `global` the global model; `_val_` marks validation data.
    """

    config: ConfigDict
    plan: dict[str, Any]
    partition: str  # digest of the partition
    rounds: list[Row]
    clients: pa.Table
    reports: pa.Table  # what the method reports, one row per round and client of its cohort; the server is client -1
    timings: list[Row]
    folder: Path | None = None
    state: tuple[Tree, Tree] | None = field(default=None, repr=False)  # of server and clients, of a run in memory

    @property
    def server(self) -> Tree:
        """The server's state at the end."""
        return self._final[0]

    @property
    def store(self) -> Tree:
        """Private state of the clients at the end, one row each."""
        return self._final[1]

    @cached_property
    def _final(self) -> tuple[Tree, Tree]:
        if self.state is not None:
            return self.state
        assert self.folder is not None
        return RunDirectory(self.folder).final()

    @property
    def seconds(self) -> float:
        """Time of all rounds, training and evaluation."""
        return sum(row["train_seconds"] + row["eval_seconds"] for row in self.timings)

    def last(self) -> Row:
        """The last evaluated round."""
        return self.rounds[-1]

    def best_on_validation(self, view: str = "pre") -> Row:
        """The evaluated round with the highest mean validation accuracy; among equals, which are frequent with few
        samples, the one with the lowest validation loss."""
        return self._best(f"{view}_val_acc_mean", f"{view}_val_loss")

    def best_on_test(self, view: str = "pre") -> Row:
        """The round with the highest mean test accuracy. Most papers report it, but it is selected on the numbers that
        it shows, so never quote it alone."""
        return self._best(f"{view}_acc_mean")

    def _best(self, column: str, loss: str | None = None) -> Row:
        scored = [row for row in self.rounds if row.get(column) is not None]
        if not scored:
            return self.rounds[-1]
        return max(
            scored, key=lambda row: (row[column], -row[loss] if loss and math.isfinite(row[loss]) else -math.inf)
        )

    def convergence_round(self, view: str = "pre") -> int:
        """The first evaluated round whose accuracy, averaged over the ten evaluated rounds up to it, is within 0.1
        points of the best such average."""
        return self.rounds[convergence_round([row[f"{view}_acc_mean"] for row in self.rounds]) - 1]["round"]

    @property
    def all_diverged(self) -> bool:
        """True if all clients of the last round diverged, so that the results mean nothing."""
        if "diverged" not in self.reports.column_names:
            return False
        of_last = (pc.field("round") == self.timings[-1]["round"]) & (pc.field("client") >= 0)
        rows = self.reports.filter(of_last)["diverged"].to_pylist()
        return bool(rows) and all(value == 1 for value in rows)

    def views(self) -> list[str]:
        """The models that were scored: pre, post, global."""
        return [view for view in VIEWS if f"{view}_acc_mean" in self.last()]

    @property
    def unseen(self) -> list[int]:
        """Ids of held-out clients that were evaluated."""
        if "new_acc" not in self.clients.column_names:
            return []
        return self.clients.filter(pc.field("new_acc").is_valid())["client"].unique().to_pylist()

    def summary(self) -> dict[str, Any]:
        """Last round, best rounds and convergence, by view."""
        found: dict[str, Any] = {"partition": self.partition, "rounds": self.last()["round"], "last": self.last()}
        for name, pick in (("best_on_validation", self.best_on_validation), ("best_on_test", self.best_on_test)):
            found[name] = {view: pick(view) for view in self.views()}
        found["convergence_round"] = {view: self.convergence_round(view) for view in self.views()}
        return found


def load(folder: str | Path) -> Result:
    """The results in a run directory; for a run that is not finished, what is recorded so far.

    >>> import fedloom
    >>> result = fedloom.load("runs/ditto-digits-1")  # doctest: +SKIP
    """
    directory = RunDirectory(Path(folder))
    config, plan, partition, records = directory.contents()
    return make_result(config, plan, partition, records, folder=directory.path)


def make_result(config: ConfigDict, plan: dict[str, Any], partition: str, records: Records, **more: Any) -> Result:
    """A result from its records."""
    tables = {name: getattr(records, name) for name in ("rounds", "clients", "reports", "timings")}
    return Result(config=config, plan=plan, partition=partition, **tables, **more)
