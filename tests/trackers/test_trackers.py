"""Runs that were logged by each tracker are read back by the tracker's own means."""

import json
import logging
import sys
import time

import pytest
from helpers import Crash, CrashAt
from sentences import user_error

import fedloom
from fedloom.trackers.tracker import Tracker, numbers

SMALL = {"dataset": "synthetic", "clients": 4, "per_client": 40, "rounds": 3, "engine": "reference"}
METRIC = "pre_acc_mean"


def curve(result, name=METRIC):
    return [(row["round"], row[name]) for row in result.rounds]


def read_tensorboard(folder):
    """Scalars of all event files of one run, by name, and its settings."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    scalars = {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}
    return scalars, found.Tags()["tensors"]


def test_tensorboard(tmp_path):
    tracker = fedloom.TensorBoard(tmp_path / "logs")
    result = fedloom.run("ditto", out=tmp_path / "mine", callbacks=[tracker], **SMALL)
    scalars, tensors = read_tensorboard(tmp_path / "logs" / "mine")
    assert scalars[METRIC] == [(t, pytest.approx(value)) for t, value in curve(result)]
    assert [t for t, _ in scalars["samples"]] == [1, 2, 3]
    best = result.best_on_validation()[METRIC]
    assert scalars[f"best_{METRIC}"] == [(0, pytest.approx(best))]
    assert tensors == ["settings/text_summary"]


def test_tensorboard_of_a_resumed_run_has_every_round_once(tmp_path):
    tracker, settings = fedloom.TensorBoard(tmp_path / "logs"), {**SMALL, "rounds": 5, "checkpoint_every": 2}
    with pytest.raises(Crash):
        fedloom.run("ditto", out=tmp_path / "mine", callbacks=[tracker, CrashAt("ditto", 3)], **settings)
    again = fedloom.TensorBoard(tmp_path / "logs")
    fedloom.run("ditto", out=tmp_path / "mine", resume=True, callbacks=[again], **settings)
    scalars, _ = read_tensorboard(tmp_path / "logs" / "mine")
    assert [t for t, _ in scalars[METRIC]] == [1, 2, 3, 4, 5]


def test_the_runs_of_a_comparison_have_folders_of_their_own(tmp_path):
    tracker = fedloom.TensorBoard(tmp_path / "logs")
    fedloom.compare(["fedavg"], seeds=2, out=tmp_path / "mine", callbacks=[tracker], **SMALL)
    folders = {str(p.parent.relative_to(tmp_path / "logs")) for p in (tmp_path / "logs").rglob("events*")}
    assert folders == {f"mine/{method}/seed-{seed}" for method in ("local", "fedavg") for seed in (0, 1)}


@pytest.fixture
def mlflow_uri(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "mlflow")
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_mlflow(tmp_path, mlflow_uri):
    """Also of a run that is resumed: it is one run of the experiment."""
    from mlflow import MlflowClient

    def tracker():
        return fedloom.MLflow("mine", mlflow_uri)

    settings = {**SMALL, "checkpoint_every": 1}
    with pytest.raises(Crash):
        fedloom.run("ditto", out=tmp_path / "run", lam=0.5, callbacks=[tracker(), CrashAt("ditto", 2)], **settings)
    result = fedloom.run("ditto", out=tmp_path / "run", resume=True, lam=0.5, callbacks=[tracker()], **settings)
    client = MlflowClient(mlflow_uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["algorithm.lam"] == "0.5"
    logged = {m.step: m.value for m in client.get_metric_history(run.info.run_id, METRIC)}
    assert logged == pytest.approx(dict(curve(result)))
    assert run.data.metrics[f"best_{METRIC}"] == pytest.approx(result.best_on_validation()[METRIC])


def records(data):
    """The records of a file of Weights & Biases, in LevelDB's format of logs: after a header of 7 bytes, blocks of
    32 KiB with pieces of records. A piece has a checksum (4 bytes), a length (2), a type (1: whole, 2: first,
    3: middle, 4: last), and its contents."""
    block, at, record = 1 << 15, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # too little for another piece: the rest of the block is empty
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_wandb(file):
    """Configuration, rows and summary of an offline run."""
    from wandb.proto import wandb_internal_pb2

    def values(items):
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}

    config, rows, summary = {}, [], {}
    complete = "exit"  # the last record, which another process may write a little later
    for _ in range(100):
        kinds = [wandb_internal_pb2.Record.FromString(data) for data in records(file.read_bytes())]
        if any(record.WhichOneof("record_type") == complete for record in kinds):
            break
        time.sleep(0.3)
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        config |= values(record.run.config.update) | values(record.config.update)
        rows += [values(record.history.item)] if record.history.item else []
        summary |= values(record.summary.update)
    return config, rows, summary


def test_wandb_offline(tmp_path):
    tracker = fedloom.WandB(folder=tmp_path)
    result = fedloom.run("ditto", out=tmp_path / "run", lam=0.5, callbacks=[tracker], **SMALL)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    config, rows, summary = read_wandb(file)
    assert config["algorithm.lam"] == 0.5
    assert [(row["_step"], row[METRIC]) for row in rows] == [(t, pytest.approx(value)) for t, value in curve(result)]
    assert summary[f"best_{METRIC}"] == pytest.approx(result.best_on_validation()[METRIC])


@pytest.mark.parametrize(
    ("tracker", "library", "extra"),
    [
        ("TensorBoard", "torch.utils.tensorboard", "tensorboard"),
        ("MLflow", "mlflow", "mlflow"),
        ("WandB", "wandb", "wandb"),
    ],
)
def test_a_tracker_whose_library_is_missing_says_what_to_install(tracker, library, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with user_error(f"{tracker} needs the package", f"pip install 'fedloom[{extra}]'"):
        getattr(fedloom, tracker)()


def test_a_tracker_that_cannot_start_is_one_sentence(mlflow_uri):
    with user_error("MLflow cannot log this run", "nosuch"):
        fedloom.run("fedavg", callbacks=[fedloom.MLflow(tracking_uri="nosuch://server")], **SMALL)


def test_a_tracker_that_fails_later_does_not_end_the_run(caplog):
    class Fails(Tracker):
        library = "json"

        def begin(self, run):
            return []

        def log(self, record, numbers, step):
            record.append(step)
            if step == 2:
                raise ConnectionError("the server is gone\nwith details")

        def finish(self, record, best):
            raise AssertionError

    result = fedloom.run("fedavg", callbacks=[Fails()], **SMALL)
    assert result.last()["round"] == 3
    assert caplog.text.count("Fails has stopped logging fedavg, seed 0, from round 2 on: the server is gone") == 1


def test_only_finite_numbers_are_logged():
    row = {"round": 3, "a": 1, "b": 2.5, "c": None, "d": float("nan"), "e": "text", "f": True, "g": float("inf")}
    assert numbers(row) == {"a": 1.0, "b": 2.5}
