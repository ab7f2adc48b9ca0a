"""Help, shell completion, lists, and what is said about misspelt options and commands."""

import json
import os
import shlex
import subprocess
import sys
import typing
from pathlib import Path
from typing import Literal

import pytest
import typer
from helpers import run_cli

from fedloom.cli import completion
from fedloom.cli.command import GROUPS
from fedloom.cli.commands import KINDS, app
from fedloom.cli.options import OPTIONS
from fedloom.config.files import presets
from fedloom.config.settings import SYNONYMS, Settings
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.settings import fields
from fedloom.data.dataset import DATASETS
from fedloom.data.partitions import PARTITIONS
from fedloom.metrics.registry import METRICS
from fedloom.models.zoo import MODELS

ROOT = Path(__file__).parents[2]
PROGRAM = typer.main.get_command(app)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def all_commands(command=PROGRAM, words=()):
    """Every command with the words that call it: (), ("run",), ..., ("data", "check"), ..."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from all_commands(below, (*words, name))


COMMANDS = dict(all_commands())


def help_of(monkeypatch, capsys, *words):
    code, out, err = run_cli(monkeypatch, capsys, *words, "--help")
    assert (code, err) == (0, "")
    return out


# -- help


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples_and_a_page(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(monkeypatch, capsys, *words)
    assert run_cli(monkeypatch, capsys, *words, "-h")[1] == text
    assert max(map(len, text.splitlines())) <= 80
    _, _, end = text.partition("\nExamples:\n")
    examples, _, pages = end.partition("\nDocumentation: ")
    assert all((ROOT / page).exists() for page in pages.strip().split(", "))
    assert examples.splitlines()
    for line in examples.splitlines():
        assert parsed(line)[: len(words)] == list(words)


def parsed(line):
    """The words of a command, after parsing it, which fails for options and commands that there are not."""
    program, *args = shlex.split(line)
    assert program == "fedloom"
    context = PROGRAM.make_context("fedloom", list(args))
    while hasattr(context.command, "commands") and (rest := [*context._protected_args, *context.args]):
        name, command, rest = context.command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return args


def test_examples_with_a_misspelt_option_would_be_noticed():
    from fedloom.core.errors import UserError

    with pytest.raises(UserError):
        parsed("fedloom run --roundz 3")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_and_argument_is_explained_with_the_type_of_its_value(words, monkeypatch, capsys):
    text = help_of(monkeypatch, capsys, *words)
    assert " VALUE" not in text
    assert "required" not in text
    for param in COMMANDS[words].params:
        assert param.help, param.name
        for flag in getattr(param, "opts", []) if param.param_type_name == "option" else []:
            assert flag in text


def test_commands_are_listed_in_the_order_of_work_with_a_whole_sentence(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_of(monkeypatch, capsys).partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    names = [line.split()[0] for line in lines]
    assert names == [
        "run", "compare", "sweep", "costs", "reproduce", "predict", "evaluate", "export", "report", "plot", "diagnose",
        "audit", "doctor", "check", "list", "keys", "serve", "join", "status", "data",
    ]  # fmt: skip
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


@pytest.mark.parametrize("command", ["run", "compare", "sweep"])
def test_options_stand_in_their_groups(command, monkeypatch, capsys):
    text = help_of(monkeypatch, capsys, command)
    titles = [line.rstrip(":") for line in text.splitlines() if line.rstrip(":") in GROUPS]
    assert titles == ["Task", "Training", "Evaluation", "Execution", "Results", "Settings", "Other"]
    for name, (group, _) in OPTIONS.items():
        if (name, command) not in (("seed", "compare"), ("seed", "sweep")):
            section = text.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
            assert f"--{name.replace('_', '-')} " in section


def test_the_help_names_the_choices_of_a_setting(monkeypatch, capsys):
    text = help_of(monkeypatch, capsys, "run")
    hints = typing.get_type_hints(Settings)
    for name in OPTIONS.keys() & hints.keys():
        hint = hints[name]
        kind = {int: "INT", float: "FLOAT", int | None: "INT"}.get(hint, "")
        choices = "|".join(typing.get_args(hint)) if typing.get_origin(hint) is Literal else kind
        assert f"--{name.replace('_', '-')} {choices}" in text


# -- completion

REGISTERED = {
    "algorithms": ALGORITHMS.names,
    "datasets": DATASETS.names,
    "models": MODELS.names,
    "partitions": PARTITIONS.names,
    "presets": presets,
    "settings": lambda: fields(Settings),
    "metrics": lambda: {metric.name for metric in METRICS},
}


@pytest.mark.parametrize("kind", REGISTERED)
def test_names_that_are_completed_are_those_that_are_known(kind):
    own = [name for name in REGISTERED[kind]() if _is_fedlooms(kind, name)]
    assert sorted(completion.names(kind)) == sorted(own)


def _is_fedlooms(kind, name):
    """Other tests, and other packages, may register more."""
    registry = {"algorithms": ALGORITHMS, "datasets": DATASETS, "models": MODELS, "partitions": PARTITIONS}.get(kind)
    return registry is None or registry[name].__module__.startswith("fedloom.")


def test_all_kinds_of_lists_are_completed():
    assert all(completion.names(kind) for kind in KINDS)
    assert completion.names("nothing of the kind") == []


PROBE = (
    "import sys, atexit\n"
    "sys.argv = ['fedloom', *sys.argv[1:]]\n"
    "atexit.register(lambda: print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr))\n"
    "from fedloom.cli.main import main\n"
    "main()"
)


def complete(*words, shell="bash"):
    """What a shell is told when Tab is pressed behind the last word."""
    asked = {
        "bash": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": " ".join(words)},
        "fish": {"_TYPER_COMPLETE_ARGS": " ".join(words), "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    env = {**os.environ, **asked, "_FEDLOOM_COMPLETE": f"complete_{shell}"}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    torch, numpy = done.stderr.split()
    assert torch == "False", "torch was imported, which takes seconds"
    assert numpy == "False" or "--metric" in words
    return done.stdout.split()


COMPLETED = {
    "commands": (
        ("",),
        [
            *("run", "compare", "sweep", "costs", "reproduce", "predict", "evaluate", "export", "report", "plot"),
            *("diagnose", "audit", "doctor", "check", "list", "keys", "serve", "join", "status", "data"),
        ],
    ),
    "commands below": (("data", ""), ["check", "show", "schema", "download"]),
    "options": (("run", "--dt"), ["--dtype"]),
    "a method": (("run", "fedr"), ["fedrecon", "fedrep", "fedrod"]),
    "a further method": (("compare", "fedavg", "d"), ["dap-fl", "ditto"]),
    "after settings": (("compare", "ditto:lam=0.5", "--rounds", "3", "fedre"), ["fedrecon", "fedrep"]),
    "a method to sweep": (("sweep", "dit"), ["ditto"]),
    "a method to count": (("costs", "fedavg", "dit"), ["ditto"]),
    "a method to check": (("check", "sca"), ["scaffold"]),
    "a data set": (("run", "--dataset", "f"), ["femnist", "fmnist"]),
    "a download": (("data", "download", "cifar"), ["cifar10", "cifar100"]),
    "a model": (("run", "--model", "cnn"), ["cnn4", "cnn8", "cnn_kt"]),
    "a partition": (("data", "show", "--partition", "k"), ["kclass_equal", "kclass_ratio"]),
    "a preset": (("run", "--preset", "plgu/"), ["plgu/digits", "plgu/fmnist", "plgu/synthetic"]),
    "a metric": (("run", "--metric", "macro"), ["macro_f1"]),
    "dtype": (("run", "--dtype", ""), ["float32", "float64", "tf32", "bf16"]),
    "engine": (("run", "--engine", ""), ["vectorized", "ray", "reference"]),
    "plan": (("run", "--plan", "s"), ["stacked", "stacked-eager"]),
    "keep": (("run", "--keep", ""), ["best", "last", "none"]),
    "store": (("run", "--store", ""), ["auto", "memory", "disk"]),
    "device": (("run", "--device", ""), ["auto", "cpu", "cuda"]),
    "format": (("export", "run", "--format", "o"), ["onnx"]),
    "kinds": (("list", ""), list(KINDS)),
    "one of a kind": (("list", "models", "mlp"), ["mlp", "mlp3"]),
    "files, by the shell": (("run", "--out", "r"), []),
    "a method's file, by the shell": (("run", "./my"), []),
}


@pytest.mark.parametrize("case", COMPLETED)
def test_a_shell_completes(case):
    words, expected = COMPLETED[case]
    assert complete("fedloom", *words) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_the_same(shell):
    text = " ".join(complete("fedloom", "compare", "fedavg", "d", shell=shell))
    assert "dap-fl" in text
    assert "ditto" in text
    assert "fedrep" not in text


def test_completion_is_installed(tmp_path):
    env = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for option in ("--show-completion", "--install-completion"):
        done = subprocess.run(
            [sys.executable, "-m", "fedloom", option, "bash"], capture_output=True, text=True, env=env, check=True
        )
        assert "_FEDLOOM_COMPLETE=complete_bash" in done.stdout or option == "--install-completion"
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "complete -o default -F _fedloom_completion fedloom" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()


@pytest.mark.parametrize("words", [(), ("compare",), ("data", "show")], ids=" ".join)
def test_help_imports_no_torch(words):
    done = subprocess.run([sys.executable, "-c", PROBE, *words, "-h"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.split() == ["False", "False"]


# -- mistakes

MISTAKES = {
    ("run", "--lerning-rate", "0.1"): "No such option '--lerning-rate'; did you mean '--lr'?",
    ("run", "--learning-rate=0.1"): "No such option '--learning-rate'; did you mean '--lr'?",
    ("run", "--round", "3"): "No such option '--round'; did you mean '--rounds'?",
    ("run", "--epoch", "3"): "No such option '--epoch'; did you mean '--local-epochs'?",
    ("run", "-lr", "0.1"): "No such option '-lr'; did you mean '--lr'?",
    ("run", "--output", "x"): "No such option '--output'; did you mean '--out'?",
    ("run", "--split", "1/0/0"): "No such option '--split'; this setting is given as '--set split=1/0/0'.",
    ("run", "--lr-gamma=0.5"): "No such option '--lr-gamma'; this setting is given as '--set lr_gamma=0.5'.",
    ("run", "--lr-gama", "0.5"): "No such option '--lr-gama'; did you mean '--set lr_gamma=0.5'?",
    ("run", "--clip-norm", "1"): "No such option '--clip-norm'; did you mean '--set clip=1'?",
    ("run", "--lam", "0.5"): "No such option '--lam'; settings of a method are given as '--set lam=0.5'.",
    ("run", "--lam"): "No such option '--lam'; settings of a method are given as '--set lam=VALUE'.",
    ("compare", "--lam", "2"): "No such option '--lam'; settings of a method are given with it, as in 'ditto:lam=2'.",
    (
        "run",
        "--beta",
        "1",
    ): "No such option '--beta'; settings of a data set or a partition are given as '--set beta=1'.",
    ("check", "ditto", "--lam", "2"): "No such option '--lam'; settings of a method are given as '--set lam=2'.",
    ("data", "check", ".", "--label", "y"): (
        "No such option '--label'; settings of a data set are given as '--set label=y'."
    ),
    ("compare", "--seed", "3"): "No such option '--seed'; did you mean '--seeds'?",
    ("run", "--algorithm", "fedavg"): (
        "No such option '--algorithm': the method is an argument, as in 'fedloom run fedavg'."
    ),
    ("run", "--xyzzy"): "No such option '--xyzzy'; 'fedloom run --help' lists those that there are.",
    ("data", "show", "--rounds", "3"): (
        "No such option '--rounds'; 'fedloom data show --help' lists those that there are."
    ),
    ("list", "--split", "3"): "No such option '--split'; 'fedloom list --help' lists those that there are.",
    ("--verison",): "No such option '--verison'; did you mean '--version'?",
    ("rnu",): "Unknown command 'rnu'; did you mean 'run'?",
    ("data", "shwo"): "Unknown command 'shwo'; did you mean 'show'?",
    ("run", "--rounds"): "Option '--rounds' needs a value: --rounds INT.",
    ("run", "--no-save=yes"): "Option '--no-save' takes no value.",
    ("run", "ditto", "fedavg"): "Unexpected argument 'fedavg'; usage: fedloom run [OPTIONS] [METHOD].",
    ("check",): (
        "Missing argument METHOD (Python file with a method, package.module:Class, or a name); "
        "usage: fedloom check [OPTIONS] METHOD."
    ),
    ("predict", "run", "data", "--seed", "x"): "Invalid value for '--seed': 'x' is not a valid integer.",
    ("list", "settings", "lrr"): "Unknown setting 'lrr'; did you mean 'lr'?",
    ("list", "algorithms", "./none.py"): "There is no file none.py; give the path of a Python file with a method.",
}


@pytest.mark.parametrize("args", MISTAKES, ids=" ".join)
def test_a_mistake_in_the_arguments_gets_one_sentence(args, monkeypatch, capsys):
    code, out, err = run_cli(monkeypatch, capsys, *args)
    assert (code, out) == (2, "")
    assert " ".join(err.split()) == f"fedloom: {MISTAKES[args]}"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_option_with_a_letter_missing_is_recognized_and_nothing_else_suggested(words, monkeypatch, capsys):
    flags = [flag for param in COMMANDS[words].params for flag in param.opts if flag.startswith("--")]
    for flag in flags:
        misspelt = flag[:-2] + flag[-1]
        if len(flag) > 6 and misspelt not in flags and misspelt[2:].replace("-", "_") not in SYNONYMS:
            _, _, err = run_cli(monkeypatch, capsys, *words, misspelt)
            assert f"No such option '{misspelt}'; did you mean '{flag}'?" in " ".join(err.split())


# -- lists


def test_all_settings_of_a_run_are_listed(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    _, table, _ = run_cli(monkeypatch, capsys, "list", "settings")
    _, text, _ = run_cli(monkeypatch, capsys, "list", "settings", "--json")
    found = {row["name"]: row for row in json.loads(text)}
    assert list(found) == list(fields(Settings))
    words = table.split()
    for name, field in fields(Settings).items():
        assert name in words
        assert set(field.metadata["about"].split()) <= set(words)
        default = field.default
        assert found[name]["default"] == (list(default) if isinstance(default, tuple) else default)
    assert {"(sgd,", "adam,", "adamw)"} <= set(words)
    assert "0.7/0.1/0.2" in words


def test_one_setting_is_listed(monkeypatch, capsys):
    _, text, _ = run_cli(monkeypatch, capsys, "list", "settings", "lr_schedule", "--json")
    (row,) = json.loads(text)
    assert row["choices"] == ["constant", "cosine", "step"]
    _, table, _ = run_cli(monkeypatch, capsys, "list", "settings", "lr")
    assert "eta, local learning rate" in table
    assert "momentum" not in table


METHOD = """
from dataclasses import dataclass
from fedloom import setting
from fedloom.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Half(FedAvg):
    name = "half"
    source = "a test"
    strength: float = setting(0.25, "how much of it")
"""


def test_a_method_in_a_file_is_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ALGORITHMS, "_known", {name: ALGORITHMS[name] for name in ALGORITHMS.names()})
    (tmp_path / "my_method.py").write_text(METHOD)
    code, out, _ = run_cli(monkeypatch, capsys, "list", "algorithms", "./my_method.py")
    assert code == 0
    assert "source: a test" in out
    assert "strength" in out
    assert "0.25" in out
    assert "how much of it" in out


def test_equal_budget_may_be_given_without_a_method(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = ("--rounds", "2", "--clients", "3", "--seeds", "1", "--dataset", "synthetic", "--no-save")
    for words in (("--equal-budget", *options), (*options, "--equal-budget"), (*options, "--equal-budget", "fedavg")):
        code, out, _ = run_cli(monkeypatch, capsys, "compare", "ditto", *words)
        assert code == 0
        assert "compute what fedavg does" in " ".join(out.split())


@pytest.mark.parametrize("words", [("--tracker", "tensorbord"), ("--columns", "meen")])
def test_a_misspelt_tracker_or_column_shows_before_anything_is_written(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_cli(monkeypatch, capsys, "compare", "ditto", *words)
    assert code == 2
    assert "did you mean" in err
    assert list(tmp_path.iterdir()) == []
