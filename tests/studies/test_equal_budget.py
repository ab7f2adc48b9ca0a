"""Comparisons in which all methods compute the same."""

from pathlib import Path

import pytest
from helpers import run_cli
from sentences import user_error

import fedloom
from fedloom.report.leaderboard import budget_sentences
from fedloom.studies.compare import read_comparison

TASK = {
    "dataset": "synthetic", "per_client": 60, "model": "mlp", "width": 8, "clients": 5, "rounds": 12,
    "engine": "reference", "eval_every": 4,
}  # fmt: skip
METHODS = ["fedrep", "ditto", "ditto:personal_epochs=3", "fedsam"]
ROUNDS = {"local": 12, "fedavg": 12, "fedrep": 12, "ditto": 6, "ditto:personal_epochs=3": 3, "fedsam": 6}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("done") / "mine"
    return fedloom.compare(METHODS, seeds=1, equal_budget="fedavg", out=folder, **TASK)


def test_rounds_are_scaled_so_that_all_compute_what_the_named_method_does(done):
    """Ditto trains two models, with three epochs for one of them it makes four passes; SAM makes two."""
    rows = {row["method"]: row for row in done.rows() if row["method"] != "majority"}
    assert {name: row["rounds"] for name, row in rows.items()} == ROUNDS
    assert {round(row["of_budget"], 6) for row in rows.values()} == {100.0}
    assert len({round(row["samples_in_all"], 6) for row in rows.values()}) == 1
    for row in rows.values():
        assert row["samples_in_all"] == pytest.approx(row["rounds"] * row["samples_per_round"])
    assert done.run("ditto").last()["round"] == 6


def test_a_result_says_what_its_clients_computed(done):
    result = done.run("fedsam")
    per_round, in_all = result.computed(per_round=True), result.computed()
    assert in_all == {name: pytest.approx(6 * value) for name, value in per_round.items()}
    assert in_all["samples"] == pytest.approx(done.run("fedavg").computed()["samples"])


def test_the_leaderboard_says_so(done):
    text = (done.folder / "leaderboard.md").read_text()
    assert "Equal budgets: every method has as many rounds as it takes to compute what fedavg does" in text


def test_the_comparison_is_resumed_with_the_same_rounds(done):
    *_, config = read_comparison(done.folder)
    assert config["equal_budget"] == "fedavg"
    assert config["rounds"] == 12
    again = fedloom.compare(METHODS, seeds=1, equal_budget="fedavg", out=done.folder, resume=True, **TASK)
    assert again.board == done.board == fedloom.load(done.folder).board
    with user_error("was started with equal_budget=fedavg"):
        fedloom.compare(["fedavg", *METHODS], seeds=1, out=done.folder, resume=True, **TASK)


def test_without_it_a_comparison_says_that_budgets_differ(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = ["--dataset", "synthetic", "--clients", "5", "--rounds", "4", "--seeds", "1", "--no-save"]
    code, out, _ = run_cli(monkeypatch, capsys, "compare", "fedavg", "ditto", *options)
    assert code == 0
    said = " ".join(out.split())
    assert "Budgets differ: ditto computes 2.0 times as much as local." in said
    assert "--equal-budget fedavg gives all methods the same." in said


def test_the_command_line_gives_resumes_and_grows_equal_budgets(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = ["--dataset", "synthetic", "--clients", "5", "--seeds", "1", "--out", "mine"]
    code, out, _ = run_cli(
        monkeypatch, capsys, "compare", "ditto", "--equal-budget", "ditto", "--rounds", "2", *options
    )
    assert code == 0
    assert "compute what ditto does" in " ".join(out.split())
    assert fedloom.load("mine").run("local").last()["round"] == 4
    code, out, _ = run_cli(monkeypatch, capsys, "compare", "--resume", "mine", "--rounds", "3")
    assert code == 0
    found = fedloom.load("mine")
    assert (found.run("local").last()["round"], found.run("ditto").last()["round"]) == (6, 3)


@pytest.mark.parametrize(
    ("methods", "budget", "words"),
    [
        (["fedrep"], "fedavgg", ["'fedavgg'", "did you mean 'fedavg'?"]),
        (["fedrep"], "ditto:lamb=1", ["lamb", "did you mean 'lam'?"]),
    ],
)
def test_a_method_that_is_not_there_is_refused(methods, budget, words, tmp_path):
    with user_error(*words):
        fedloom.compare(methods, seeds=1, equal_budget=budget, out=tmp_path / "mine", **TASK)
    assert list(Path(tmp_path).iterdir()) == []


def test_a_method_that_chooses_its_epochs_is_counted_afterwards():
    """PAGE's agents choose one to five epochs, so it computes more than one epoch in each of its twelve rounds."""
    found = fedloom.compare(["page"], seeds=1, equal_budget="fedavg", **TASK)
    page = next(row for row in found.rows() if row["method"] == "page")
    assert page["rounds"] == 12
    assert page["of_budget"] > 150
    assert any(line.startswith("page used") for line in budget_sentences(found.board))
