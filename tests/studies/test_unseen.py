"""Clients that are held out, from the settings of a run to its files: records, summary, leaderboard, resuming."""

import csv
import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import make_federation
from kills import assert_same_files, run_process
from sentences import user_error

import fedloom

HELD = {
    "dataset": "synthetic", "per_client": 60, "model": "mlp", "width": 8, "clients": 8, "rounds": 2,
    "holdout_clients": 3, "plan": "stacked-eager",
}  # fmt: skip


def mean_of(result, column, t):
    found = [row[column] for row in result.clients.to_pylist() if row["round"] == t and row[column] is not None]
    return float(np.mean(found)), len(found)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return fedloom.run("ditto", out=tmp_path_factory.mktemp("unseen") / "run", **HELD)


def test_held_out_clients_count_in_their_own_columns_and_not_in_those_of_participants(done):
    for row in done.rounds:
        t = row["round"]
        for view, count in {"pre": 5, "post": 5, "global": 5, "new": 3, "joined": 3}.items():
            assert mean_of(done, f"{view}_acc", t) == (pytest.approx(row[f"{view}_acc_mean"], rel=1e-12), count)
        assert row["new_gap"] == pytest.approx(row["new_acc_mean"] - row["pre_acc_mean"], abs=1e-12)
        assert row["joined_gap"] == pytest.approx(row["joined_acc_mean"] - row["post_acc_mean"], abs=1e-12)
        assert row["cohort"] == 5
        assert not [name for name in row if name.startswith(("new_val", "joined_val"))]  # they select nothing
    assert done.unseen == [5, 6, 7]
    assert done.views() == ["pre", "post", "global"]


def test_files_of_a_run_name_the_held_out_clients_and_have_their_metrics(done):
    table = pq.read_table(done.folder / "partition.parquet")
    assert table["held_out"].to_pylist() == [False] * 5 + [True] * 3 + [False]  # the last is the server
    assert table["client"].to_pylist() == [*range(8), -1]
    summary = json.loads((done.folder / "summary.json").read_text())
    for row in (summary["last"], summary["best_on_validation"]["pre"]):
        assert {"new_acc_mean", "new_acc_low5", "joined_acc_mean", "joined_acc_low5", "new_gap"} <= row.keys()
    assert {len(v) for v in done.store["v"].values()} == {5}  # held-out clients keep no state
    again = fedloom.load(done.folder)
    assert again.rounds == done.rounds
    assert again.unseen == done.unseen


def test_a_run_without_held_out_clients_has_no_columns_for_them(tmp_path):
    result = fedloom.run("fedavg", out=tmp_path / "run", **{**HELD, "holdout_clients": 0, "rounds": 1})
    assert result.unseen == []
    assert not [c for c in [*result.last(), *result.clients.column_names] if c.startswith(("new", "joined"))]
    assert "held_out" not in pq.read_table(tmp_path / "run" / "partition.parquet").column_names


def test_a_comparison_has_metrics_of_held_out_clients_and_measures_gains_by_participants(tmp_path):
    board = fedloom.compare(["fedavg", "fedper"], seeds=2, out=tmp_path / "all", **HELD)
    with (tmp_path / "all" / "leaderboard.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["selection"]) == ("pre", "last")]
    rows = [row for row in rows if row["method"] != "majority"]  # which no client can join
    for row in rows:
        runs = [fedloom.load(tmp_path / "all" / "runs" / row["method"] / f"seed-{seed}") for seed in (0, 1)]
        for column in ("new_acc_mean", "new_acc_low5", "new_gap", "joined_acc_mean", "joined_acc_low5", "joined_gap"):
            expected = np.mean([run.last()[column] for run in runs])
            assert float(row[column]) == pytest.approx(expected, rel=1e-12)
        assert len({run.partition for run in runs}) == 1
    assert len(rows) == 3
    first = fedloom.load(tmp_path / "all" / "runs" / "local" / "seed-0").last()["pre_acc_mean"]
    second = fedloom.load(tmp_path / "all" / "runs" / "local" / "seed-1").last()["pre_acc_mean"]
    for row in board.rows(selection="last"):
        assert row["gain"] == pytest.approx(row["acc_mean"] - (first + second) / 2, abs=1e-9)
    for name in ("md", "tex"):
        assert "Unseen clients" in (tmp_path / "all" / f"leaderboard.{name}").read_text()


def test_eval_clients_limits_held_out_clients_too_to_the_same_ones_for_all_seeds():
    few = [fedloom.run("fedavg", seed=seed, **{**HELD, "eval_clients": 2, "rounds": 1}) for seed in (0, 1)]
    assert few[0].unseen == few[1].unseen
    assert len(few[0].unseen) == 2
    assert set(few[0].unseen) < {5, 6, 7}
    assert mean_of(few[0], "pre_acc", 1)[1] == 2


def test_a_federation_can_say_which_clients_are_held_out():
    data = replace(make_federation((9, 8, 7, 6)), held_out=1)
    result = fedloom.run("fedavg", data, rounds=1, engine="reference")
    assert result.unseen == [3]
    with user_error("This federation holds out 1 of its clients already"):
        fedloom.run("fedavg", data, rounds=1, holdout_clients=1)


def test_held_out_clients_without_test_samples_are_refused():
    data = make_federation((9, 8, 7, 6))
    tests = data.splits["test"]
    cut = replace(tests, flat=tests.flat[: tests.starts[3]], starts=np.minimum(tests.starts, tests.starts[3]))
    with user_error("No client that is held out has test samples"):
        fedloom.run("fedavg", replace(data, splits={**data.splits, "test": cut}, held_out=1), rounds=1)


def test_a_run_that_is_killed_and_resumed_has_the_same_bytes_for_held_out_clients(tmp_path):
    """Killed while the checkpoint of round 3 is written."""
    command = ["run", "fedrep", "--rounds", "5", "--clients", "6", "--participation", "0.5", "--plan", "stacked-eager"]
    command += ["--holdout-clients", "0.4", "--device", "cpu", "--batch-size", "100"]
    command += ["--set", "checkpoint_every=1", "--set", "join_rounds=2"]
    assert run_process([*command, "--out", str(tmp_path / "whole")]) == 0
    assert run_process([*command, "--out", str(tmp_path / "killed")], at=2, mark="/checkpoints/.round-00000003") == -9
    assert run_process(["run", "--resume", str(tmp_path / "killed")]) == 0
    assert_same_files(tmp_path / "killed", tmp_path / "whole")
    assert "joined_acc_mean" in json.loads((tmp_path / "whole" / "summary.json").read_text())["last"]
