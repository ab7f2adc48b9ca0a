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
from fedloom.data.user_data.issues import join_names
from fedloom.data.user_data.new_samples import NewSamples, read_new_samples
from fedloom.metrics.classification import confusion, recalls
from fedloom.metrics.predictions import Predictions
from fedloom.metrics.registry import METRICS
from fedloom.metrics.summary import over_clients
from fedloom.storage.files import Writer, table_writer, text_writer, write_file
from fedloom.studies.client_model import ClientModel
from fedloom.studies.models import When, client_index
from fedloom.studies.result import Result

BATCH = 512  # samples at once
MAX_COLUMNS = 50  # classes whose probabilities are told; with more, only that of the predicted one is


@dataclass(frozen=True)
class Predicted:
    """Predictions for new samples."""

    samples: NewSamples
    clients: list[str]  # whose model was used, for every sample
    probabilities: np.ndarray  # (samples, classes)
    classes: tuple[str, ...]
    positive: int = 1  # of two classes, the one that metrics such as AUPRC are of

    @property
    def best(self) -> np.ndarray:
        """Index of the most probable class of every sample."""
        return self.probabilities.argmax(1)

    def table(self, most: int = MAX_COLUMNS) -> pa.Table:
        """One row per sample: where it is from, whose model was used, the class if it is known, the predicted class,
        and the probabilities of all classes, or of the predicted one if there are more than `most`."""
        samples, best = self.samples, self.best
        count = len(self.probabilities)
        columns: dict[str, Any] = {"sample": [samples.where(i) for i in range(count)], "client": self.clients}
        if samples.y is not None:
            columns["label"] = [self.classes[c] if c >= 0 else None for c in samples.y.tolist()]
        columns["predicted"] = [self.classes[c] for c in best.tolist()]
        if len(self.classes) <= most:
            columns |= {f"p({name})": self.probabilities[:, c] for c, name in enumerate(self.classes)}
        else:
            columns["p"] = self.probabilities[np.arange(count), best]
        return pa.table(columns)


def predict(result: Result, path: str | Path, client: int | str | None = None, when: When = "best") -> Predicted:
    """Predict the classes of the samples in a file or folder.

    Args:
        result: a run, see `fedloom.load`.
        path: a table, pictures, arrays or texts, as the run was trained with; classes may be missing.
        client: the client whose model is used; by default that of the client that the data name for each sample.
        when: which of its models, see `Result.model`.
    """
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
    """Predict the classes of the samples in a file or folder by one model; `name` says whose it is."""
    samples = read_new_samples(model.preprocessing, path)
    count = len(samples.x)
    return _predicted(samples, [name] * count, [(np.arange(count), model)])


def evaluate(found: Predicted) -> dict[str, Any]:
    """All metrics of predictions for labelled samples: of every client, over clients, and the share of each class that
    was found."""
    samples = found.samples
    if samples.y is None or (samples.y < 0).all():
        raise UserError("The samples have no classes, so predictions cannot be evaluated; use 'fedloom predict'.")
    known = np.flatnonzero(samples.y >= 0)
    names = list(dict.fromkeys(found.clients[i] for i in known))
    owner = np.array([names.index(found.clients[i]) for i in known])
    order = np.argsort(owner, kind="stable")
    rows = known[order]
    starts = np.searchsorted(owner[order], np.arange(len(names) + 1))
    predictions = Predictions(samples.y[rows], found.probabilities[rows], starts, found.positive)
    values = {m.name: m for m in METRICS if m.kind == "classes"}
    each = {name: metric.per_client(predictions) for name, metric in values.items()}
    clients = [
        {"client": name, "samples": int(predictions.sizes[i]), **{m: _finite(v[i]) for m, v in each.items()}}
        for i, name in enumerate(names)
    ]
    over = {m: over_clients(v, predictions.sizes, values[m].higher_is_better) for m, v in each.items()}
    counts = confusion(predictions).sum(0)
    recall = dict(zip(found.classes, map(_finite, recalls(counts[None])[0]), strict=True))
    return {"clients": clients, "over_clients": over, "recall": recall, "confusion": counts.tolist()}


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _predicted(samples: NewSamples, owners: list[str], parts: list[tuple[np.ndarray, ClientModel]]) -> Predicted:
    classes = parts[0][1].classes
    probabilities = np.zeros((len(samples.x), len(classes)))
    for rows, model in parts:
        for some in _batches(rows):
            found = model.probabilities(torch.from_numpy(samples.x[some])).double().numpy()
            if found.ndim > 2:
                raise UserError("The model predicts a class at every position of a sample; use it in Python instead.")
            probabilities[some] = found
    return Predicted(samples, owners, probabilities, classes, parts[0][1].preprocessing.positive)


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
