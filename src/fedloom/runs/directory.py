"""A run directory: the unit that users keep, compare, cite and continue.

config.yaml         the resolved configuration; `fedloom run --config` repeats the run
plan.json           the execution plan, used again on resume, and which custom kernels were used
partition.parquet   who owns which samples: one row per client, and the server's as client -1
names.json          names of clients and classes, where the data have them
preprocessing.json  how samples become the input of a model: columns, words, means, vocabulary, size of pictures
rounds.parquet      metrics per evaluated round
clients.parquet     accuracy per client and evaluated round
metrics.parquet     all metrics per client, of the models that are kept and, as round 0, of the majority baseline
reports.parquet     numbers that the method reports, per round and client of its cohort; the server is client -1
timings.parquet     seconds per round; besides it only plan.json (timings behind the choice), environment.json, run.log
                    and what checkpoints/ and store/ hold depend on the clock
checkpoints/        the two newest states of a run that is not finished
store/              private state of clients, where it is kept on disk, of a run that is not finished
final/              the complete state after the last round, and the models of the clients (see `runs.final`)
summary.json        the results; written when the run is finished
federation.json     the name of the run at its sites, of a run whose clients are at sites of their own
environment.json    versions and hardware, for every start
manifest.json       checksums of the files above
run.log
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from fedloom.config.files import ConfigDict, read_config, to_yaml, written_format
from fedloom.core.algorithm import Slot
from fedloom.core.errors import UserError, oserror_as_user_error
from fedloom.core.federation import SPLITS, Federation
from fedloom.core.preprocessing import Preprocessing
from fedloom.core.tree import Tree
from fedloom.engine.plan import Plan
from fedloom.engine.simulation import Simulation
from fedloom.nn.kernels.dispatch import decisions
from fedloom.runs import final
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
from fedloom.runs.models import ModelsFile
from fedloom.runs.partition import partition_table
from fedloom.runs.records import FILES, Records
from fedloom.storage.files import (
    Writer,
    file_checksum,
    json_writer,
    make_folder,
    read_json,
    read_table,
    read_tensors,
    remove_temporary,
    table_writer,
    text_writer,
)
from fedloom.storage.manifest import Manifest
from fedloom.storage.trees import below

log = logging.getLogger("fedloom")

KERNELS = "kernels"  # key in plan.json
PREPROCESSING = "preprocessing.json"
METRICS_FILE = "metrics.parquet"
CONFIG = "config.yaml"
AT_SITES = "federation.json"  # of a run whose clients are at sites: the name that it has there
VERIFIED = (
    CONFIG, "plan.json", "partition.parquet", "names.json", PREPROCESSING, *FILES, METRICS_FILE, "environment.json",
    *final.STATE, "summary.json",
)  # fmt: skip


class RunDirectory:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path, checkpoint_every: int | None = None) -> None:
        """`checkpoint_every` is a number of rounds; without it, checkpoints are made by time."""
        self.path = path
        self.store = path / "store"
        self.checkpoints = Checkpoints(path / "checkpoints", checkpoint_every)
        self.recorded: dict[str, Any] | None = None  # contents of plan.json
        self.rounds_before: int | None = None  # rounds that the run here was to have, before it is given more
        self.manifest = Manifest(path)

    # -- opening ------------------------------------------------------------------------------------------------

    def config(self) -> ConfigDict:
        """The configuration of the run that is here, after its files were verified."""
        self.manifest = open_manifest(self.path, CONFIG, skip=final.FOLDER)
        self._identify()
        return read_config(self.path / CONFIG)

    def _identify(self) -> None:
        """Tell checkpoints which run they belong to, whatever its number of rounds."""
        config = {k: v for k, v in read_config(self.path / CONFIG).items() if k != "rounds"}
        identity = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        self.checkpoints.run = identity, file_checksum(self.path / CONFIG)  # the second until format 2

    def check(self, config: ConfigDict, resume: bool) -> bool:
        """Raise UserError unless a run with this configuration may start (or continue) here; returns whether it is
        already finished."""
        if not resume:
            check_empty(self.path)
            return False
        if is_empty(self.path):
            return False
        old = self.config()
        check_same(old, config, self.path)
        self.rounds_before = old.get("rounds", config["rounds"])
        done = self.finished and self.rounds_before == config["rounds"]
        if done and final.is_complete(self.path) and (self.checkpoints.folder.exists() or self.store.exists()):
            with contextlib.suppress(UserError), exclusive_lock(self.path):
                self._remove_unfinished()  # it was killed when it had nothing else to do
        return done

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
                elif self.rounds_before != config["rounds"]:
                    self._grow(config["rounds"])
                self._identify()
                remove_temporary(self.path)
                for folder in (self.checkpoints.folder, self.path / "final"):
                    make_folder(folder)
                    remove_temporary(folder)
                try:
                    yield
                except UserError as error:
                    log.error("%s", error)
                    raise

    def _grow(self, rounds: int) -> None:
        """Give the run more rounds: from now on it is one that was started with them and is not finished."""
        log.info("The run gets %d rounds instead of %s.", rounds, self.rounds_before)
        if not self.checkpoints.found() and not final.is_complete(self.path):
            log.warning("%s has not kept the state after its last round, so it starts from the beginning.", self.path)
        if not self.manifest.exists():
            self.manifest.adopt(VERIFIED)
        self.manifest.remove(["summary.json"])
        self.manifest.write({CONFIG: text_writer(to_yaml({**read_config(self.path / CONFIG), "rounds": rounds}))})

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
            self.manifest.write({PREPROCESSING: json_writer(data.preprocessing_or_default().to_json()), **files})
        if not (self.path / PREPROCESSING).exists():  # a run of format 2
            self.manifest.write({PREPROCESSING: json_writer(data.preprocessing_or_default().to_json())})
        return digest

    def _notes(self) -> dict[str, str]:
        with reported_damage(self.path):
            found = read_table(self.path / "partition.parquet").schema.metadata or {}
        return {key.decode(): value.decode() for key, value in found.items()}

    def preprocessing(self) -> Preprocessing:
        """How samples become the input of the run's models."""
        if not (self.path / PREPROCESSING).exists():
            raise UserError(f"{self.path} was written by an older FedLoom, which kept no models; run it again.")
        with reported_damage(self.path):
            return Preprocessing.from_json(read_json(self.path / PREPROCESSING))

    def client_names(self) -> list[str]:
        """Names of the clients, those that are held out included; empty if they have none."""
        path = self.path / "names.json"
        with reported_damage(self.path):
            return list(read_json(path, "clients")) if path.exists() else []

    def clients(self) -> int:
        """Number of clients, those that are held out included."""
        with reported_damage(self.path):
            return int(np.sum(read_table(self.path / "partition.parquet")["client"].to_numpy() >= 0))

    def split_sizes(self) -> dict[str, list[int]]:
        """Numbers of samples of every participating client, by split."""
        with reported_damage(self.path):
            table = read_table(self.path / "partition.parquet")
        table = table.filter(pc.field("client") >= 0)
        if "held_out" in table.column_names:
            table = table.filter(~pc.field("held_out"))
        return {name: pc.list_value_length(table[name]).to_pylist() for name in SPLITS}

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
            self._restore(run, up_to)
            if run.t:
                records = Records.load(self.path, run.t)
                log.info("Going on after round %d.", run.t)
        started = {"starts": [*before, environment(run.task.data.device)]}
        self.manifest.write({starts.name: json_writer(started), **self._changed_plan(run, plan)})
        return records

    def restore(self, run: Simulation) -> None:
        """Set a run to its state after the last round."""
        with reported_damage(self.path):
            self._restore(run, None)
        if not run.t:
            raise UserError(f"{self.path} has no state to go on from; repeat the run, with keep=last.")

    def _restore(self, run: Simulation, up_to: int | None) -> None:
        """From the newest checkpoint or, of a finished run, from its final state."""
        self.checkpoints.restore(run, up_to)
        if not run.t and not self.checkpoints.found():
            if self.manifest.exists():
                self.manifest.verify(final.STATE)
            final.restore(self.path, run)

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

    def finish(self, files: Mapping[str, Writer], outdated: Iterable[str], summary: Mapping[str, Any]) -> None:
        """Write the final state, the models and the summary; then checkpoints are not needed any more."""
        self.manifest.write(files)
        self.manifest.remove(outdated)
        checksums = {name: self.manifest.files[name][-1] for name in sorted(self.manifest.files) if "/" in name}
        self.manifest.write({"summary.json": json_writer({**summary, "files": checksums})})
        self.manifest.save()  # which now has the checksums of the last files only
        self._remove_unfinished()
        with log_only_to(self.path):
            log.info("Finished.")

    def _remove_unfinished(self) -> None:
        """Remove what only a run needs that is not finished."""
        for folder, own in (
            (self.checkpoints.folder, self.checkpoints.found()),
            (self.store / "best", (self.store / "best").glob("*.npy")),
            (self.store, self.store.glob("*.npy")),
        ):
            with contextlib.suppress(OSError):  # what else lies there is left alone
                for file in own:
                    file.unlink()
                folder.rmdir()

    @property
    def finished(self) -> bool:
        """True if the run is complete."""
        return (self.path / "summary.json").exists()

    # -- reading -------------------------------------------------------------------------------------------------

    def why_stopped(self) -> str:
        """Why the run ended before its last round; "" if it did not."""
        if not self.finished:
            return ""
        with reported_damage(self.path):
            return str(read_json(self.path / "summary.json").get("stopped", ""))

    def metrics(self) -> pa.Table | None:
        """All metrics of the models that were kept; None if the run is not finished, or older."""
        path = self.path / METRICS_FILE
        with reported_damage(self.path):
            return read_table(path) if path.exists() else None

    def with_earlier_metrics(self, found: pa.Table, t: int) -> pa.Table:
        """The table with the rows of the best round, from when the run had fewer rounds than t."""
        before = self.metrics()
        models = self.path / final.models_name(True)
        if before is None or not models.exists():
            return found
        best = ModelsFile(models).round
        rows = before.filter(pc.field("round") == best)
        split = int(np.sum(found["round"].to_numpy() < t))
        parts = [found.slice(0, split), rows, found.slice(split)]
        return pa.concat_tables(parts, promote_options="default").combine_chunks()  # older rows may have fewer columns

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
        self._check_kept(final.SERVER)
        with reported_damage(self.path):
            self.manifest.verify(final.STATE if self.manifest.exists() else ())
            return final.read_state(self.path)

    def models(self, best: bool) -> ModelsFile:
        """The models of the clients after the last round, or the best one if that was another."""
        name = final.models_name(best)
        self._check_kept(name)
        with reported_damage(self.path):
            self.manifest.verify([name])
            return ModelsFile(self.path / name)

    def has_global_model(self) -> bool:
        """False if the method has none: there are models of clients, but no global one."""
        self._check_kept(final.models_name(False))
        return self._keeps(final.global_name(False))

    def global_model(self, best: bool) -> Slot:
        """The global model after the last round, or its best one if that was another."""
        name = final.global_name(best)
        self._check_kept(name)
        with reported_damage(self.path):
            self.manifest.verify([name])
            tensors, _ = read_tensors(self.path / name)
            return Slot(below(tensors, "params"), below(tensors, "buffers"), {})

    def _check_kept(self, name: str) -> None:
        if not self.finished:
            raise UserError(f"{self.path} is not finished; continue the run with --resume {self.path}.")
        if self.manifest.exists() and not self.manifest.files:
            self.config()
        if not self._keeps(name):
            raise UserError(f"{self.path} has no {name}, because {self._why_not_kept(name)}.")

    def _why_not_kept(self, name: str) -> str:
        if (self.path / AT_SITES).exists():
            return "the clients of this run are at sites of their own, which have their models"
        keep = read_config(self.path / CONFIG).get("keep")
        if keep == "last" and name in (final.models_name(True), final.global_name(True)):
            return "it was run with keep=last; ask for the last round (when=last), or run it again with keep=best"
        if keep == "none":
            return "it was run with keep=none; run it again with keep=best"
        return "an older FedLoom wrote it; run it again"

    def _keeps(self, name: str) -> bool:
        return (self.path / name).exists() or name in self.manifest.files
