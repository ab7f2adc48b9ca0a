"""The records of a run: one row per evaluated round, one per client and evaluated round, numbers that the method
reports, and, in a separate table with a row for every round, what it took: time, gradients, samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedloom.engine.driver import Round
from fedloom.metrics.registry import column_name
from fedloom.metrics.scores import basic_metric, basic_values, summarize
from fedloom.metrics.summary import over_clients
from fedloom.storage.files import Damaged, Writer, read_table, table_writer

Row = dict[str, Any]
COUNTERPART = {"new": "pre", "joined": "post"}  # the view of participants that a view of new clients compares with
FILES = ("rounds.parquet", "clients.parquet", "reports.parquet", "timings.parquet")


class Records:
    """Grows by one round at a time; kept as Parquet files in the run directory."""

    def __init__(self, rounds: list[Row] | None = None, timings: list[Row] | None = None) -> None:
        self.rounds = rounds or []
        self.timings = timings or []
        self._clients: list[pa.Table] = []
        self._reports: list[pa.Table] = []

    def add(self, done: Round, planning: float = 0.0) -> Row | None:
        """Record a round, and the seconds of planning before it; returns its row if it was evaluated."""
        seconds = {"plan_seconds": planning, "train_seconds": done.train_seconds, "eval_seconds": done.eval_seconds}
        computed = {name: getattr(done, name) for name in ("participation", "gradients", "samples")}
        self.timings.append({"round": done.t + 1, **seconds, **computed})
        self._reports.append(report_table(done))
        if not done.scores:
            return None
        self.rounds.append(round_row(done))
        self._clients.append(client_table(done))
        return self.rounds[-1]

    def drop_unevaluated(self, evaluated: Callable[[int], bool]) -> None:
        """Forget evaluations of rounds for which `evaluated` is False: the last one of a run that is given more rounds
        may not be one of them."""
        rows = [row for row in self.rounds if evaluated(row["round"])]
        if len(rows) < len(self.rounds):
            self.rounds = rows
            self._clients = [self.clients.filter(pc.field("round").isin([row["round"] for row in rows]))]

    @property
    def clients(self) -> pa.Table:
        """One row per client and evaluated round."""
        self._clients = _joined(self._clients)
        return self._clients[0]

    @property
    def reports(self) -> pa.Table:
        """One row per round and client of its cohort, and one of the server, which is client -1."""
        self._reports = _joined(self._reports)
        return self._reports[0]

    def files(self) -> dict[str, Writer]:
        """The files of all tables."""
        tables = (to_table(self.rounds), self.clients, self.reports, to_table(self.timings))
        # in one chunk, because bytes must not depend on how often a run was resumed
        return {name: table_writer(table.combine_chunks()) for name, table in zip(FILES, tables, strict=True)}

    @staticmethod
    def load(folder: Path, up_to: int | None = None) -> Records:
        """Read the tables, up to a round; later rows belong to rounds that will run again."""
        tables = [read_table(folder / name) for name in FILES]
        if up_to is not None:
            tables = [t.filter(pc.field("round") <= up_to) for t in tables]
        rounds, clients, reports, timings = tables
        if up_to is not None and len(timings) != up_to:
            raise Damaged(f"timings.parquet has {len(timings)} rounds instead of {up_to}")
        records = Records(rounds.to_pylist(), timings.to_pylist())
        records._clients, records._reports = [clients.combine_chunks()], [reports.combine_chunks()]
        return records


NOTHING = pa.schema([("round", pa.int64())]).empty_table()  # `pa.array` would import pandas, if that is there


def _joined(tables: list[pa.Table]) -> list[pa.Table]:
    if not tables:
        return [NOTHING]
    return tables if len(tables) == 1 else [pa.concat_tables(tables, promote_options="default")]


def to_table(rows: list[Row]) -> pa.Table:
    """Rows of possibly different columns as a table."""
    if not rows:
        return NOTHING
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def round_row(done: Round) -> Row:
    """Metrics of a round. Columns are `<view>_<metric>` on test data and `<view>_val_<metric>` on validation data."""
    row: Row = {"round": done.t + 1, "cohort": len(done.cohort)}
    row |= {"bytes_down": done.bytes_down, "bytes_up": done.bytes_up}
    for view, splits in done.scores.items():
        row |= {f"{view}_{name}": value for name, value in _summary(splits["test"], done).items()}
        row |= {f"{view}_val_{name}": value for name, value in _summary(splits["val"], done).items()}
        if "train" in splits:
            found = summarize(splits["train"], done.kind)
            row |= {f"{view}_train_loss": found["loss"]} if "loss" in found else {}  # it may be withheld
    mean = f"{column_name(done.metric.name if done.metric else basic_metric(done.kind))}_mean"
    for view, scores in done.unseen_scores.items():
        row |= {f"{view}_{name}": value for name, value in _summary(scores, done).items()}
        if {f"{view}_{mean}", f"{COUNTERPART[view]}_{mean}"} <= row.keys():
            row[f"{view}_gap"] = row[f"{view}_{mean}"] - row[f"{COUNTERPART[view]}_{mean}"]
    if done.server is not None:
        row[f"{_basic_column(done)}_global"] = float(basic_values(done.server[None], done.kind)[0])
    return row


def _basic_column(done: Round) -> str:
    return column_name(basic_metric(done.kind))


def _summary(scores: np.ndarray, done: Round) -> dict[str, float]:
    """Accuracy (or RMSE) and loss over clients and, in columns such as `auprc_mean`, the metric of the run."""
    found = summarize(scores, done.kind)
    if done.metric is not None:
        over = over_clients(scores[:, 3], scores[:, 2], done.metric.higher_is_better)
        found |= {f"{done.metric.name}_{name}": value for name, value in over.items()}
    return found


def client_table(done: Round) -> pa.Table:
    """Accuracy (or RMSE), and the metric of the run, of every evaluated client in a round."""
    ids = done.eval_client_ids
    columns: dict[str, np.ndarray] = {
        "round": np.full(len(ids), done.t + 1),
        "client": ids,
        "sampled": np.isin(ids, done.cohort),
    }
    for view, splits in done.scores.items():
        for name, split in ((view, "test"), (f"{view}_val", "val")):
            columns[f"{name}_{_basic_column(done)}"] = basic_values(splits[split], done.kind)
            if done.metric is not None:
                columns[f"{name}_{done.metric.name}"] = splits[split][:, 3]
    if not len(done.unseen):
        return pa.table(columns)
    others = {"round": np.full(len(done.unseen), done.t + 1), "client": done.unseen}
    others["sampled"] = np.zeros(len(done.unseen), dtype=bool)
    for view, scores in done.unseen_scores.items():
        others[f"{view}_{_basic_column(done)}"] = basic_values(scores, done.kind)
        if done.metric is not None:
            others[f"{view}_{done.metric.name}"] = scores[:, 3]
    return pa.concat_tables([pa.table(columns), pa.table(others)], promote_options="default")


VECTOR = pa.list_(pa.field("element", pa.float64()))  # the field name that Parquet gives when it is read again


def report_table(done: Round) -> pa.Table:
    """What the method reports of a round: for every client of the cohort, and for the server."""
    of_clients, of_server = done.reports, done.server_report
    clients = done.cohort.tolist() if of_clients else []
    last = [None] if of_server else []
    columns = {name: pa.array([*v, *last], VECTOR if v.ndim > 1 else pa.float64()) for name, v in of_clients.items()}
    columns |= {name: pa.array([*[None] * len(clients), value], pa.float64()) for name, value in of_server.items()}
    clients += [-1] if of_server else []
    rounds = pa.array([done.t + 1] * len(clients), pa.int64())
    return pa.table({"round": rounds, "client": pa.array(clients, pa.int64()), **columns})
