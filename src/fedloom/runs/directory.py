"""A run directory: the unit that users keep, compare, cite and continue.

config.yaml         the resolved configuration; `fedloom run --config` repeats the run
plan.json           the execution plan, used again on resume, and which custom kernels were used
partition.parquet   who owns which samples: one row per client, and the server's as client -1
names.json          names of clients and classes, where the data have them
rounds.parquet      metrics per evaluated round
clients.parquet     accuracy per client and evaluated round
reports.parquet     numbers that the method reports, per round and client of its cohort; the server is client -1
timings.parquet     seconds per round; besides it only plan.json (timings behind the choice), environment.json, run.log
                    and what checkpoints/ and store/ hold depend on the clock
checkpoints/        the two newest states
store/              private state of clients, where it is kept on disk
final/              server.safetensors, clients.safetensors (one row per client)
summary.json        the results; written when the run is finished
environment.json    versions and hardware, for every start
manifest.json       checksums of the files above
run.log
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedloom.config.files import ConfigDict, read_config, to_yaml, written_format
from fedloom.core.errors import UserError, oserror_as_user_error
from fedloom.core.federation import Federation
from fedloom.core.tree import Tree, leaves
from fedloom.engine.plan import Plan
from fedloom.engine.simulation import Simulation
from fedloom.nn.kernels.dispatch import decisions
from fedloom.runs.checkpoints import Checkpoints
from fedloom.runs.environment import environment
from fedloom.runs.folders import (
    check_empty,
    check_same,
    exclusive_lock,
    is_empty,
    log_only_to,
    log_to_file,
    open_manifest,
    reported_damage,
)
from fedloom.runs.partition import partition_table
from fedloom.runs.records import FILES, Records
from fedloom.storage.files import (
    Writer,
    file_checksum,
    json_writer,
    make_folder,
    read_json,
    read_stacked,
    read_table,
    read_tensors,
    remove_temporary,
    stacked_writer,
    table_writer,
    tensors_writer,
    text_writer,
)
from fedloom.storage.manifest import Manifest
from fedloom.storage.trees import named, nested

log = logging.getLogger("fedloom")

KERNELS = "kernels"  # key in plan.json
CONFIG = "config.yaml"
FINAL = ("final/server.safetensors", "final/clients.safetensors")
VERIFIED = (
    CONFIG, "plan.json", "partition.parquet", "names.json", *FILES, "environment.json", *FINAL, "summary.json",
)  # fmt: skip


class RunDirectory:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path, checkpoint_every: int | None = None) -> None:
        """`checkpoint_every` is a number of rounds; without it, checkpoints are made by time."""
        self.path = path
        self.store = path / "store"
        self.checkpoints = Checkpoints(path / "checkpoints", checkpoint_every)
        self.recorded: dict[str, Any] | None = None  # contents of plan.json
        self.manifest = Manifest(path)

    # -- opening ------------------------------------------------------------------------------------------------

    def config(self) -> ConfigDict:
        """The configuration of the run that is here, after its files were verified."""
        self.manifest = open_manifest(self.path, CONFIG, skip="final")
        self.checkpoints.run = file_checksum(self.path / CONFIG)
        return read_config(self.path / CONFIG)

    def check(self, config: ConfigDict, resume: bool) -> bool:
        """Raise UserError unless a run with this configuration may start (or continue) here; returns whether it is
        already finished."""
        if not resume:
            check_empty(self.path)
            return False
        if is_empty(self.path):
            return False
        check_same(self.config(), config, self.path)
        return self.finished

    @contextmanager
    def claimed(self, config: ConfigDict, resume: bool) -> Iterator[None]:
        """Lock the directory for this process, write config.yaml, and send messages to run.log."""
        with oserror_as_user_error(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self.path):
            self.check(config, resume)  # another process may have been faster
            with log_to_file(self.path / "run.log"):
                if not (self.path / CONFIG).exists():
                    self.manifest = Manifest(self.path)
                    self.manifest.write({CONFIG: text_writer(to_yaml(config))})
                self.checkpoints.run = file_checksum(self.path / CONFIG)
                remove_temporary(self.path)
                for folder in (self.checkpoints.folder, self.path / "final"):
                    make_folder(folder)
                    remove_temporary(folder)
                try:
                    yield
                except UserError as error:
                    log.error("%s", error)
                    raise

    @property
    def unverified(self) -> bool:
        """True if the run was started by a version that wrote no checksums."""
        return written_format(self.path / CONFIG) < 2

    def _warn_unverified(self) -> None:
        log.warning("%s was written by an older FedLoom; its files cannot be verified.", self.path)

    # -- the start of a run --------------------------------------------------------------------------------------

    def keep_partition(self, data: Federation) -> str:
        """Write who owns which samples, or verify that it has not changed. Returns the partition's digest."""
        path, digest, samples = self.path / "partition.parquet", data.digest(), data.fingerprint()
        if path.exists():
            notes = self._notes()
            if notes != {"partition": digest, "samples": samples}:
                what = "partition" if notes.get("samples") == samples else "data"
                raise UserError(f"The {what} of {self.path} is not what the run was started with; start a new run.")
        else:
            table = partition_table(data).replace_schema_metadata({"partition": digest, "samples": samples})
            files = {path.name: table_writer(table)}
            if data.class_names or data.client_names:
                names = {"clients": list(data.client_names), "classes": list(data.class_names)}
                files = {"names.json": json_writer(names), **files}
            self.manifest.write(files)
        return digest

    def _notes(self) -> dict[str, str]:
        with reported_damage(self.path):
            found = read_table(self.path / "partition.parquet").schema.metadata or {}
        return {key.decode(): value.decode() for key, value in found.items()}

    def plan(self, device: torch.device | None = None) -> Plan | None:
        """The execution plan that was made when the run started, if it got so far."""
        path = self.path / "plan.json"
        if not path.exists():
            if self.checkpoints.found():
                raise UserError(f"{self.path} is damaged: plan.json is missing.")
            return None
        with reported_damage(self.path):
            found = read_json(path)
        try:
            plan = Plan(**{name: value for name, value in found.items() if name != KERNELS})
        except (AttributeError, TypeError):
            raise UserError(f"{self.path} is damaged: plan.json is not an execution plan.") from None
        if device is not None and plan.device != device.type:
            raise UserError(f"{self.path} was started on {plan.device} and cannot go on with {device.type}.")
        return plan

    def begin(self, run: Simulation, plan: Plan, up_to: int | None = None) -> Records:
        """Set the run to its newest checkpoint, if possible to none after round `up_to`; returns its records so far."""
        with log_only_to(self.path):
            return self._begin(run, plan, up_to)

    def _begin(self, run: Simulation, plan: Plan, up_to: int | None) -> Records:
        records = Records()
        starts = self.path / "environment.json"
        if not self.manifest.exists():
            self._warn_unverified()
            self.manifest.adopt(VERIFIED)
        with reported_damage(self.path):
            before = read_json(starts, "starts") if starts.exists() else []
            self.checkpoints.restore(run, up_to)
            if run.t:
                records = Records.load(self.path, run.t)
                log.info("Going on after round %d.", run.t)
        started = {"starts": [*before, environment(run.task.data.device)]}
        self.manifest.write({starts.name: json_writer(started), **self._changed_plan(run, plan)})
        return records

    def _changed_plan(self, run: Simulation, plan: Plan) -> dict[str, Writer]:
        """plan.json, if it has changed: a plan changes when memory is short, and kernels are chosen while it runs."""
        found = {**plan.record(), KERNELS: decisions(run.task.data.device)}
        if found == self.recorded:
            return {}
        self.recorded = found
        return {"plan.json": json_writer(found)}

    # -- while it runs, and at its end ---------------------------------------------------------------------------

    def save_round(self, run: Simulation, plan: Plan, records: Records) -> None:
        """Make a checkpoint."""
        files = self._changed_plan(run, plan) | records.files()
        with log_only_to(self.path):
            self.checkpoints.save(run, before=lambda: self.manifest.write(files))

    def finish(self, run: Simulation, summary: Mapping[str, Any]) -> None:
        """Write the final models and the summary."""
        store, (server, clients) = run.store, FINAL
        rows = stacked_writer(named(store.like["own"]), len(store), lambda ids: leaves(store.read(ids)["own"]))
        self.manifest.write({server: tensors_writer(named(run.server), {"round": run.t}), clients: rows})
        checksums = {name: self.manifest.files[name][-1] for name in FINAL}
        self.manifest.write({"summary.json": json_writer({**summary, "files": checksums})})
        self.manifest.save()  # which now has the checksums of the last files only
        with log_only_to(self.path):
            log.info("Finished.")

    @property
    def finished(self) -> bool:
        """True if the run is complete."""
        return (self.path / "summary.json").exists()

    # -- reading -------------------------------------------------------------------------------------------------

    def contents(self) -> tuple[ConfigDict, dict[str, Any], str, Records]:
        """Configuration, plan, digest of the partition, records."""
        config, plan = self.config(), self.plan()
        if not self.manifest.exists():
            self._warn_unverified()
        if plan is None or not (self.path / "rounds.parquet").exists():
            raise UserError(f"{self.path} has no results yet; continue the run with --resume {self.path}.")
        with reported_damage(self.path):
            records = Records.load(self.path)
        if not records.rounds:
            raise UserError(f"{self.path} has no evaluated round yet; continue the run with --resume {self.path}.")
        return config, plan.record(), self._notes()["partition"], records

    def final(self) -> tuple[Tree, Tree]:
        """State of the server, and private state of the clients (one row each), at the end of the run."""
        if not self.finished:
            raise UserError(f"{self.path} is not finished; continue the run with --resume {self.path}.")
        with reported_damage(self.path):
            if self.manifest.exists():
                self.manifest.verify(FINAL)
            server, _ = read_tensors(self.path / FINAL[0])
            return nested(server), nested(read_stacked(self.path / FINAL[1]))
