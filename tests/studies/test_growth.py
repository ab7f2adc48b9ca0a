"""Runs that are given more rounds: what they leave is byte for byte what a run of so many rounds leaves, also after a
crash in between; methods that depend on the number of rounds are refused."""

import functools
import logging
import os
import shutil
import signal
import sys
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    Crash,
    SingleRun,
    SmallNet,
    crash_after,
    make_federation,
    make_task,
    method,
    methods,
    run_cli,
    state_bytes,
)
from kills import REPRODUCIBLE_FILES
from sentences import user_error

import fedloom
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.task import Task
from fedloom.core.tree import leaves
from fedloom.data.divide import hold_out
from fedloom.engine.plan import Plan
from fedloom.runs import final
from fedloom.runs.interrupt import Stopped
from fedloom.storage.files import write_file
from fedloom.storage.manifest import Manifest

SHORT, LONG = 4, 8
SMALL = {"batch_size": 100, "lr": 0.1, "plan": "per-client", "participation": 0.5}
# of methods that refuse the settings above, or take long
OF_METHOD = {
    "dap-fl": {"ep_max": 2},
    "fedala": {"start_epochs": 2},
    "fedrecon": {"query_epochs": 2, "pseudo_clients": 2},
    "mapper": {"lambdas": (0.25, 0.5)},
    "per-fedavg": {"allow_small": True},
    "pfedme": {"lam": 0.5},
}
# all other files of a run depend on nothing but its settings
CLOCK = ("timings.parquet", "plan.json", "environment.json", "manifest.json", "run.log", "report.html")


@functools.cache
def federation():
    return make_federation((12, 20, 9, 15), dtype=torch.float32, held_out=4, server=10)


def contents(folder):
    """The bytes of all files of a run that do not depend on the clock."""
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if name not in CLOCK}


def score_bytes(scores):
    """The scores of all views and splits."""
    return {(view, split): found.tobytes() for view, splits in scores.items() for split, found in splits.items()}


def everything(folder):
    """The bytes of all files."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def assert_same_run(found, expected):
    a, b = contents(found), contents(expected)
    assert {*REPRODUCIBLE_FILES, "preprocessing.json", "final/models_last.safetensors"} <= b.keys()
    assert a.keys() == b.keys()
    assert [name for name in b if a[name] != b[name]] == []


@dataclass(frozen=True)
class Scripted(FedAvg):
    """FedAvg whose models have the validation accuracy that a list says, by round, so that a test can choose the best
    round."""

    name = "test-scripted"

    personal: tuple[float, ...] = fedloom.setting((), "validation accuracy of personal models by round")
    shared_model: tuple[float, ...] = fedloom.setting((), "validation accuracy of the global model by round")

    def report_round(self, rounds):
        t = rounds[-1]["round"] - 1
        return {"pre_val_acc_mean": self.personal[t], "global_val_acc_mean": self.shared_model[t]}


def run(folder, rounds, algorithm="ditto", **settings):
    return fedloom.run(algorithm, federation(), out=folder, rounds=rounds, **{**SMALL, **settings})


def grow(folder, rounds, algorithm="ditto", **settings):
    return run(folder, rounds, algorithm, resume=True, **settings)


# -- the same bytes


class WatchedTask(Task):
    """A task that remembers who has read its number of rounds."""

    readers: list[tuple[str, str]] = []  # modules and functions

    @property
    def rounds(self):
        frame = sys._getframe(1)
        self.readers.append((frame.f_globals["__name__"], frame.f_code.co_name))
        return self.__dict__["rounds"]

    @rounds.setter
    def rounds(self, value):
        self.__dict__["rounds"] = value


@pytest.mark.parametrize("name", methods())
def test_every_method_goes_on_from_its_final_state_to_the_bit(name, tmp_path):
    """With BatchNorm, clients that join and, where the method allows it, momentum: all that server and clients may
    keep. A method that reads the number of rounds, in whatever it computes, says that it depends on it."""
    alg = method(name, **OF_METHOD.get(name, {}))
    settings = {"momentum": 0.0 if name == "scaffold" else 0.5, "participation": 0.5 if alg.partial else 1.0}
    plain = make_task((12, 20, 9, 15), norm=True, data={"server": 10}, batch_size=20, lr=0.05, rounds=2, **settings)
    values = {field: getattr(plain, field) for field in plain.__dataclass_fields__}
    task = WatchedTask(**{**values, "data": hold_out(plain.data, 1, 0)})
    WatchedTask.readers.clear()
    alg.check(task)
    whole, second = (SingleRun(alg, task, 3, plan=Plan("per-client"), join_rounds=2) for _ in range(2))
    whole.advance()
    (tmp_path / "final").mkdir()
    for file, writer in final.state_files(whole.simulation).items():
        write_file(tmp_path / file, writer)
    assert final.restore(tmp_path, second.simulation)
    assert second.t == 1
    a, b = whole.advance(), second.advance()
    assert state_bytes(second) == state_bytes(whole)
    assert [v.numpy().tobytes() for v in leaves(second.stats)] == [v.numpy().tobytes() for v in leaves(whole.stats)]
    assert second.store.trained.tobytes() == whole.store.trained.tobytes()
    assert score_bytes(a.scores) == score_bytes(b.scores)
    assert a.unseen_scores["joined"].tobytes() == b.unseen_scores["joined"].tobytes()
    assert len(list(whole.group.models(0))) == 2  # participants, and the one that is held out
    readers = {function for module, function in WatchedTask.readers if module.startswith("fedloom.algorithms.")}
    assert bool(alg.depends_on_rounds(task)) == bool(readers - {"depends_on_rounds"}), readers


@pytest.mark.parametrize("name", ["fedphp", "partialfed", "page", "dap-fl"])
def test_a_method_that_depends_on_the_rounds_is_refused_and_left_alone(name, tmp_path):
    run(tmp_path / "run", 2, name, participation=1.0)
    why = method(name).depends_on_rounds(make_task((3, 4), rounds=2))
    before = everything(tmp_path / "run")
    with user_error(f"{name} cannot be given more than the 2 rounds", why, "start a new run with rounds=4"):
        grow(tmp_path / "run", 4, name, participation=1.0)
    assert everything(tmp_path / "run") == before


# validation accuracy by round, 1 to 8; with eval_every=3, rounds 3, 6 and the last one, 4 or 8, are evaluated
SCRIPTS = {
    "early": (1, 2, 9, 4, 3, 5, 1, 2),
    "last, before it grows": (1, 2, 3, 9, 3, 2, 1, 2),
    "later": (1, 2, 3, 2, 1, 9, 1, 2),
    "equal": (1, 1, 1, 1, 1, 1, 1, 1),
    "last": (1, 2, 5, 4, 3, 4, 3, 9),
}
NEXT = dict(zip(SCRIPTS, [*list(SCRIPTS)[1:], "early"], strict=True))


@pytest.mark.parametrize(
    ("personal", "every", "store"),
    [*((name, 3, "disk") for name in SCRIPTS), *((name, 1, "memory") for name in list(SCRIPTS)[:2])],
)
def test_whichever_round_is_the_best(personal, every, store, tmp_path):
    """The global model has its own best round."""
    settings = {"algorithm": Scripted(SCRIPTS[personal], SCRIPTS[NEXT[personal]]), "eval_every": every, "store": store}
    run(tmp_path / "whole", LONG, **settings)
    run(tmp_path / "run", SHORT, **settings)
    grow(tmp_path / "run", LONG, **settings)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "store").exists()


class Normalised(SmallNet):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(norm=True)


CASES = {
    "stacked": {"plan": "stacked-eager", "model": Normalised()},
    "on disk": {"store": "disk", "model": Normalised(), "holdout_clients": 1, "join_rounds": 2, "algorithm": "fedrep"},
    "at the server": {"holdout_clients": 1, "momentum": 0.5, "weight_decay": 0.01, "algorithm": "pfedhn"},
    "last models only": {"keep": "last", "aggregation": "median", "dtype": "float64", "algorithm": "fedrod"},
    "screening": {"clip_updates": 1.0, "screen_directions": True, "eval_clients": 2, "algorithm": "fedavg"},
}


@pytest.mark.parametrize("case", CASES)
def test_with_all_that_a_run_may_keep(case, tmp_path):
    run(tmp_path / "whole", 4, eval_every=2, **CASES[case])
    run(tmp_path / "run", 3, eval_every=2, **CASES[case])
    grow(tmp_path / "run", 4, eval_every=2, **CASES[case])
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of Ditto of 4 and of 8 rounds, with private state in memory and on disk; to be copied."""

    @functools.cache
    def make(rounds, store):
        folder = tmp_path_factory.mktemp("made") / "run"
        run(folder, rounds, store=store, checkpoint_every=1)
        return folder

    return make


def test_a_run_grows_twice(made, tmp_path):
    settings = {"store": "memory", "checkpoint_every": 1}
    run(tmp_path / "run", 2, **settings)
    for rounds in (SHORT, LONG):
        grow(tmp_path / "run", rounds, **settings)
        assert_same_run(tmp_path / "run", made(rounds, "memory"))
        assert fedloom.load(tmp_path / "run").last()["round"] == rounds
    log = (tmp_path / "run" / "run.log").read_text()
    assert "The run gets 4 rounds instead of 2." in log
    assert "The run gets 8 rounds instead of 4." in log


def test_a_run_that_grew_can_be_continued_without_saying_so(made, tmp_path):
    shutil.copytree(made(SHORT, "memory"), tmp_path / "run")
    settings = {"store": "memory", "checkpoint_every": 1}
    with pytest.raises(Crash):
        grow(tmp_path / "run", LONG, on_round=crash_after(6), **settings)
    with user_error("rounds=8, not 4"):
        grow(tmp_path / "run", SHORT, **settings)
    grow(tmp_path / "run", LONG, **settings)
    assert_same_run(tmp_path / "run", made(LONG, "memory"))


@pytest.mark.parametrize(("when", "store"), [("stopped", "disk"), ("crashed", "memory")])
def test_a_run_that_is_not_finished_grows_from_its_checkpoint(when, store, made, tmp_path):
    settings = {"store": store, "checkpoint_every": 1}

    def stop(done, total, row):
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped if when == "stopped" else Crash):
        run(tmp_path / "run", SHORT, on_round=stop if when == "stopped" else crash_after(3), **settings)
    seen = []
    grow(tmp_path / "run", LONG, on_round=lambda done, total, row: seen.append((done, total)), **settings)
    assert seen[0] == ((3 if when == "stopped" else 2), LONG)
    assert_same_run(tmp_path / "run", made(LONG, store))


@pytest.mark.parametrize(("rounds", "store"), [(4, "memory"), (5, "disk"), (8, "memory")])
def test_a_crash_in_the_rounds_that_were_added(rounds, store, made, tmp_path):
    """After 4 rounds, when not one was added yet, and after the last, before the final files are written."""
    shutil.copytree(made(SHORT, store), tmp_path / "run")
    settings = {"store": store, "checkpoint_every": 1}
    with pytest.raises(Crash):
        grow(tmp_path / "run", LONG, on_round=crash_after(rounds), **settings)
    grow(tmp_path / "run", LONG, **settings)
    assert_same_run(tmp_path / "run", made(LONG, store))


def test_a_crash_at_any_file_that_is_replaced(tmp_path, monkeypatch):
    """From one round to two: at each of the first files, and at every fifth later. Until the configuration says two
    rounds, the run has one, and goes on as such, too."""
    settings, replace = {"store": "disk", "algorithm": Scripted((2, 1), (1, 2))}, os.replace
    for name, rounds in (("one", 1), ("two", 2)):
        run(tmp_path / name, rounds, **settings)
    crashes, unchanged, crashed = 0, 0, True
    while crashed:
        folder = shutil.copytree(tmp_path / "one", tmp_path / f"run-{crashes}")
        calls = iter(range(crashes))

        def failing(source, target, calls=calls):
            if next(calls, None) is None:
                raise Crash
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            try:
                grow(folder, 2, **settings)
                crashed = False
            except Crash:
                crashes += 1 if crashes < 6 else 5
        if "\nrounds: 1\n" in (folder / "config.yaml").read_text():
            unchanged += 1
            again = shutil.copytree(folder, tmp_path / f"again-{crashes}")
            grow(again, 1, **settings)
            assert_same_run(again, tmp_path / "one")
        grow(folder, 2, **settings)
        assert_same_run(folder, tmp_path / "two")
    assert crashes > 20
    assert unchanged > 1


# -- comparisons, sweeps, the command line


TASK = {"dataset": "synthetic", "per_client": 40, "model": "mlp", "width": 8, "clients": 4, "batch_size": 100}


def assert_same_study(found, expected, count):
    folders = sorted(folder.relative_to(expected) for folder in (expected / "runs").glob("*/*"))
    assert len(folders) == count
    for folder in folders:
        assert_same_run(found / folder, expected / folder)


def test_a_comparison_grows(tmp_path):
    """Its seeds are stacked."""
    settings = {**TASK, "seeds": 2, "plan": "stacked-eager", "eval_every": 2}
    whole = fedloom.compare("ditto", rounds=4, out=tmp_path / "whole", **settings)
    fedloom.compare("ditto", rounds=3, out=tmp_path / "mine", **settings)
    grown = fedloom.compare("ditto", rounds=4, out=tmp_path / "mine", resume=True, **settings)
    assert_same_study(tmp_path / "mine", tmp_path / "whole", 4)
    assert (tmp_path / "mine" / "compare.yaml").read_bytes() == (tmp_path / "whole" / "compare.yaml").read_bytes()
    assert [row["acc_mean"] for row in grown.board] == [row["acc_mean"] for row in whole.board]
    assert fedloom.load(tmp_path / "mine").board == grown.board
    with user_error("rounds=4, not 3"):
        fedloom.compare("ditto", rounds=3, out=tmp_path / "mine", resume=True, **settings)


def test_a_comparison_with_a_method_that_cannot_grow_is_left_alone(tmp_path):
    settings = {**TASK, "seeds": 1, "plan": "per-client"}
    fedloom.compare(["fedavg", "fedphp"], rounds=1, out=tmp_path / "mine", **settings)
    before = everything(tmp_path / "mine")
    with user_error("fedphp cannot be given more"):
        fedloom.compare(["fedavg", "fedphp"], rounds=2, out=tmp_path / "mine", resume=True, **settings)
    assert everything(tmp_path / "mine") == before


def test_a_sweep_grows(tmp_path):
    settings = {**TASK, "grid": {"lam": [0.1, 1.0]}, "plan": "per-client"}
    fedloom.sweep("ditto", rounds=3, out=tmp_path / "whole", **settings)
    fedloom.sweep("ditto", rounds=2, out=tmp_path / "mine", **settings)
    fedloom.sweep("ditto", rounds=3, out=tmp_path / "mine", resume=True, **settings)
    assert_same_study(tmp_path / "mine", tmp_path / "whole", 2)


def test_the_command_line_gives_a_run_more_rounds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = ("--dataset", "synthetic", "--clients", 4, "--batch-size", 100, "--set", "per_client=40", "--set", "width=8")
    task = (*task, "--model", "mlp", "--set", "plan=per-client")
    for folder, rounds in (("whole", 3), ("mine", 2)):
        code, _, err = run_cli(monkeypatch, capsys, "run", "fedrep", *task, "--rounds", rounds, "--out", folder)
        assert code == 0, err
    code, out, err = run_cli(monkeypatch, capsys, "run", "--resume", "mine", "--rounds", 3)
    assert code == 0, err
    assert "3 rounds" in out
    assert_same_run(tmp_path / "mine", tmp_path / "whole")
    code, _, err = run_cli(monkeypatch, capsys, "run", "--resume", "mine", "--rounds", 2)
    assert code == 2
    assert "was started with rounds=3, not 2; resume it as it is, or start a new one." in " ".join(err.split())


# -- what is refused


def test_fewer_rounds_are_refused(made, tmp_path):
    shutil.copytree(made(SHORT, "memory"), tmp_path / "run")
    before = everything(tmp_path / "run")
    with user_error("was started with rounds=4, not 3"):
        grow(tmp_path / "run", 3, store="memory", checkpoint_every=1)
    assert everything(tmp_path / "run") == before


def test_more_rounds_and_another_setting_are_refused(made, tmp_path):
    shutil.copytree(made(SHORT, "memory"), tmp_path / "run")
    with user_error("was started with lr=0.1, not 0.2"):
        grow(tmp_path / "run", LONG, store="memory", checkpoint_every=1, lr=0.2)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fedphp", "mu, which grows up to the last round"),
        ("partialfed", "the number of rounds before a policy is learnt"),
        ("page", "the size of the agents' replay memory"),
        ("dap-fl", "the size of the agents' replay memory"),
    ],
)
def test_methods_that_plan_by_their_rounds_say_why(name, why):
    assert method(name).depends_on_rounds(make_task((3, 4), rounds=4)) == why


def test_a_replay_memory_that_was_full_does_not_depend_on_the_rounds(tmp_path):
    settings = {"algorithm": "page", "participation": 1.0, "replay": 2}
    run(tmp_path / "whole", 4, **settings)
    run(tmp_path / "run", 3, **settings)
    grow(tmp_path / "run", 4, **settings)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# -- folders that lack something


def test_a_damaged_final_state_is_one_sentence(made, tmp_path):
    for name in ("server", "clients", "run"):
        folder = shutil.copytree(made(SHORT, "memory"), tmp_path / name)
        file = folder / "final" / f"{name}.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with user_error("is damaged", f"final/{name}.safetensors"):
            grow(folder, LONG, store="memory", checkpoint_every=1)


def test_an_older_folder_without_a_complete_state_starts_from_the_beginning(made, tmp_path, caplog):
    """Until format 2, final/ had no run.safetensors."""
    folder = shutil.copytree(made(SHORT, "memory"), tmp_path / "run")
    manifest = Manifest(folder)
    manifest.load()
    manifest.remove(["final/run.safetensors"])
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        grow(folder, LONG, store="memory", checkpoint_every=1)
    assert "starts from the beginning" in caplog.text
    assert_same_run(folder, made(LONG, "memory"))


def test_a_run_that_kept_nothing_starts_from_the_beginning(tmp_path, caplog):
    run(tmp_path / "whole", 3, keep="none")
    run(tmp_path / "run", 2, keep="none")
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        grow(tmp_path / "run", 3, keep="none")
    assert "starts from the beginning" in caplog.text
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


# -- time


def test_planning_is_part_of_the_time_of_a_run(tmp_path):
    result = run(tmp_path / "run", 2, plan="stacked-eager")
    first, second = result.timings
    assert first["plan_seconds"] > 0
    assert second["plan_seconds"] == 0
    of_rounds = sum(row["train_seconds"] + row["eval_seconds"] for row in result.timings)
    assert result.seconds == pytest.approx(first["plan_seconds"] + of_rounds)
    grown = grow(tmp_path / "run", 3, plan="stacked-eager")
    assert grown.seconds > result.seconds
    assert grown.timings[:2] == result.timings
