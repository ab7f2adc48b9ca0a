"""A run directory: the unit that users keep, compare, cite and continue.

config.yaml         the resolved configuration; `fedloom run --config` repeats the run
plan.json           the execution plan as it is carried out now, used again on resume
partition.parquet   whose samples are whose: a row per client, and the server's as client -1
names.json          what the clients and classes are called, where the data say so
rounds.parquet      metrics per evaluated round
clients.parquet     accuracy per client and evaluated round
timings.parquet     seconds per round; nothing else in the directory depends on the clock but environment and log
checkpoints/        the two newest states
store/              private state of clients, where it is kept on disk
final/              server.safetensors, clients.safetensors (a row per client)
summary.json        what the run found; there when it is finished
environment.json    versions and hardware, for every start
run.log
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from filelock import FileLock, Timeout

from fedloom.config import Request, difference, read_request, to_yaml
from fedloom.core.errors import UserError, told
from fedloom.core.federation import Federation
from fedloom.core.files import (
    TEMPORARY,
    Damaged,
    file_checksum,
    read_json,
    read_stacked,
    read_table,
    read_tensors,
    write_json,
    write_stacked,
    write_table,
    write_tensors,
    write_text,
)
from fedloom.core.tree import Tree, leaves
from fedloom.engines.plan import Plan
from fedloom.engines.rounds import Rounds
from fedloom.runs.checkpoints import Checkpoints
from fedloom.runs.environment import environment
from fedloom.runs.records import Records
from fedloom.runs.trees import named, nested

log = logging.getLogger("fedloom")

LOCK = ".lock"
_speaker: ContextVar[Path | None] = ContextVar("speaker", default=None)
FINAL = ("server.safetensors", "clients.safetensors")


class Directory:
    def __init__(self, path: Path, checkpoint_every: int | None = None) -> None:
        self.path = path
        self.store = path / "store"
        self.checkpoints = Checkpoints(path / "checkpoints", checkpoint_every)
        self.recorded: Plan | None = None

    # -- opening ------------------------------------------------------------------------------------------------

    def config(self) -> Request:
        """The configuration of the run that is here."""
        check_kind(self.path, "config.yaml")
        return read_request(self.path / "config.yaml")

    def check(self, config: Request, resume: bool) -> bool:
        """May a run with this configuration start (or go on) here? Returns whether it is finished already."""
        if not resume:
            check_empty(self.path)
            return False
        if unused(self.path):
            return False
        check_same(self.config(), config, self.path)
        return self.finished

    @contextmanager
    def claimed(self, config: Request, resume: bool) -> Iterator[None]:
        """For this process alone, with its messages in run.log."""
        with told(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with alone(self.path):
            self.check(config, resume)  # another process may have been faster
            with _logged(self.path / "run.log"):
                if not (self.path / "config.yaml").exists():
                    write_text(self.path / "config.yaml", to_yaml(config))
                for folder in (self.checkpoints.folder, self.path / "final"):
                    with told(folder):
                        folder.mkdir(exist_ok=True)
                for file in self.path.rglob(f".*{TEMPORARY}"):  # left by a kill
                    file.unlink(missing_ok=True)
                try:
                    yield
                except UserError as error:
                    log.error("%s", error)
                    raise

    # -- the start of a run --------------------------------------------------------------------------------------

    def keep_partition(self, data: Federation) -> str:
        """Saves whose samples are whose, or sees that they are what they were. Returns the partition's digest."""
        path, digest, samples = self.path / "partition.parquet", data.digest(), data.fingerprint()
        if path.exists():
            notes = self._notes()
            if notes != {"partition": digest, "samples": samples}:
                what = "partition" if notes.get("samples") == samples else "data"
                raise UserError(f"The {what} of {self.path} is not what the run was started with; start a new run.")
        else:
            table = partition_table(data)
            if data.class_names or data.client_names:
                names = {"clients": list(data.client_names), "classes": list(data.class_names)}
                write_json(self.path / "names.json", names)
            write_table(path, table.replace_schema_metadata({"partition": digest, "samples": samples}))
        return digest

    def _notes(self) -> dict[str, str]:
        with self._undamaged():
            found = read_table(self.path / "partition.parquet").schema.metadata or {}
        return {key.decode(): value.decode() for key, value in found.items()}

    def plan(self, device: torch.device | None = None) -> Plan | None:
        """The execution plan that was made when the run started, if it got so far."""
        path = self.path / "plan.json"
        if not path.exists():
            if self.checkpoints.found():
                raise UserError(f"{self.path} is damaged: plan.json is missing.")
            return None
        with self._undamaged():
            found = read_json(path)
        try:
            plan = Plan(**found)
        except TypeError:
            raise UserError(f"{self.path} is damaged: plan.json is not an execution plan.") from None
        if device is not None and plan.device != device.type:
            raise UserError(f"{self.path} was started on {plan.device} and cannot go on with {device.type}.")
        return plan

    def begin(self, rounds: Rounds, up_to: int | None = None) -> Records:
        """Brings the run to where it was, but to no later round than `up_to` if it can, and says how far that is by its
        records."""
        with self._speaking():
            return self._begin(rounds, up_to)

    def _begin(self, rounds: Rounds, up_to: int | None) -> Records:
        records = Records()
        starts = self.path / "environment.json"
        with self._undamaged():
            before = read_json(starts, "starts") if starts.exists() else []
            self.checkpoints.restore(rounds, up_to)
            if rounds.t:
                records = Records.load(self.path, rounds.t)
                log.info("Going on after round %d.", rounds.t)
        write_json(starts, {"starts": [*before, environment(rounds.task.data.device)]})
        self._keep_plan(rounds)
        return records

    def _keep_plan(self, rounds: Rounds) -> None:
        """It changes when memory is short."""
        if rounds.plan != self.recorded:
            write_json(self.path / "plan.json", rounds.plan.record())
            self.recorded = rounds.plan

    # -- while it runs, and at its end ---------------------------------------------------------------------------

    def keep_round(self, rounds: Rounds, records: Records) -> None:
        self._keep_plan(rounds)
        with self._speaking():
            self.checkpoints.save(rounds, first=lambda: records.save(self.path))

    def finish(self, rounds: Rounds, summary: Mapping[str, Any]) -> None:
        server, clients = (self.path / "final" / name for name in FINAL)
        write_tensors(server, named(rounds.server), {"round": rounds.t})
        store = rounds.store
        write_stacked(clients, named(store.like["own"]), len(store), lambda ids: leaves(store.read(ids)["own"]))
        files = {str(file.relative_to(self.path)): file_checksum(file) for file in (server, clients)}
        write_json(self.path / "summary.json", {**summary, "files": files})
        with self._speaking():
            log.info("Finished.")

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """What is said here is for this run's log, not for those of other runs that go on with it."""
        token = _speaker.set(self.path)
        try:
            yield
        finally:
            _speaker.reset(token)

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").exists()

    # -- reading -------------------------------------------------------------------------------------------------

    def contents(self) -> tuple[Request, dict[str, Any], str, Records]:
        """Configuration, plan, digest of the partition, records."""
        config, plan = self.config(), self.plan()
        if plan is None or not (self.path / "rounds.parquet").exists():
            raise UserError(f"{self.path} has no results yet; continue the run with --resume {self.path}.")
        with self._undamaged():
            records = Records.load(self.path)
        if not records.rounds:
            raise UserError(f"{self.path} has no evaluated round yet; continue the run with --resume {self.path}.")
        return config, plan.record(), self._notes()["partition"], records

    def final(self) -> tuple[Tree, Tree]:
        """State of the server, and private state of the clients (a row each)."""
        if not self.finished:
            raise UserError(f"{self.path} is not finished; continue the run with --resume {self.path}.")
        with self._undamaged():
            server, _ = read_tensors(self.path / "final" / FINAL[0])
            return nested(server), nested(read_stacked(self.path / "final" / FINAL[1]))

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        try:
            yield
        except Damaged as error:
            raise UserError(f"{self.path} is damaged: {error}.") from None


KINDS = {  # by the file that says what was asked for: what it is, and the command that continues it
    "config.yaml": ("run directory", "a single run", "run"),
    "compare.yaml": ("comparison", "a comparison", "compare"),
    "sweep.yaml": ("sweep", "a sweep", "sweep"),
}


def check_kind(path: Path, file: str) -> None:
    """Is it the folder of a run, of a comparison, of a sweep?"""
    what = KINDS[file][0]
    if not path.is_dir():
        raise UserError(f"There is no {what} {path}.")
    if (path / file).exists():
        return
    for other, (_, name, command) in KINDS.items():
        if (path / other).exists():
            raise UserError(f"{path} holds {name}; use 'fedloom {command} --resume {path}'.")
    raise UserError(f"{path} is not a {what}: it has no {file}.")


def check_empty(path: Path) -> None:
    """A folder that does not exist yet, or has nothing in it."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; give a folder that does not exist yet.")
    with told(path):
        if any((path / name).exists() for name in KINDS):
            raise UserError(f"{path} is in use already; continue with --resume {path}, or give another folder.")
        if not unused(path):
            raise UserError(f"{path} is not empty; give a folder that does not exist yet.")


def check_same(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    changed = difference(old, new)
    if changed is not None:
        name, was, is_ = changed
        raise UserError(f"{path} was started with {name}={was}, not {is_}; resume it as it is, or start a new one.")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    lock = FileLock(path / LOCK)
    with told(path):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"{path} is in use by another process; wait for it or stop it.") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    with told(path):
        handler = logging.FileHandler(path, encoding="utf-8")
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # the log alone does not stop a run
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(lambda record: _speaker.get() in (None, path.parent))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()


def unused(path: Path) -> bool:
    """Is nothing there, but perhaps what a start leaves that was killed before it wrote anything?"""
    ours = ("run.log", LOCK)
    return not path.exists() or all(f.name in ours or f.name.endswith(TEMPORARY) for f in path.iterdir())


def partition_table(data: Federation) -> pa.Table:
    """A row per client: rows of the pool for training, validation and test, and how many samples of every class."""
    clients = np.arange(data.clients + data.held_out)
    splits = {name: (rows.starts, rows.flat.cpu().numpy()) for name, rows in data.splits.items()}
    labels = data.labels()
    if data.server is not None:
        clients = np.append(clients, -1)
        server = data.server.cpu().numpy()
        for name, (starts, flat) in splits.items():
            mine = server if name == "test" else server[:0]
            splits[name] = np.append(starts, starts[-1] + len(mine)), np.concatenate([flat, mine])
        labels = np.vstack([labels, data.labels_of(data.server)])
    columns = {
        name: pa.ListArray.from_arrays(pa.array(a.astype(np.int32)), pa.array(b)) for name, (a, b) in splits.items()
    }
    width = pa.array(np.arange(0, labels.size + 1, data.classes, dtype=np.int32))
    columns["labels"] = pa.ListArray.from_arrays(width, pa.array(labels.reshape(-1)))
    if data.held_out:
        columns["held_out"] = pa.array(clients >= data.clients)
    return pa.table({"client": clients, **columns})
