"""What happens once per round comes from a trace when it was called often enough, and changes no byte."""

import pytest
import torch
from helpers import SingleRun, make_task, method

from fedloom.core.tree import leaves
from fedloom.engine.graph import function_cache as replayed
from fedloom.engine.graph.function_cache import FunctionCache
from fedloom.engine.planning.plan import Plan


@pytest.fixture
def early(monkeypatch):
    monkeypatch.setattr(replayed, "AFTER", 1)


@pytest.mark.parametrize("name", ["ditto", "fedfomo", "gpfl", "per-fedavg"])
def test_rounds_from_traces_change_no_byte(name, monkeypatch):
    """Private state, parts for each client, functions before a phase, reports, gradients on the way to a model."""
    task = make_task([12, 12, 12], norm=name != "fedfomo", dropout=0.2, batch_size=4, data={"server": 9})
    found = []
    for after in (1, 10**6):
        monkeypatch.setattr(replayed, "AFTER", after)
        run = SingleRun(method(name), task, 0, plan=Plan("stacked", "traced", chunk=3))
        scores = [run.advance().scores for _ in range(4)]
        found.append([v.numpy().tobytes() for v in leaves((run.server, run.store.everyone()))])
        found[-1] += [rows.tobytes() for rows in leaves(scores)]
        programs = run.executor.call.traced
        if after == 1:
            assert {"begin", "finish", "model", "personal"} <= {key[0] for key in programs}
            assert all(program.run is not None for program in programs.values())
        else:
            assert not programs
    assert found[0] == found[1]


def test_a_function_that_is_called_often_is_called_no_more(early):
    called, call = [], FunctionCache(True)

    def f(tree, scale):
        called.append(1)
        return {"a": tree["x"] * scale + tree["y"], "same": tree["y"]}

    for k in range(6):
        one = torch.randn(3)
        tree = {
            "x": one,
            "y": one if k == 1 else torch.randn(3),
        }  # what comes in twice while it is traced is two inputs
        found, scale = call("f", f, tree, torch.tensor(k)), k
        torch.testing.assert_close(found["a"], tree["x"] * scale + tree["y"], rtol=0, atol=0)
        torch.testing.assert_close(found["same"], tree["y"], rtol=0, atol=0)
    assert len(called) == 3  # as it is, traced, compared
    call("f", f, {"x": torch.randn(4), "y": torch.randn(4)}, torch.tensor(1))  # other shapes
    call("f", f, {"x": torch.randn(3), "y": torch.randn(3)}, torch.tensor(1.0))  # another type
    assert len(called) == 5


def test_arguments_that_are_nested_otherwise_are_another_matter(early):
    call = FunctionCache(True)
    for _ in range(3):
        assert call("f", lambda t: t["x"] - t["y"], {"x": torch.ones(2), "y": torch.zeros(2)}).tolist() == [1, 1]
    assert call("f", lambda t: t["x"] - t["a"], {"a": torch.zeros(2), "x": torch.ones(2)}).tolist() == [1, 1]


def test_what_cannot_be_traced_goes_on_as_it_is(early):
    call = FunctionCache(True)

    def f(x):
        return x + 1 if x.sum() > 0 else x - 1

    assert [call("f", f, torch.tensor([v])).item() for v in (1.0, 1.0, -1.0, 2.0)] == [2, 2, -2, 3]
    assert [program.run for program in call.programs.values()] == [None]


def test_programs_and_counts_are_bounded(early, monkeypatch):
    monkeypatch.setattr(replayed, "PROGRAMS", 2)
    monkeypatch.setattr(replayed, "SHAPES", 8)
    call = FunctionCache(True)
    for _ in range(3):
        for n in range(1, 20):
            assert len(call("f", torch.neg, torch.ones(n))) == n
            assert len(call.calls) <= 9
    for _ in range(3):
        for n in range(1, 5):
            call("g", torch.neg, torch.ones(n))
    assert len(call.programs) == 2
