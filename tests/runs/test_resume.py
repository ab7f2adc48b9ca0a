"""Checkpoints and resuming: for every method, with damaged files, after signals, by two processes at once."""

import functools
import json
import logging
import os
import shutil
import signal
import threading
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import RAGGED, Crash, SingleRun, crash_after, make_federation, make_task, method, methods, state_bytes
from kills import assert_same_files
from safetensors.torch import load_file
from sentences import user_error

import fedloom
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.tree import leaves
from fedloom.engine.executors.stacked_scoring import EVAL_ROWS
from fedloom.engine.graph.stacked_step import StackedStep
from fedloom.engine.plan import Plan
from fedloom.runs import checkpoints as checkpoints_
from fedloom.runs.checkpoints import Checkpoints
from fedloom.runs.interrupt import Stopped
from fedloom.storage.trees import named

SMALL = {"clients": 5, "plan": "stacked-eager", "checkpoint_every": 1, "batch_size": 100}


def everything(run: SingleRun) -> list[bytes]:
    """All that a checkpoint contains."""
    found = [v.numpy().tobytes() for v in leaves(run.stats)]
    return [
        *state_bytes(run),
        *found,
        run.store.trained.tobytes(),
        *(run.post[split].tobytes() for split in sorted(run.post)),
    ]


ONE_BY_ONE = Plan("per-client", scoring="per-client")
PLANS = [(name, Plan("stacked", chunk=3)) for name in methods()]
PLANS += [(name, ONE_BY_ONE) for name in ("ditto", "fedphp", "page", "pfedhn", "scaffold")]


@pytest.mark.parametrize(("name", "plan"), PLANS, ids=lambda value: value if isinstance(value, str) else value.mode)
def test_every_method_resumes_from_a_checkpoint_to_the_bit(name, plan, tmp_path):
    """With BatchNorm, dropout and (where the method allows it) momentum: all that a client or the server may keep. It
    does not depend on the executor, so a few methods stand for all with the other one."""
    settings = {} if name == "scaffold" else {"momentum": 0.5}
    alg = method(name)
    share = 0.5 if alg.partial else 1.0
    task = make_task(RAGGED[:8], norm=True, dropout=0.2, data={"server": 20}, participation=share, **settings)
    whole, second = (SingleRun(alg, task, 3, plan=plan) for _ in range(2))
    for evaluate in (False, True):
        whole.advance(evaluate)
    Checkpoints(tmp_path).save(whole)
    Checkpoints(tmp_path).restore(second)
    assert second.t == 2
    for evaluate in (False, True):
        a, b = whole.advance(evaluate), second.advance(evaluate)
    assert everything(second) == everything(whole)
    for view, splits in a.scores.items():
        for split, found in splits.items():
            assert found.tobytes() == b.scores[view][split].tobytes()


@pytest.fixture(scope="module")
def crashed_run(tmp_path_factory):
    """Copies a run of 5 rounds that crashed in the fourth to a folder; returns the folder of the same run without a
    crash."""

    @functools.cache
    def made(**settings):
        folder = tmp_path_factory.mktemp("made")
        fedloom.run("ditto", rounds=5, out=folder / "whole", **SMALL, **settings)
        with pytest.raises(Crash):
            fedloom.run("ditto", rounds=5, out=folder / "run", on_round=crash_after(4), **SMALL, **settings)
        return folder

    def make(folder, **settings):
        shutil.copytree(made(**settings) / "run", folder)
        return made(**settings) / "whole"

    return make


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_run_that_crashed_is_resumed(crashed_run, tmp_path):
    whole = crashed_run(tmp_path / "run")
    seen = []
    fedloom.run("ditto", rounds=5, out=tmp_path / "run", resume=True, on_round=lambda t, *_: seen.append(t), **SMALL)
    assert seen == [3, 4, 5]  # the round of the checkpoint, then those that were missing
    assert_same_files(tmp_path / "run", whole)


def test_a_resumed_run_stacks_as_many_clients_as_fitted_memory_before(tmp_path, monkeypatch, caplog):
    real = StackedStep.__call__

    def limited(self, *flat):
        if len(flat[0]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return real(self, *flat)

    monkeypatch.setattr(StackedStep, "__call__", limited)
    settings = {**SMALL, "rounds": 3}
    fedloom.run("fedavg", out=tmp_path / "whole", **settings)
    with pytest.raises(Crash):
        fedloom.run("fedavg", out=tmp_path / "run", on_round=crash_after(2), **settings)
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (kept["chunk"], kept["rows"]) == (2, EVAL_ROWS["cpu"] // 4)  # 5 clients, then 3, then 2: halved twice
    assert "Out of memory with 5 clients" in caplog.text
    caplog.clear()
    result = fedloom.run("fedavg", out=tmp_path / "run", resume=True, **settings)
    assert "Out of memory" not in caplog.text
    assert kept == {**result.plan, "kernels": {"all": "not used: they need a CUDA GPU"}}
    assert_same_files(tmp_path / "run", tmp_path / "whole")


class Twice(FedAvg):
    """Keeps its model under two names."""

    def init_server(self, task, key):
        params = task.init(key)
        return {"w": params, "same": params}

    def aggregate(self, task, server, up, info, t, key):
        params = super().aggregate(task, server, up, info, t, key)["w"]
        return {"w": params, "same": params}


def test_two_names_for_one_tensor_are_two_tensors_in_a_checkpoint(tmp_path):
    task = make_task(RAGGED)
    first, second = (SingleRun(Twice(), task, 0) for _ in range(2))
    first.advance()
    Checkpoints(tmp_path).save(first)
    Checkpoints(tmp_path).restore(second)
    assert everything(second) == everything(first)


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize(
    "how", [damage, lambda path: path.write_bytes(path.read_bytes()[:100]), lambda path: path.write_bytes(b"")]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(how, store, crashed_run, tmp_path, caplog):
    whole = crashed_run(tmp_path / "run", store=store)
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    how(newest)
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        fedloom.run("ditto", rounds=5, out=tmp_path / "run", resume=True, **{**SMALL, "store": store})
    assert f"{newest.name} is damaged" in caplog.text
    assert "the one before it is used" in caplog.text
    assert_same_files(tmp_path / "run", whole)
    assert newest.with_suffix(".damaged").exists()  # nothing is thrown away


def test_with_all_checkpoints_damaged_a_run_starts_from_the_beginning_and_says_so(crashed_run, tmp_path, caplog):
    whole = crashed_run(tmp_path / "run", store="disk")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        damage(path)
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        fedloom.run("ditto", rounds=5, out=tmp_path / "run", resume=True, **{**SMALL, "store": "disk"})
    assert "starts from the beginning" in caplog.text
    assert_same_files(tmp_path / "run", whole)


def test_the_number_of_threads_is_that_of_the_first_start(crashed_run, tmp_path):
    """Another number of threads would sum in another order."""
    threads = torch.get_num_threads()
    crashed_run(tmp_path / "run")
    seen = []
    torch.set_num_threads(threads + 1)
    try:
        again = lambda *_: seen.append(torch.get_num_threads())  # noqa: E731
        fedloom.run("ditto", rounds=5, out=tmp_path / "run", resume=True, on_round=again, **SMALL)
        assert set(seen) == {threads}
        assert torch.get_num_threads() == threads + 1  # of the process, as it was
    finally:
        torch.set_num_threads(threads)


def test_two_checkpoints_are_kept(tmp_path):
    with pytest.raises(Crash):
        fedloom.run("local", rounds=6, out=tmp_path / "run", on_round=crash_after(6), **SMALL)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["round-00000004.safetensors", "round-00000005.safetensors"]
    fedloom.run("local", rounds=6, out=tmp_path / "run", resume=True, **SMALL)
    assert not (tmp_path / "run" / "checkpoints").exists()  # a finished run needs none


def test_checkpoints_by_time_have_a_least_distance_and_take_a_limited_share_of_it(tmp_path, monkeypatch):
    """At least 10 s between them; after one that took 2 s, 2 / 0.05 = 40 s."""
    clock = [0.0]
    monkeypatch.setattr(checkpoints_, "MIN_SECONDS", 10.0)
    monkeypatch.setattr(checkpoints_, "MAX_OVERHEAD", 0.05)
    monkeypatch.setattr(checkpoints_.time, "perf_counter", lambda: clock[0])
    run = SingleRun(method("local"), make_task((3, 4)), 0, plan=Plan("per-client"))
    saver = Checkpoints(tmp_path)
    clock[0] = 9.9
    assert not saver.due(run)
    clock[0] = 10.0
    assert saver.due(run)
    saver.save(run)
    saver.cost = 2.0
    clock[0] = 49.9
    assert not saver.due(run)
    clock[0] = 50.0
    assert saver.due(run)


def test_a_checkpoint_is_due_when_many_rows_wait_for_it(tmp_path, monkeypatch):
    run = SingleRun(method("local"), make_task((3, 4)), 0, plan=Plan("per-client"))
    monkeypatch.setattr(run.store, "waiting_bytes", lambda: checkpoints_.MAX_WAITING_BYTES + 1)
    assert Checkpoints(tmp_path).due(run)


def test_a_finished_run_is_read_and_not_run_again(tmp_path):
    first = fedloom.run("fedrep", rounds=2, out=tmp_path / "run", **SMALL)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = fedloom.run("fedrep", rounds=2, out=tmp_path / "run", resume=True, **SMALL)
    assert again.rounds == first.rounds
    assert again.clients.equals(first.clients)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_a_directory_holds_what_it_says(tmp_path):
    folder = tmp_path / "run"
    result = fedloom.run("fedrep", rounds=3, eval_every=2, out=folder, server_share=0.1, **SMALL)
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json", "config.yaml", "plan.json", "partition.parquet", "rounds.parquet", "clients.parquet",
        "reports.parquet", "timings.parquet", "final", "summary.json", "environment.json", "run.log",
        "preprocessing.json", "metrics.parquet",
    }  # fmt: skip
    partition = pq.read_table(folder / "partition.parquet").to_pylist()
    assert [row["client"] for row in partition] == [0, 1, 2, 3, 4, -1]  # the last is the server's
    rows = [i for row in partition for split in ("train", "val", "test") for i in row[split]]
    assert len(rows) == len(set(rows)) == sum(sum(row["labels"]) for row in partition) == 1797
    assert pq.read_table(folder / "rounds.parquet")["round"].to_pylist() == [2, 3]
    assert pq.read_table(folder / "clients.parquet").num_rows == 2 * 5
    assert pq.read_table(folder / "timings.parquet")["round"].to_pylist() == [1, 2, 3]
    for name in ("rounds", "clients"):
        assert not [c for c in pq.read_table(folder / f"{name}.parquet").column_names if "second" in c]
    heads = load_file(folder / "final" / "clients.safetensors")
    shapes = {"own/h/head.bias": (5, 10), "own/h/head.weight": (5, 10, 64), "trained": (5,)}
    assert {k: tuple(v.shape) for k, v in heads.items()} == shapes
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["last"] == result.last()
    assert summary["best_on_validation"]["pre"] == result.best_on_validation()
    environment = json.loads((folder / "environment.json").read_text())["starts"][0]
    assert environment["packages"]["torch"] == version("torch")
    assert "Finished" in (folder / "run.log").read_text()


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_what_is_loaded_is_what_was_returned(store, tmp_path):
    given = fedloom.run("scaffold", rounds=2, **{**SMALL, "participation": 0.5})
    fedloom.run("scaffold", rounds=2, out=tmp_path / "run", store=store, **{**SMALL, "participation": 0.5})
    found = fedloom.load(tmp_path / "run")
    assert found.rounds == given.rounds
    assert found.clients.equals(given.clients)
    a, b = named([found.server, found.store]), named([given.server, given.store])
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_method_without_private_state_leaves_an_empty_file(tmp_path):
    fedloom.run("fedavg", rounds=1, out=tmp_path / "run", **SMALL)
    assert fedloom.load(tmp_path / "run").store == {}


def test_the_configuration_repeats_the_run(tmp_path):
    from fedloom.config.files import read_config
    from fedloom.config.resolve import resolve
    from fedloom.studies.execute import execute

    fedloom.run("ditto", rounds=2, out=tmp_path / "one", lam=0.3, beta=0.5, **SMALL)
    execute(resolve(read_config(tmp_path / "one" / "config.yaml")), out=tmp_path / "two")
    assert_same_files(tmp_path / "one", tmp_path / "two")


def test_runs_with_a_model_and_data_given_in_python_are_resumed_from_python(tmp_path):
    data = make_federation((20, 30, 40), dtype=torch.float32)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    given = {"model": net, "head": "2", "rounds": 4, "plan": "stacked-eager", "checkpoint_every": 1}
    fedloom.run("fedper", data, out=tmp_path / "whole", **given)
    with pytest.raises(Crash):
        fedloom.run("fedper", data, out=tmp_path / "run", on_round=crash_after(3), **given)
    fedloom.run("fedper", data, out=tmp_path / "run", resume=True, **given)
    assert_same_files(tmp_path / "run", tmp_path / "whole")
    with user_error("data of", "not what the run was started with"):
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(Crash):
            fedloom.run("fedper", data, out=tmp_path / "run", on_round=crash_after(3), **given)
        other = make_federation((20, 30, 40), dtype=torch.float32, seed=9)
        fedloom.run("fedper", other, out=tmp_path / "run", resume=True, **given)


def test_a_directory_in_use_is_refused_and_left_alone(tmp_path):
    asked = threading.Event()
    refused = []

    def second():
        asked.wait()
        try:
            fedloom.run("ditto", rounds=3, out=tmp_path / "run", resume=True, **SMALL)
        except fedloom.UserError as error:
            refused.append(str(error))

    other = threading.Thread(target=second)
    other.start()

    def on_round(done, total, row):
        if done == 2:
            asked.set()
            other.join()

    fedloom.run("ditto", rounds=3, out=tmp_path / "run", on_round=on_round, **SMALL)
    assert len(refused) == 1
    assert "in use by another process" in refused[0]
    assert fedloom.load(tmp_path / "run").last()["round"] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_round_with_a_checkpoint(number, tmp_path):
    whole = tmp_path / "whole"
    settings = {**SMALL, "checkpoint_every": 100}
    fedloom.run("ditto", rounds=5, out=whole, **settings)

    def on_round(done, total, row):
        if done == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(Stopped) as stop:
        fedloom.run("ditto", rounds=5, out=tmp_path / "run", on_round=on_round, **settings)
    assert (stop.value.done, stop.value.total) == (2, 5)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["round-00000002.safetensors"]
    assert fedloom.load(tmp_path / "run").last()["round"] == 2  # records so far can be read
    fedloom.run("ditto", rounds=5, out=tmp_path / "run", resume=True, **settings)
    assert_same_files(tmp_path / "run", whole)


def test_the_second_signal_ends_a_run_at_once(tmp_path):
    def on_round(done, total, row):
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stop:
        fedloom.run("ditto", rounds=5, out=tmp_path / "run", on_round=on_round, **SMALL)
    assert not isinstance(stop.value, Stopped)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["round-00000001.safetensors"]


def test_handlers_of_signals_are_restored(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    fedloom.run("local", rounds=1, out=tmp_path / "run", **SMALL)
    assert signal.getsignal(signal.SIGINT) is before


def test_evaluation_can_be_limited_to_a_fixed_sample(tmp_path):
    everyone = fedloom.run("fedrep", rounds=3, clients=10, plan="stacked-eager")
    some = fedloom.run("fedrep", rounds=3, clients=10, eval_clients=4, plan="stacked-eager")
    chosen = np.unique(some.clients["client"].to_numpy())
    assert len(chosen) == 4
    assert len(some.clients) == 3 * 4
    other = fedloom.run("fedavg", rounds=2, clients=10, eval_clients=4, seed=5, plan="stacked-eager")
    assert np.array_equal(np.unique(other.clients["client"].to_numpy()), chosen)  # the same for all methods and seeds
    all_rows = {(r["round"], r["client"]): r for r in everyone.clients.to_pylist()}
    for row in some.clients.to_pylist():
        assert row == pytest.approx(
            all_rows[row["round"], row["client"]], rel=1e-5, nan_ok=True
        )  # in stacks of 4 and of 10
    mine = [r["pre_acc"] for r in some.clients.to_pylist() if r["round"] == 3]
    assert some.last()["pre_acc_mean"] == pytest.approx(np.mean(mine))
    with user_error("eval_clients", "there are 10"):
        fedloom.run("fedrep", clients=10, eval_clients=11)


def test_a_run_is_resumed_from_a_checkpoint_before_the_first_evaluation(tmp_path):
    settings = {**SMALL, "eval_every": 4}
    fedloom.run("ditto", rounds=6, out=tmp_path / "whole", **settings)
    with pytest.raises(Crash):
        fedloom.run("ditto", rounds=6, out=tmp_path / "run", on_round=crash_after(3), **settings)
    with user_error("no evaluated round yet"):
        fedloom.load(tmp_path / "run")
    fedloom.run("ditto", rounds=6, out=tmp_path / "run", resume=True, **settings)
    assert_same_files(tmp_path / "run", tmp_path / "whole")


@dataclass(frozen=True)
class Reporting(FedAvg):
    """Reports the client's number, the norms of its layers, and two numbers of the server."""

    name = "test-reporting"

    def report(self, task, work, down, info):
        return {"who": info.id, "norms": torch.stack([work["w"].params[layer[0]].norm() for layer in task.layers])}

    def report_server(self, task, server, info):
        return {"share": info.n / info.n.sum(), "size": server["w"]["head.bias"].norm()}


@pytest.mark.parametrize("plan", ["stacked-eager", "per-client"])
def test_what_a_method_reports_is_recorded_in_every_round(plan, tmp_path):
    settings = {**SMALL, "participation": 3, "plan": plan}
    whole = fedloom.run("test-reporting", rounds=4, eval_every=4, out=tmp_path / "whole", **settings)
    rows = whole.reports.to_pylist()
    assert [row["round"] for row in rows] == [t for t in (1, 2, 3, 4) for _ in range(4)]
    for t in range(4):
        *clients, server = rows[4 * t : 4 * t + 4]
        assert [row["client"] for row in clients] == [row["who"] for row in clients]
        assert all(len(row["norms"]) == 2 and row["size"] is None for row in clients)
        assert sum(row["share"] for row in clients) == pytest.approx(1)
        assert (server["client"], server["who"], server["norms"]) == (-1, None, None)
        assert server["size"] > 0
    with pytest.raises(Crash):
        fedloom.run("test-reporting", rounds=4, eval_every=4, out=tmp_path / "run", on_round=crash_after(3), **settings)
    fedloom.run("test-reporting", rounds=4, eval_every=4, out=tmp_path / "run", resume=True, **settings)
    assert_same_files(tmp_path / "run", tmp_path / "whole")
    assert fedloom.load(tmp_path / "run").reports.equals(whole.reports)
