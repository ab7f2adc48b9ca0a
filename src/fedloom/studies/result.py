"""The results of a run, from memory or from its directory."""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedloom.config.files import ConfigDict
from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError, nearest, shown, unknown
from fedloom.core.tree import Tree
from fedloom.engine.simulation import Simulation
from fedloom.metrics.registry import column_name, sign
from fedloom.metrics.scores import convergence_round
from fedloom.runs.directory import RunDirectory
from fedloom.runs.records import Records, Row
from fedloom.studies.client_model import ClientModel
from fedloom.studies.frames import data_frame
from fedloom.studies.models import Models, ModelsInMemory, ModelsOnDisk, When, client_index

VIEWS = ("pre", "post", "global")
NO_METRICS = "This run has no metrics yet, or was made by an older FedLoom; continue it, or run it again."
TableName = Literal["rounds", "clients", "reports", "timings", "metrics"]
# for classes, labels and numbers: a model that beats the baseline in one of these metrics has learnt something
RELEVANT = (("accuracy", "balanced_accuracy"), ("accuracy", "macro_f1"), ("rmse",))


@dataclass(repr=False)
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
    timings: list[Row]  # one row per round: seconds, gradients, samples
    metrics: pa.Table | None = None  # all metrics per client: rounds that are kept; the baseline is round 0
    folder: Path | None = None
    stopped: str = ""  # why it ended before its last round, if a callback or `early_stopping` ended it
    simulation: Simulation | None = field(default=None, repr=False)  # of a run in memory
    own: dict[str, Any] = field(default_factory=dict, repr=False)  # algorithm and model that were made in Python

    def __repr__(self) -> str:
        method, data = (self.config[section]["name"] for section in ("algorithm", "dataset"))
        words = [f"{method} on {data}", f"{self.config.get('clients')} clients"]
        if self.rounds:
            row, name = self.last(), column_name(self.metric)
            words.append(f"round {row['round']} of {self.config.get('rounds')}")
            shown_as = {"mean": "mean", "low5": "lowest 5 %" if sign(self.metric) > 0 else "worst 5 %"}
            scores = [(about, row.get(f"pre_{name}_{key}")) for key, about in shown_as.items()]
            known = [f"{about} {value:.4g}" for about, value in scores if value is not None]
            words += [f"{self.metric} {' '.join(known)}"] if known else []
        return f"Result({', '.join([*words, *([str(self.folder)] if self.folder else [])])})"

    def to_pandas(self, table: TableName = "rounds") -> Any:
        """One of the tables as a `pandas.DataFrame`: rounds, clients, reports, timings or metrics (all metrics per
        client of the rounds that are kept). Needs pandas: `pip install 'fedloom[pandas]'`."""
        if table not in get_args(TableName):
            raise unknown("table", table, get_args(TableName))
        found = getattr(self, table)
        if found is None:
            raise UserError(NO_METRICS)
        return data_frame(found)

    def model(self, client: int | str, when: When = "best") -> ClientModel:
        """The model that a client predicts with, as a `torch.nn.Module` in evaluation mode.

        Args:
            client: its number or its name.
            when: after the round that is best on validation data, as tables rank it, or after the last one.

        A client that was held out gets the model with which it joins. The module takes what the client has: a row of
        its table, a picture, a text, or a tensor.

        >>> import fedloom
        >>> model = fedloom.run("fedrep", rounds=3, clients=5).model(0)
        >>> model.predict([[[0.0] * 8] * 8])  # doctest: +SKIP
        ['4']
        """
        best = self._other_round(when, "pre")
        i = client_index(client, self.models)
        return self.models.architecture().module(self.models.client(i, best))

    def global_model(self, when: When = "best") -> ClientModel:
        """The global model, with the mean of the clients' running statistics, as `model` returns those of clients."""
        best = self._other_round(when, "global")
        found = self.models.shared(best)
        if found is None:
            raise UserError(f"{self.config['algorithm']['name']} has no global model; ask for the model of a client.")
        # the base class predicts by the head, as global models do
        return dataclasses.replace(self.models.architecture(), algorithm=Algorithm()).module(found)

    def join(self, path: str | Path) -> ClientModel:
        """The model of a new client that joins the run with labelled samples of its own, as the method prescribes.

        The run must have a folder. The training data of the others are not needed, and nothing in the run changes.

        Args:
            path: a file or folder with samples, as the run was trained with.
        """
        from fedloom.studies.joining import join

        return join(self, path)

    def predict(self, path: str | Path, client: int | str | None = None, when: When = "best") -> pa.Table:
        """Predictions for the samples in a file or folder, one row each.

        Args:
            path: a table, pictures, arrays or texts, as the run was trained with; targets may be missing.
            client: the client whose model is used; by default that of the client that the data name for each sample.
            when: which of its models, see `model`.
        """
        from fedloom.studies.predict import predict

        return predict(self, path, client, when).table()

    def _other_round(self, when: str, view: str) -> bool:
        """True if the models that are asked for are of another round than the last."""
        if when not in ("best", "last"):
            raise UserError(f"when cannot be '{shown(when)}'; {nearest(str(when), ('best', 'last'))}")
        return self._round(when, view) != self.last()["round"]

    def _round(self, when: str, view: str = "pre") -> int:
        return (self.best_on_validation(view) if when == "best" else self.last())["round"]

    @cached_property
    def models(self) -> Models:
        """Where the weights of all models are."""
        if self.simulation is not None:
            return ModelsInMemory(self.simulation)
        assert self.folder is not None
        return ModelsOnDisk(RunDirectory(self.folder), self.config, self.own)

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
        if self.simulation is not None:
            return self.simulation.server, self.simulation.store.everyone()["own"]
        assert self.folder is not None
        return RunDirectory(self.folder).final()

    @property
    def seconds(self) -> float:
        """Time of planning and of all rounds, training and evaluation."""
        return sum(v for row in self.timings for name, v in row.items() if name.endswith("_seconds") and v is not None)

    def computed(self, per_round: bool = False) -> dict[str, float]:
        """The gradients that a client computed, and the samples of which they were taken: in all rounds, on average
        over clients, or in a round in which it took part. A sample counts as often as a gradient is taken of it,
        weighted by the share of the model's parameters that are differentiated. Empty for runs of older versions."""
        rows = [row for row in self.timings if row.get("gradients") is not None]
        if not rows:
            return {}
        found = {}
        for name in ("gradients", "samples"):
            total = sum(row[name] * (1 if per_round else row["participation"]) for row in rows)
            found[name] = total / len(rows) if per_round else total
        return found

    @property
    def epsilon(self) -> float | None:
        """Differential privacy of the uploads of the client that has uploaded most; None for runs without."""
        return self.last().get("epsilon")

    @property
    def metric(self) -> str:
        """The metric that selects the best round."""
        return self.config.get("metric", "accuracy")

    @property
    def basic_metric(self) -> str:
        """The metric that all rounds have, whatever the run's is: accuracy or, for numbers, rmse."""
        return "rmse" if any(name.endswith("_rmse_mean") for name in self.last()) else "accuracy"

    def last(self) -> Row:
        """The last evaluated round."""
        return self.rounds[-1]

    def best_on_validation(self, view: str = "pre") -> Row:
        """The evaluated round with the best mean of the run's metric (by default accuracy) on validation data; among
        equals, which are frequent with few samples, the one with the lowest validation loss."""
        return best_on_validation(self.rounds, view, self.metric)

    def best_on_test(self, view: str = "pre") -> Row:
        """The round with the best mean of the run's metric on test data. Most papers report it, but it is selected on
        the numbers that it shows, so never quote it alone."""
        return _best(self.rounds, f"{view}_{column_name(self.metric)}_mean", sign(self.metric))

    def convergence_round(self, view: str = "pre") -> int:
        """The first evaluated round whose accuracy, averaged over the ten evaluated rounds up to it, is within 0.1
        points of the best such average; for numbers, whose RMSE is within 1 percent of it."""
        name = column_name(self.basic_metric)
        values = [sign(self.basic_metric) * row[f"{view}_{name}_mean"] for row in self.rounds]
        found = convergence_round(values) if name == "acc" else convergence_round(values, share=0.01)
        return self.rounds[found - 1]["round"]

    @property
    def all_diverged(self) -> bool:
        """True if all clients of the last round diverged, so that the results mean nothing."""
        if "diverged" not in self.reports.column_names:
            return False
        of_last = (pc.field("round") == self.timings[-1]["round"]) & (pc.field("client") >= 0)
        rows = self.reports.filter(of_last)["diverged"].to_pylist()
        return bool(rows) and all(value == 1 for value in rows)

    def client_metrics(self, when: When | Literal["baseline"] = "best") -> pa.Table:
        """All metrics of every evaluated client: of the model that `model` returns, or of a baseline that always
        predicts the most frequent class among the client's training samples (for numbers, their mean)."""
        if self.metrics is None:
            raise UserError(NO_METRICS)
        if when not in ("best", "last", "baseline"):
            raise UserError(f"when cannot be '{shown(when)}'; {nearest(str(when), ('best', 'last', 'baseline'))}")
        wanted = 0 if when == "baseline" else self._round(when)
        found = self.metrics.filter(pc.field("round") == wanted)
        if not len(found) and len(self.metrics):
            raise UserError(f"The models of round {wanted} were not kept (keep={self.config.get('keep')}).")
        return found

    def useless(self) -> str:
        """A sentence without a full stop if models do not beat the baseline, else ""."""
        columns = () if self.metrics is None else self.metrics.column_names
        relevant = next((names for names in RELEVANT if set(names) <= set(columns)), ())
        if self.metrics is None or not relevant:
            return ""
        models, baseline = (self.metrics.filter(pc.field("round") == t) for t in (self.last()["round"], 0))
        mean = {name: [float(np.nanmean(t[name].to_numpy())) for t in (models, baseline)] for name in relevant}
        for name, (mine, baselines) in mean.items():
            if sign(name) * (mine - baselines) > (0.05 if name != "rmse" else 0.0005 * baselines):
                return ""
        if "rmse" in mean:
            return (
                f"The models are no better than always predicting the mean of a client's targets (rmse "
                f"{mean['rmse'][0]:.4g}, baseline {mean['rmse'][1]:.4g}); try more rounds or another lr"
            )
        accuracy = mean["accuracy"]
        return (
            f"The models are no better than always predicting the most frequent class (accuracy {accuracy[0]:.1f} %, "
            f"baseline {accuracy[1]:.1f} %); try class_weight=balanced, more rounds, another lr, and metric=auprc to "
            "see what accuracy hides"
        )

    def views(self) -> list[str]:
        """The models that were scored: pre, post, global."""
        return [view for view in VIEWS if f"{view}_loss" in self.last()]

    @property
    def unseen(self) -> list[int]:
        """Ids of held-out clients that were evaluated."""
        column = f"new_{column_name(self.basic_metric)}"
        if column not in self.clients.column_names:
            return []
        return self.clients.filter(pc.field(column).is_valid())["client"].unique().to_pylist()

    def summary(self) -> dict[str, Any]:
        """Last round, best rounds and convergence, by view."""
        found: dict[str, Any] = {"partition": self.partition, "rounds": self.last()["round"], "last": self.last()}
        for name, pick in (("best_on_validation", self.best_on_validation), ("best_on_test", self.best_on_test)):
            found[name] = {view: pick(view) for view in self.views()}
        found["convergence_round"] = {view: self.convergence_round(view) for view in self.views()}
        return found | ({"stopped": self.stopped} if self.stopped else {})


def best_on_validation(rounds: list[Row], view: str, metric: str = "accuracy") -> Row:
    """See `Result.best_on_validation`."""
    return _best(rounds, f"{view}_val_{column_name(metric)}_mean", sign(metric), f"{view}_val_loss")


def _best(rounds: list[Row], column: str, direction: float = 1.0, loss: str | None = None) -> Row:
    scored = [row for row in rounds if row.get(column) is not None]
    if not scored:
        return rounds[-1]

    def goodness(row: Row) -> tuple[float, float]:
        value = -math.inf if math.isnan(row[column]) else direction * row[column]
        return value, -row[loss] if loss and math.isfinite(row[loss]) else -math.inf

    return max(scored, key=goodness)


def load_run(folder: Path, own: dict[str, Any] | None = None) -> Result:
    """The results in a run directory; `own` may have the algorithm and the model, if they were made in Python."""
    directory = RunDirectory(folder)
    config, plan, partition, records = directory.contents()
    more = {"metrics": directory.metrics(), "stopped": directory.why_stopped(), "own": own or {}}
    return make_result(config, plan, partition, records, folder=directory.path, **more)


def make_result(config: ConfigDict, plan: dict[str, Any], partition: str, records: Records, **more: Any) -> Result:
    """A result from its records."""
    tables = {name: getattr(records, name) for name in ("rounds", "clients", "reports", "timings")}
    return Result(config=config, plan=plan, partition=partition, **tables, **more)
