"""All metrics of the models that are kept, and of a baseline without a model, one row per client."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from fedloom.core.federation import Federation
from fedloom.engine.simulation import Simulation
from fedloom.metrics import multilabel
from fedloom.metrics.baseline import majority, training_mean
from fedloom.metrics.classification import confusion, recalls, reliability
from fedloom.metrics.predictions import Predictions
from fedloom.metrics.registry import Metric, metrics_of

MAX_CONFUSION = 1 << 20  # entries of all confusion matrices that are kept
BASELINE = 0  # stands for the baseline in the column of rounds
VECTOR = pa.list_(pa.field("element", pa.float64()))
COUNTS = pa.list_(pa.field("element", pa.int64()))
Blocks = Iterable[tuple[np.ndarray, Predictions]]  # clients, and predictions for their test samples


def metrics_table(run: Simulation, rounds: dict[int, Blocks], own: Metric | None = None) -> pa.Table:
    """One row per round that is kept and evaluated client, and one of the client's baseline, as round 0: it predicts
    the most frequent class or labels of the client's training samples, or the mean of numbers.

    `recall` and `confusion` (rows are true classes) are lists over classes; large ones are left out. `reliability` has
    samples, summed confidence and correct predictions of each bin of confidence. `own` is a metric of the user.
    """
    data, ids = run.population.data, run.driver.eval_client_ids
    if data.sequences:
        return pa.table({"round": pa.array([], pa.int64()), "client": pa.array([], pa.int64())})
    everything: dict[int, Blocks] = {BASELINE: [(ids, _baseline(data, ids))], **rounds}
    tables = [_table(t, *block, data, own) for t, blocks in everything.items() for block in blocks]
    return pa.concat_tables(tables).combine_chunks()


def _baseline(data: Federation, ids: np.ndarray) -> Predictions:
    train, lists = data.splits["train"], data.splits["test"]
    y = data.targets.in_unit(data.y[lists.joined(ids)]).cpu().numpy()
    starts = np.concatenate([[0], np.cumsum(lists.sizes[ids])])
    counts = data.counts(ids).cpu().numpy()
    if data.kind == "classes":
        return majority(counts, y, starts, data.positive)
    if data.kind == "labels":
        return training_mean(counts, train.sizes[ids], y, starts)
    known = data.targets.in_unit(data.y[train.joined(ids)]).cpu().numpy()
    sums = np.bincount(np.repeat(np.arange(len(ids)), train.sizes[ids]), known, len(ids))
    return training_mean(sums, train.sizes[ids], y, starts)


def _table(t: int, ids: np.ndarray, found: Predictions, data: Federation, own: Metric | None) -> pa.Table:
    columns = {
        "round": pa.array([t] * len(ids), pa.int64()),
        "client": pa.array(ids),
        "samples": pa.array(found.sizes),
    }
    for metric in _metrics(data, own):
        columns[metric.name] = pa.array(metric.per_client(found))
    if data.kind == "classes":
        columns["reliability"] = pa.array(list(reliability(found).reshape(len(ids), -1)), VECTOR)
    if data.kind == "labels":
        columns["recall"] = pa.array(list(multilabel.recalls(found)), VECTOR)
    elif data.kind == "classes" and data.clients * data.classes**2 <= MAX_CONFUSION:
        counts = confusion(found)
        columns["recall"] = pa.array(list(recalls(counts)), VECTOR)
        columns["confusion"] = pa.array(list(counts.reshape(len(ids), -1)), COUNTS)
    return pa.table(columns)


def _metrics(data: Federation, own: Metric | None) -> Iterator[Metric]:
    known = metrics_of(data.kind)
    yield from known
    if own is not None and own not in known:
        yield own
