"""The command line as a person uses it: what it prints, and one sentence with exit code 2 for every mistake."""

import json
import os
import re
import subprocess
import sys

import pytest
from helpers import run_cli


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Commands write to the current folder."""
    monkeypatch.chdir(tmp_path)


MISTAKES = {
    "algorithm": (("run", "fedrap"), "did you mean 'fedrep'?"),
    "algorithm far off": (("run", "xxxxxxxxx"), "known: dap-fl, ditto"),
    "data set": (("run", "--dataset", "digitz"), "did you mean 'digits'?"),
    "model": (("run", "--model", "cnn9"), "did you mean 'cnn8'?"),
    "partition": (("run", "--partition", "dirichlet"), "did you mean 'dirichlet_class'?"),
    "option": (("run", "--roundz", "3"), "--rounds"),
    "command": (("runn",), "run"),
    "setting": (("run", "--set", "lamb=3"), "did you mean 'lam'?"),
    "setting of another method": (("run", "fedavg", "--set", "lam=3"), "Unknown setting 'lam'"),
    "section": (("run", "--set", "algoritm.lam=3"), "did you mean 'algorithm'?"),
    "setting in a section": (("run", "--set", "algorithm.lamb=3"), "algorithm 'ditto' has no setting 'lamb'"),
    "set without a value": (("run", "--set", "lam"), "key=value"),
    "set twice": (("run", "--set", "lam=1", "--set", "lam=2"), "twice"),
    "option and set": (("run", "--lr", "1", "--set", "lr=2"), "'lr' is given twice"),
    "a method as a setting": (("run", "fedavg", "--set", "algorithm=ditto"), "write 'fedloom run ditto'."),
    "rounds 0": (("run", "--rounds", "0"), "rounds must be at least 1, not 0"),
    "rounds a word": (("run", "--rounds", "many"), "rounds must be a whole number, not 'many'"),
    "rounds a fraction": (("run", "--rounds", "2.5"), "whole number"),
    "negative lr": (("run", "--lr", "-0.1"), "lr must be greater than 0, not -0.1"),
    "lr not finite": (("run", "--lr", "nan"), "finite"),
    "momentum 1": (("run", "--momentum", "1"), "momentum must be at most"),
    "momentum for scaffold": (("run", "scaffold", "--momentum", "0.9"), "momentum=0"),
    "batch size 0": (("run", "--batch-size", "0"), "batch_size must be at least 1"),
    "clients 0": (("run", "--clients", "0"), "clients must be at least 1"),
    "more clients than samples": (("run", "--clients", "5000"), "5000 clients are more than the 1797 samples"),
    "too many clients for the partition": (("run", "--clients", "1000"), "too few for 1000 clients"),
    "participation 0": (("run", "--participation", "0"), "participation must be greater than 0"),
    "participation above": (("run", "--participation", "30"), "30 clients, but there are 20"),
    "participation 1.5": (("run", "--participation", "1.5"), "whole number of clients"),
    "nobody left": (("run", "--holdout-clients", "20"), "leaves nobody to train, as there are 20 clients"),
    "held out 2.5": (("run", "--holdout-clients", "2.5"), "whole number of clients, not 2.5"),
    "held out -1": (("run", "--holdout-clients", "-1"), "holdout_clients must be at least 0"),
    "one client held out": (("run", "--clients", "1", "--holdout-clients", "0.2"), "only one client"),
    "nobody left to show": (("data", "show", "--holdout-clients", "20"), "leaves nobody to train"),
    "nobody left to compare": (("compare", "fedavg", "--holdout-clients", "20"), "leaves nobody to train"),
    "participation of those left": (
        ("run", "--holdout-clients", "5", "--participation", "16"),
        "16 clients, but there are 15",
    ),
    "evaluation of those left": (
        ("run", "--holdout-clients", "5", "--eval-clients", "16"),
        "16 clients, but there are 15",
    ),
    "join rounds 0": (("run", "--holdout-clients", "5", "--set", "join_rounds=0"), "join_rounds must be at least 1"),
    "split": (("run", "--set", "split=0.5/0.5"), "split takes 3 numbers"),
    "split sum": (("run", "--set", "split=0.5/0.1/0.1"), "add up to 1"),
    "split without test": (("run", "--set", "split=0.5/0.5/0"), "all but validation above 0, not 0.5/0.5/0"),
    "k above classes": (("run", "--partition", "kclass_equal", "--set", "k=11"), "k must be at most"),
    "beta 0": (("run", "--set", "beta=0"), "beta must be greater than 0"),
    "no natural clients": (("run", "--partition", "natural"), "has no clients of its own"),
    "official test set": (("run", "--set", "pool=train"), "no official test set"),
    "pool": (("run", "--set", "pool=merge"), "did you mean 'merged'?"),
    "subset": (("run", "--set", "subset=30"), "more than the 20 clients"),
    "device": (("run", "--device", "gpu"), "use auto, cpu, cuda or cuda:N"),
    "absent GPU": (("run", "--device", "cuda:99"), "is not there"),
    "engine": (("run", "--engine", "vectorised"), "did you mean 'vectorized'?"),
    "plan": (("run", "--plan", "stack"), "did you mean 'stacked'?"),
    "dtype": (("run", "--dtype", "float16"), "float"),
    "missing data": (
        ("run", "--dataset", "fmnist", "--data-dir", "/nowhere"),
        "Data set 'fmnist' was not found in /nowhere",
    ),
    "images too small": (("run", "--model", "cnn4"), "at least 16x16 pixels"),
    "nothing to share": (("run", "fedper", "--model", "logreg"), "allow_degenerate=true"),
    "list": (("list", "algorithm"), "did you mean 'algorithms'?"),
    "list one": (("list", "models", "cnn"), "did you mean"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence_and_exit_code_2(mistake, monkeypatch, capsys):
    args, words = MISTAKES[mistake]
    code, out, err = run_cli(monkeypatch, capsys, *args)
    assert code == 2
    assert out == ""
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_a_run_prints_all_three_reports_for_every_model(monkeypatch, capsys):
    args = ("run", "ditto", "--rounds", "3", "--clients", "5", "--set", "lam=0.5", "--set", "server_share=0.1")
    code, out, err = run_cli(monkeypatch, capsys, *args)
    assert code == 0
    assert err == ""
    for words in ("ditto on digits: 5 clients", "last round", "best on validation", "best on test", "lowest 5 %"):
        assert words in out
    for row in ("personal ", "personal, trained", "global"):
        assert sum(line.strip().startswith(row) for line in out.splitlines()) == 3
    assert "Global model on the server's data" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_clients_that_are_held_out_have_rows_of_their_own(monkeypatch, capsys):
    args = ("run", "fedper", "--rounds", "2", "--clients", "6", "--holdout-clients", "2")
    code, out, err = run_cli(monkeypatch, capsys, *args)
    assert (code, err) == (0, "")
    assert "fedper on digits: 4 clients and 2 unseen" in out
    for row in ("unseen, on arrival", "unseen, joined"):
        assert sum(line.strip().startswith(row) for line in out.splitlines()) == 3
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_clients_that_are_held_out_are_shown_with_the_data(monkeypatch, capsys):
    args = ("data", "show", "--clients", "6", "--holdout-clients", "2")
    code, out, _ = run_cli(monkeypatch, capsys, *args)
    assert code == 0
    assert "Held out, so that they never train: clients 4 to 5." in out
    assert [line.split()[0] for line in out.splitlines() if line.split()[-1:] == ["out"]] == ["4", "5"]
    _, text, _ = run_cli(monkeypatch, capsys, *args, "--json")
    assert [one["held_out"] for one in json.loads(text)["clients"]] == [False] * 4 + [True] * 2


def test_without_validation_data_nothing_is_called_best_on_validation(monkeypatch, capsys):
    args = ("run", "local", "--rounds", "2", "--clients", "5", "--set", "split=0.7/0/0.3")
    code, out, _ = run_cli(monkeypatch, capsys, *args)
    assert code == 0
    assert "best on validation" not in out
    assert "best on test" in out


def test_many_classes_are_shown_together_so_that_a_line_fits(monkeypatch, capsys):
    _, out, _ = run_cli(monkeypatch, capsys, "data", "show", "--dataset", "synthetic", "--clients", "3")
    assert "share of each 2 classes" in out  # 30 classes
    assert all(len(line) <= 80 for line in out.splitlines())
    for client in "012":
        assert re.search(rf"^ +{client} +300 +210 +30 +60 +\d+ ", out, re.MULTILINE)  # the numbers are not squeezed out


@pytest.mark.parametrize("kind", ["algorithms", "datasets", "models", "partitions", "presets"])
def test_lists_say_the_same_to_people_and_machines(kind, monkeypatch, capsys):
    _, table, _ = run_cli(monkeypatch, capsys, "list", kind)
    _, text, _ = run_cli(monkeypatch, capsys, "list", kind, "--json")
    for thing in json.loads(text):
        assert thing["name"] in table
        _, details, _ = run_cli(monkeypatch, capsys, "list", kind, thing["name"])
        words = "".join(details.split())
        for setting, about in thing["settings"].items():
            assert setting in details
            assert about["about"]
            for word in about["about"].split():  # all of it, brackets included
                assert word in words


METHODS = [
    "local",
    "fedavg",
    "fedavg-ft",
    "fedprox",
    "fedsam",
    "scaffold",
    "feddyn",
    "dap-fl",
    "fedrecon",
    "per-fedavg",
    "pfedme",
    "ditto",
    "fedper",
    "fedrep",
    "fedrod",
    "fedphp",
    "fedproto",
    "pfedhn",
    "fedala",
    "hypcluster",
    "lg-fedavg",
    "mapper",
    "partialfed",
    "fedfomo",
    "fml",
    "moon",
    "plgu-lf",
    "plgu-grep",
    "plgu-ghn",
    "gpfl",
    "page",
    "pfedkt",
]


@pytest.mark.parametrize("word", ["algorithms", "methods"])
def test_all_methods_of_the_papers_are_listed_with_what_they_share(word, monkeypatch, capsys):
    _, text, _ = run_cli(monkeypatch, capsys, "list", word, "--json")
    found = {a["name"]: a for a in json.loads(text)}
    assert len(METHODS) == 32
    assert set(METHODS) <= set(found)
    for name in METHODS:
        a = found[name]
        assert a["shared"]
        assert a["private"]
        assert a["source"]
        assert a["personal_model"] or a["global_model"]
        assert name in ("local", "fedavg-ft") or (a["paper"] and a["year"])  # controls without a paper
    assert (found["fedrep"]["personal_model"], found["fedrep"]["global_model"]) == (True, False)
    assert (found["fedavg"]["personal_model"], found["fedavg"]["global_model"]) == (False, True)


def test_help_and_version_need_no_torch():
    """They answer at once; importing torch takes seconds."""
    probe = (
        "import sys; sys.argv = ['fedloom', 'run', '--help']\n"
        "from fedloom.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--participation" in done.stdout


def test_the_installed_command_runs_and_fails_as_promised():
    env = {**os.environ, "COLUMNS": "80"}
    good = subprocess.run(
        [sys.executable, "-m", "fedloom", "run", "fedavg", "--rounds", "1", "--clients", "4"],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert good.returncode == 0, good.stderr
    assert "fedavg on digits" in good.stdout
    bad = subprocess.run(
        [sys.executable, "-m", "fedloom", "run", "fedavgg"], capture_output=True, text=True, check=False
    )
    assert bad.returncode == 2
    assert "did you mean 'fedavg'?" in bad.stderr
