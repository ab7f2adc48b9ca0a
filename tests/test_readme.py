"""The examples of the README run as they stand, and its commands are known to the command line."""

import doctest
import re
from pathlib import Path

import pytest
from helpers import run_cli

import fedloom
import fedloom.studies.run
from fedloom.config.resolve import configure
from fedloom.core.algorithm import ALGORITHMS

TEXT = (Path(__file__).parents[1] / "README.md").read_text()


def test_python_examples_run_one_after_another(capsys, monkeypatch):
    known = {name: ALGORITHMS[name] for name in ALGORITHMS.names()}
    monkeypatch.setattr(ALGORITHMS, "_known", known.copy())  # the example's method is forgotten afterwards
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) == 4
    scope: dict = {"__name__": "readme"}
    for example in examples:
        exec(compile(example, "README.md", "exec"), scope)
    assert "client" in capsys.readouterr().out


@pytest.mark.parametrize("line", re.findall(r"^fedloom (list .*?)(?:  #.*)?$", TEXT, re.MULTILINE))
def test_list_commands_work(line, monkeypatch, capsys):
    code, out, _ = run_cli(monkeypatch, capsys, *line.split())
    assert code == 0
    assert out


def test_the_example_of_run_is_true():
    found = doctest.testmod(fedloom.studies.run)
    assert found.attempted > 0
    assert found.failed == 0


def test_run_commands_have_valid_settings():
    lines = re.findall(r"^fedloom run(.*?)(?:  #.*)?$", TEXT, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        words = line.split()
        name = words.pop(0) if words and not words[0].startswith("--") else "ditto"
        pairs = dict(zip(words[::2], words[1::2], strict=True))
        values = {
            k.removeprefix("--").replace("-", "_"): v for k, v in pairs.items() if k not in ("--dataset", "--set")
        }
        values |= dict(w.split("=") for w in words if "=" in w)
        configure(name, pairs.get("--dataset", "digits"), values=values)


def test_the_tutorial_for_a_new_method_is_true(monkeypatch):
    """Its first method runs, and the test that it shows passes."""
    known = {name: ALGORITHMS[name] for name in ALGORITHMS.names()}
    monkeypatch.setattr(ALGORITHMS, "_known", known.copy())
    text = (Path(__file__).parents[1] / "docs" / "new-method.md").read_text()
    examples = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "import" in code]
    assert len(examples) == 2
    scope: dict = {"__name__": "tutorial"}
    for example in examples:
        exec(compile(example, "new-method.md", "exec"), scope)
    result = fedloom.run("averaging", eta_g=0.5, rounds=1, clients=4)
    assert result.last()["pre_acc_mean"] > 0
    scope["test_with_a_server_step_of_one_it_is_fedavg"]()
