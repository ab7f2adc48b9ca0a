"""All metrics of the models that are kept, and of the majority baseline, one row per client."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from fedloom.core.federation import Federation
from fedloom.engine.simulation import Simulation
from fedloom.metrics.baseline import majority
from fedloom.metrics.classification import confusion, recalls
from fedloom.metrics.predictions import Predictions
from fedloom.metrics.registry import METRICS, Metric

MAX_CONFUSION = 1 << 20  # entries of all confusion matrices that are kept
MAJORITY = 0  # stands for the baseline in the column of rounds
VECTOR = pa.list_(pa.field("element", pa.float64()))
COUNTS = pa.list_(pa.field("element", pa.int64()))
Blocks = Iterable[tuple[np.ndarray, Predictions]]  # clients, and predictions for their test samples


def metrics_table(run: Simulation, rounds: dict[int, Blocks], own: Metric | None = None) -> pa.Table:
    """One row per round that is kept and evaluated client, and one of the client's majority baseline, as round 0.

    `recall` and `confusion` (rows are true classes) are lists over classes; large ones are left out. `own` is a metric
    of the user.
    """
    data, ids = run.population.data, run.driver.eval_client_ids
    if data.y.dim() > 1:  # a sample has a class at every position
        return pa.table({"round": pa.array([], pa.int64()), "client": pa.array([], pa.int64())})
    everything: dict[int, Blocks] = {MAJORITY: [(ids, _majority(data, ids))], **rounds}
    tables = [_table(t, *block, data, own) for t, blocks in everything.items() for block in blocks]
    return pa.concat_tables(tables).combine_chunks()


def _majority(data: Federation, ids: np.ndarray) -> Predictions:
    lists = data.splits["test"]
    y = data.y[lists.joined(ids)].cpu().numpy()
    starts = np.concatenate([[0], np.cumsum(lists.sizes[ids])])
    return majority(data.counts(ids).cpu().numpy(), y, starts, data.positive)


def _table(t: int, ids: np.ndarray, found: Predictions, data: Federation, own: Metric | None) -> pa.Table:
    columns = {
        "round": pa.array([t] * len(ids), pa.int64()),
        "client": pa.array(ids),
        "samples": pa.array(found.sizes),
    }
    for metric in _metrics(own):
        columns[metric.name] = pa.array(metric.per_client(found))
    if data.clients * data.classes**2 <= MAX_CONFUSION:
        counts = confusion(found)
        columns["recall"] = pa.array(list(recalls(counts)), VECTOR)
        columns["confusion"] = pa.array(list(counts.reshape(len(ids), -1)), COUNTS)
    return pa.table(columns)


def _metrics(own: Metric | None) -> Iterator[Metric]:
    yield from (metric for metric in METRICS if metric.kind == "classes")
    if own is not None and own not in METRICS:
        yield own
