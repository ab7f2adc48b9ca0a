"""Predictions of a run's models for new samples."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fedloom.core.errors import UserError, nearest, shown
from fedloom.core.kinds import Kind
from fedloom.data.user_data.issues import join_names
from fedloom.data.user_data.new_samples import NewSamples, read_new_samples
from fedloom.metrics import multilabel
from fedloom.metrics.classification import confusion, recalls
from fedloom.metrics.predictions import Predictions
from fedloom.metrics.registry import metrics_of
from fedloom.metrics.summary import over_clients
from fedloom.storage.files import Writer, table_writer, text_writer, write_file
from fedloom.studies.client_model import ClientModel
from fedloom.studies.models import When, client_index
from fedloom.studies.personal_models import PersonalModels
from fedloom.studies.result import Result

BATCH = 512  # samples at once
MAX_COLUMNS = 50  # classes whose probabilities are told; with more, only that of the predicted one is


@dataclass(frozen=True)
class Predicted:
    """Predictions for new samples."""

    samples: NewSamples
    clients: list[str]  # whose model was used, for every sample
    p: np.ndarray  # probabilities (samples, classes or labels); for numbers, values (samples,)
    classes: tuple[str, ...]
    kind: Kind = "classes"  # what is predicted
    positive: int = 1  # of two classes, the one that metrics such as AUPRC are of

    def table(self, most: int = MAX_COLUMNS) -> pa.Table:
        """One row per sample: where it is from, whose model was used, the target if it is known, the prediction, and
        the probabilities of all classes or labels; if there are more than `most`, of the predicted class only."""
        samples, count = self.samples, len(self.p)
        columns: dict[str, Any] = {"sample": [samples.where(i) for i in range(count)], "client": self.clients}
        if samples.y is not None:
            columns["label" if self.kind != "number" else self.classes[0]] = self._names(samples.y)
        if self.kind == "number":
            return pa.table({**columns, "predicted": self.p})
        best = self.p.argmax(1) if self.kind == "classes" else self.p >= multilabel.THRESHOLD
        columns["predicted"] = self._names(best)
        if len(self.classes) <= most:
            columns |= {f"p({name})": self.p[:, c] for c, name in enumerate(self.classes)}
        elif self.kind == "classes":
            columns["p"] = self.p[np.arange(count), best]
        return pa.table(columns)

    def _names(self, y: np.ndarray) -> list[Any]:
        """Targets as a user writes them: a class, labels with semicolons between them, or a number; None if unknown."""
        if self.kind == "classes":
            return [self.classes[c] if c >= 0 else None for c in y.tolist()]
        if self.kind == "number":
            return [None if np.isnan(value) else value for value in y.tolist()]
        names = np.array(self.classes, dtype=object)
        return [None if np.isnan(row).any() else "; ".join(names[row > 0]) for row in y.astype(float)]


def predict(
    result: Result | PersonalModels, path: str | Path, client: int | str | None = None, when: When = "best"
) -> Predicted:
    """Predict the targets of the samples in a file or folder.

    Args:
        result: a run, see `fedloom.load`.
        path: a table, pictures, arrays or texts, as the run was trained with; targets may be missing.
        client: the client whose model is used; by default that of the client that the data name for each sample.
        when: which of its models, see `Result.model`.
    """
    if isinstance(result, PersonalModels):
        return predict_with(result.model(client, when), path, result.name)
    models = result.models
    samples = read_new_samples(models.architecture().preprocessing, path)
    found: list[tuple[np.ndarray, ClientModel]] = []
    owners = np.array([str(client)] * len(samples.x)) if client is not None else samples.client
    if owners is None:
        names = models.names or [str(i) for i in range(models.clients)]
        raise UserError(f"{path} does not say whose samples these are; name the client ({join_names(names)}).")
    for name in dict.fromkeys(owners.tolist()):
        if client is None and models.names and name not in models.names:
            known = nearest(name, models.names)
            raise UserError(f"{path} has samples of '{shown(name)}', who is no client of the run; {known}")
        i = client_index(client if client is not None else name, models)
        found.append((np.flatnonzero(owners == name), result.model(i, when)))
    return _predicted(samples, owners.tolist(), found)


def predict_with(model: ClientModel, path: str | Path, name: str) -> Predicted:
    """Predict the targets of the samples in a file or folder by one model; `name` says whose it is."""
    samples = read_new_samples(model.preprocessing, path)
    count = len(samples.x)
    return _predicted(samples, [name] * count, [(np.arange(count), model)])


def evaluate(found: Predicted) -> dict[str, Any]:
    """All metrics of predictions for labelled samples: of every client, over clients, and the share of each class or
    label that was found."""
    samples = found.samples
    if samples.y is None or not len(known := samples.known()):
        raise UserError("The samples have no targets, so predictions cannot be evaluated; use 'fedloom predict'.")
    names = list(dict.fromkeys(found.clients[i] for i in known))
    owner = np.array([names.index(found.clients[i]) for i in known])
    order = np.argsort(owner, kind="stable")
    rows = known[order]
    starts = np.searchsorted(owner[order], np.arange(len(names) + 1))
    predictions = Predictions(samples.y[rows], found.p[rows], starts, found.positive)
    values = {m.name: m for m in metrics_of(found.kind)}
    each = {name: metric.per_client(predictions) for name, metric in values.items()}
    clients = [
        {"client": name, "samples": int(predictions.sizes[i]), **{m: _finite(v[i]) for m, v in each.items()}}
        for i, name in enumerate(names)
    ]
    over = {m: over_clients(v, predictions.sizes, values[m].higher_is_better) for m, v in each.items()}
    report = {"clients": clients, "over_clients": over}
    if found.kind == "number":
        return report
    if found.kind == "labels":
        everyone = predictions._replace(starts=np.array([0, len(rows)]))
        recall = multilabel.recalls(everyone)[0]
        return {**report, "recall": dict(zip(found.classes, map(_finite, recall), strict=True))}
    counts = confusion(predictions).sum(0)
    recall = recalls(counts[None])[0]
    return {
        **report,
        "recall": dict(zip(found.classes, map(_finite, recall), strict=True)),
        "confusion": counts.tolist(),
    }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _predicted(samples: NewSamples, owners: list[str], parts: list[tuple[np.ndarray, ClientModel]]) -> Predicted:
    about = parts[0][1].preprocessing
    p = np.zeros(len(samples.x) if about.target == "number" else (len(samples.x), len(about.classes)))
    for rows, model in parts:
        for some in _batches(rows):
            found = model.predictions(torch.from_numpy(samples.x[some])).double().numpy()
            if found.ndim > 2:
                raise UserError("The model predicts a class at every position of a sample; use it in Python instead.")
            p[some] = found
    return Predicted(samples, owners, p, about.classes, about.target, about.positive)


def _batches(rows: np.ndarray) -> Iterator[np.ndarray]:
    return (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table as CSV, JSON or Parquet, by the suffix of the file."""
    writers = {".csv": _csv, ".json": _json, ".parquet": table_writer}
    if path.suffix.lower() not in writers:
        raise UserError(f"Predictions are written as .csv, .json or .parquet, not as '{path.name}'.")
    if path.parent and not path.parent.is_dir():
        raise UserError(f"There is no folder {path.parent} for {path.name}; make it first.")
    write_file(path, writers[path.suffix.lower()](table))


def _csv(table: pa.Table) -> Writer:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.column_names)
    writer.writerows(zip(*(column.to_pylist() for column in table.columns), strict=True))
    return text_writer(text.getvalue())


def _json(table: pa.Table) -> Writer:
    return text_writer(json.dumps(table.to_pylist(), ensure_ascii=False, indent=1) + "\n")
