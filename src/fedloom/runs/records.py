"""The records of a run: a row per evaluated round, a row per client and evaluated round, and apart from both, times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedloom.engines.rounds import Round
from fedloom.metrics.scores import accuracies, summarize
from fedloom.runs.files import Damaged, read_table, write_table

Row = dict[str, Any]
FILES = ("rounds.parquet", "clients.parquet", "timings.parquet")


class Records:
    def __init__(self, rounds: list[Row] | None = None, timings: list[Row] | None = None) -> None:
        self.rounds = rounds or []
        self.timings = timings or []
        self._clients: list[pa.Table] = []

    def add(self, done: Round) -> Row | None:
        """The row of the round, if it was evaluated."""
        self.timings.append(
            {"round": done.t + 1, "train_seconds": done.train_seconds, "eval_seconds": done.eval_seconds}
        )
        if not done.scores:
            return None
        self.rounds.append(round_row(done))
        self._clients.append(client_table(done))
        return self.rounds[-1]

    @property
    def clients(self) -> pa.Table:
        if not self._clients:
            return pa.table({})
        if len(self._clients) > 1:
            self._clients = [pa.concat_tables(self._clients)]
        return self._clients[0]

    def save(self, folder: Path) -> None:
        for name, table in zip(FILES, (to_table(self.rounds), self.clients, to_table(self.timings)), strict=True):
            write_table(folder / name, table.combine_chunks())  # the layout must not tell how often a run was resumed

    @staticmethod
    def load(folder: Path, up_to: int | None = None) -> Records:
        """What was recorded, up to a round; later rows belong to rounds that will run again."""
        rounds, clients, timings = (read_table(folder / name) for name in FILES)
        if up_to is not None:
            rounds, clients, timings = (
                t.filter(pa.compute.field("round") <= up_to) for t in (rounds, clients, timings)
            )
            if len(timings) != up_to:
                raise Damaged(f"timings.parquet has {len(timings)} rounds instead of {up_to}")
        records = Records(rounds.to_pylist(), timings.to_pylist())
        records._clients = [clients.combine_chunks()]
        return records


def to_table(rows: list[Row]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def round_row(done: Round) -> Row:
    """Metrics of a round. Columns are `<view>_<metric>` on test data and `<view>_val_<metric>` on validation data."""
    row: Row = {"round": done.t + 1, "cohort": len(done.cohort)}
    row |= {"bytes_down": done.bytes_down, "bytes_up": done.bytes_up}
    for view, splits in done.scores.items():
        row |= {f"{view}_{name}": value for name, value in summarize(splits["test"]).items()}
        row |= {f"{view}_val_{name}": value for name, value in summarize(splits["val"]).items()}
        if "train" in splits:
            row[f"{view}_train_loss"] = summarize(splits["train"])["loss"]
    if done.server is not None:
        row["acc_global"] = 100 * float(done.server[0] / done.server[2])
    return row


def client_table(done: Round) -> pa.Table:
    ids = done.evaluated
    columns: dict[str, np.ndarray] = {
        "round": np.full(len(ids), done.t + 1),
        "client": ids,
        "sampled": np.isin(ids, done.cohort),
    }
    for view, splits in done.scores.items():
        columns[f"{view}_acc"] = accuracies(splits["test"])
        columns[f"{view}_val_acc"] = accuracies(splits["val"])
    return pa.table(columns)
