"""Plans that were measured are kept for later processes, and are used for the same work only."""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import SingleRun, make_task, method

from fedloom.algorithms.fedavg import FedAvg
from fedloom.engine.plan import Plan
from fedloom.engine.planning import choose, plan_cache
from fedloom.storage import user_cache

SIZES = (7, 12, 3, 30)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder of plans, which is empty at first."""
    monkeypatch.setenv("FEDLOOM_CACHE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "fedloom" / "plans"


@pytest.fixture
def measured(monkeypatch):
    """The plans that were measured."""
    found = []
    choose_ = choose._choose
    monkeypatch.setattr(choose, "_choose", lambda *args: found.append(choose_(*args)) or found[-1])
    return found


def plan_of(alg="fedavg", **settings):
    alg = method(alg) if isinstance(alg, str) else alg
    return SingleRun(alg, make_task(SIZES, **settings), 0, plan="stacked").plan


def test_the_same_work_is_measured_once(cache, measured):
    first, second = plan_of(), plan_of()
    assert len(measured) == 1
    assert len(list(cache.iterdir())) == 1
    assert second.reason == f"{first.reason} (in an earlier run)"
    assert second == replace(first, reason=second.reason)


@pytest.mark.parametrize(
    "other",
    [
        {"alg": "fedprox"},
        {"alg": FedAvg(), "batch_size": 3},
        {"epochs": 2},
        {"rounds": 900},
        {"momentum": 0.9},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_other_work_is_measured_anew(other, cache, measured):
    plan_of()
    plan_of(**other)
    assert len(measured) == 2


def test_other_clients_a_newer_version_or_another_machine_are_measured_anew(cache, measured, monkeypatch):
    plan_of()
    SingleRun(method("fedavg"), make_task((*SIZES, 5)), 0, plan="stacked")
    monkeypatch.setattr(plan_cache, "_versions", lambda: ["another"])
    plan_of()
    monkeypatch.setattr(plan_cache, "_machine", lambda device: ["another"])
    plan_of()
    monkeypatch.setattr(plan_cache, "_package_state", lambda: ["another"])
    plan_of()
    assert len(measured) == 5


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "{}", '{"inputs": {}, "plan": {}}', b"\xff\xfe".decode("latin-1"),
        "another plan", "another mode", "another type", "another key",
    ],
)  # fmt: skip
def test_a_damaged_plan_is_measured_anew(content, cache, measured):
    expected = plan_of()
    (file,) = cache.iterdir()
    found = json.loads(file.read_text())
    if content == "another plan":
        found["inputs"]["mode"] = []
    elif content == "another mode":
        found["plan"]["mode"] = "sideways"
    elif content == "another type":
        found["plan"]["chunk"] = "4"
    elif content == "another key":
        found["plan"]["color"] = "red"
    file.write_text(json.dumps(found) if content.startswith("another") else content)
    assert plan_of() == expected
    assert len(measured) == 2
    assert plan_of().reason == f"{expected.reason} (in an earlier run)"  # it was written again


def test_a_cache_that_cannot_be_written_or_read_changes_nothing(cache, measured, monkeypatch):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where a folder should be")
    first, second = plan_of(), plan_of()
    assert first == second
    assert len(measured) == 2


def test_a_plan_is_measured_anew_if_there_is_more_or_less_memory(cache, measured, monkeypatch):
    plan = plan_of()
    assert plan.chunk == len(SIZES)
    for share, times in ((4, 1), (1, 2), (4, 3), (8, 3)):  # half of what is free is used
        free = share * plan.bytes_needed
        monkeypatch.setattr(choose, "available_memory", lambda device, free=free: free)
        found = plan_of()
        assert found.chunk == (2 if share == 1 else len(SIZES))
        assert len(measured) == times


def test_it_can_be_switched_off(cache, measured, monkeypatch):
    monkeypatch.setenv("FEDLOOM_CACHE", "off")
    plan_of()
    assert not cache.exists()


def test_a_method_from_a_notebook_is_measured_every_time(cache, measured, monkeypatch):
    """It may be another one under the same name."""

    class Mine(FedAvg):
        pass

    monkeypatch.setattr(Mine, "__module__", "notebook")
    monkeypatch.setitem(sys.modules, "notebook", SimpleNamespace())
    plan_of(Mine())
    assert not cache.exists()


def test_a_method_whose_file_has_changed_is_measured_anew(cache, measured, monkeypatch, tmp_path):
    file = tmp_path / "mine.py"

    class Mine(FedAvg):
        pass

    monkeypatch.setattr(Mine, "__module__", "mine")
    module = type(sys)("mine")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "mine", module)
    for text, times in (("a", 1), ("a", 1), ("ab", 2)):
        file.write_text(text)
        os.utime(file, (1, 1))
        plan_of(Mine())
        assert len(measured) == times


def test_few_files_are_kept(cache, monkeypatch):
    monkeypatch.setattr(user_cache, "MOST_FILES", 2)
    for rounds in (1, 10, 100, 1000):
        plan_of(rounds=rounds)
    assert len(list(cache.iterdir())) == 2


# -- plans from files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["mode", "chunk", "workers", "compiled", "shrink", "reason"])
def test_a_plan_has_values_of_the_right_types(field):
    plan = Plan("stacked", chunk=3)
    plan.check()
    with pytest.raises(ValueError, match=field):
        replace(plan, **{field: None}).check()
