"""Methods from files and modules: how they are found, run, remembered, and what is said of those that cannot be."""

import sys

import numpy as np
import pytest
from helpers import run_cli
from sentences import user_error

import fedloom
from fedloom.config.methods import find_method, is_place, load_method, split_settings
from fedloom.core.algorithm import ALGORITHMS

METHOD = """
from dataclasses import dataclass

import fedloom
from fedloom.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    name = "{name}"
    extra: float = fedloom.setting(1.0, "factor of the gradient", above=0)

    def step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        return {{"w": task.step(w, {{k: self.extra * v for k, v in g.items()}})}}
"""
SMALL = {"rounds": 2, "clients": 4, "plan": "per-client"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a method in my_method.py; what tests register and import is forgotten afterwards."""
    ALGORITHMS.names()  # so that all of FedLoom's own are there
    monkeypatch.setattr(ALGORITHMS, "_known", dict(ALGORITHMS._known))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_method.py").write_text(METHOD.format(name="mine"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("fedloom_method_") or name == "nearby"]:
        del sys.modules[name]


def forget(name="mine"):
    ALGORITHMS._known.pop(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ditto", ("ditto", None)),
        ("ditto:lam=0.5", ("ditto", "lam=0.5")),
        ("./my.py", ("./my.py", None)),
        ("./my.py:Mine", ("./my.py:Mine", None)),
        ("./my.py:lam=0.5", ("./my.py", "lam=0.5")),
        ("./my.py:Mine:lam=0.5,k=2", ("./my.py:Mine", "lam=0.5,k=2")),
        ("package.module:Mine", ("package.module:Mine", None)),
        ("package.module:Mine:lam=0.5", ("package.module:Mine", "lam=0.5")),
    ],
)
def test_settings_come_behind_a_name_or_a_place(text, expected):
    assert split_settings(text) == expected


def test_names_are_no_places():
    assert not any(map(is_place, ("ditto", "fedavg-ft", "my_method")))


@pytest.mark.parametrize("place", ["./my_method.py", "my_method.py:Mine", "nearby:Mine"])
def test_a_method_is_found_in_a_file_and_in_a_module(folder, place):
    (folder / "nearby.py").write_text(METHOD.format(name="mine"))
    assert find_method(place).name == "mine"
    assert find_method(place) is load_method(place)


def test_a_method_in_a_file_runs_is_compared_resumed_and_its_models_are_used(folder, monkeypatch, capsys):
    code, _, err = run_cli(
        monkeypatch, capsys, "run", "./my_method.py", "--set", "extra=0.5", "--rounds", "2", "--clients", "4",
        "--out", "run",
    )  # fmt: skip
    assert (code, err) == (0, "")
    forget()
    grown = fedloom.run("./my_method.py", extra=0.5, out="run", resume=True, clients=4, rounds=3)
    assert grown.last()["round"] == 3
    forget()
    assert len(fedloom.load(folder / "run").model(0).predict(np.zeros((2, 8, 8)))) == 2
    found = fedloom.compare(["./my_method.py:extra=0.5", "fedavg"], seeds=1, out=folder / "both", **SMALL)
    assert {"mine:extra=0.5", "fedavg", "local"} <= {row["method"] for row in found.rows()}
    forget()
    again = fedloom.compare(["./my_method.py:extra=0.5", "fedavg"], seeds=1, out=folder / "both", resume=True, **SMALL)
    assert again.rows() == found.rows()
    (folder / "my_method.py").unlink()
    forget()
    with user_error("my_method.py", "not there any more"):
        fedloom.load(folder / "run").model(0)


def test_a_file_that_has_changed_is_warned_of(folder, caplog):
    fedloom.run("./my_method.py", out="run", **SMALL)
    file = folder / "my_method.py"
    file.write_text(file.read_text() + "\n# another line\n")
    forget()
    sys.modules.pop(next(name for name in sys.modules if name.startswith("fedloom_method_")))
    fedloom.load(folder / "run").model(0)
    assert "has changed since" in caplog.text


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "./other.py", ("There is no file other.py",)),
        ("x = 1\n", "./my_method.py", ("has no method", "docs/new-method.md")),
        ("def f(:\n", "./my_method.py", ("not valid Python", "line 1")),
        ("import nothing_of_this_name\n", "./my_method.py", ("cannot be loaded", "nothing_of_this_name", "line 1")),
        (METHOD.format(name="ditto"), "./my_method.py", ("calls its method 'ditto'", "choose another")),
        (METHOD.format(name="mine").replace("@dataclass(frozen=True)\n", ""), "./my_method.py", ("@dataclass",)),
        (METHOD.format(name="mine"), "./my_method.py:Mien", ("has no method Mien", "Mine")),
        (METHOD.format(name="mine"), "nowhere.at_all:Mine", ("There is no module nowhere.at_all",)),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_sentence(folder, monkeypatch, capsys, text, place, words):
    (folder / "my_method.py").write_text(text)
    code, out, err = run_cli(monkeypatch, capsys, "run", place, "--rounds", "1", "--clients", "4")
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    for word in words:
        assert word in err


def test_a_mistake_that_shows_while_training_is_one_sentence_and_with_v_a_traceback(folder, monkeypatch, capsys):
    text = METHOD.format(name="mine").rstrip() + "\n\n    def report_round(self, rounds):\n        return rounds[5]\n"
    (folder / "my_method.py").write_text(text)
    words = ("run", "./my_method.py", "--rounds", "1", "--clients", "4", "--no-save")
    code, _, err = run_cli(monkeypatch, capsys, *words)
    assert code == 2
    assert "report_round of 'mine' raised IndexError" in err
    assert "Traceback" not in err
    code, _, err = run_cli(monkeypatch, capsys, *words, "-v")
    assert code == 2
    assert "Traceback" in err
    assert "return rounds[5]" in err
