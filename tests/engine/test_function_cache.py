"""Functions that are called in every round are traced once they were called often enough; results are the same to the
bit."""

import pytest
import torch
from helpers import SingleRun, make_task, method, state_bytes

from fedloom.core.tree import leaves
from fedloom.engine.graph import function_cache
from fedloom.engine.graph.function_cache import FunctionCache
from fedloom.engine.plan import Plan


@pytest.fixture
def trace_early(monkeypatch):
    """Functions are traced at their second call."""
    monkeypatch.setattr(function_cache, "CALLS_BEFORE_TRACE", 1)


@pytest.mark.parametrize("name", ["ditto", "fedfomo", "gpfl", "per-fedavg"])
def test_rounds_with_traced_functions_are_the_same_to_the_bit(name, monkeypatch):
    """For methods with private state, individual downloads, functions before a phase, reports, and gradients in the
    adaptation before evaluation."""
    task = make_task([12, 12, 12], norm=name != "fedfomo", dropout=0.2, batch_size=4, data={"server": 9})
    found = []
    for calls in (1, 10**6):
        monkeypatch.setattr(function_cache, "CALLS_BEFORE_TRACE", calls)
        run = SingleRun(method(name), task, 0, plan=Plan("stacked", "traced", chunk=3))
        scores = [run.advance().scores for _ in range(4)]
        found.append([*state_bytes(run), *(rows.tobytes() for rows in leaves(scores))])
        traced = run.executor.call.traced
        if calls == 1:
            assert {"begin", "finish", "model", "personal"} <= {key[0] for key in traced}
            assert all(function.run is not None for function in traced.values())
        else:
            assert not traced
    assert found[0] == found[1]


def test_a_function_that_is_called_often_is_replaced_by_its_graph(trace_early):
    called, call = [], FunctionCache(True)

    def f(tree, scale):
        called.append(1)
        return {"a": tree["x"] * scale + tree["y"], "same": tree["y"]}

    for k in range(6):
        one = torch.randn(3)
        # a tensor that is passed twice while the function is traced is two inputs
        tree = {"x": one, "y": one if k == 1 else torch.randn(3)}
        found, scale = call("f", f, tree, torch.tensor(k)), k
        torch.testing.assert_close(found["a"], tree["x"] * scale + tree["y"], rtol=0, atol=0)
        torch.testing.assert_close(found["same"], tree["y"], rtol=0, atol=0)
    assert len(called) == 3  # called, traced, and compared with its graph
    call("f", f, {"x": torch.randn(4), "y": torch.randn(4)}, torch.tensor(1))  # other shapes
    call("f", f, {"x": torch.randn(3), "y": torch.randn(3)}, torch.tensor(1.0))  # another dtype
    assert len(called) == 5


def test_arguments_with_another_tree_structure_are_not_given_to_the_graph(trace_early):
    call = FunctionCache(True)
    for _ in range(3):
        assert call("f", lambda t: t["x"] - t["y"], {"x": torch.ones(2), "y": torch.zeros(2)}).tolist() == [1, 1]
    assert call("f", lambda t: t["x"] - t["a"], {"a": torch.zeros(2), "x": torch.ones(2)}).tolist() == [1, 1]


def test_a_function_that_cannot_be_traced_is_called_as_it_is(trace_early):
    call = FunctionCache(True)

    def f(x):
        return x + 1 if x.sum() > 0 else x - 1

    assert [call("f", f, torch.tensor([v])).item() for v in (1.0, 1.0, -1.0, 2.0)] == [2, 2, -2, 3]
    assert [function.run for function in call.traced.values()] == [None]


def test_the_numbers_of_graphs_and_of_counted_signatures_are_bounded(trace_early, monkeypatch):
    monkeypatch.setattr(function_cache, "MAX_GRAPHS", 2)
    monkeypatch.setattr(function_cache, "MAX_COUNTED", 8)
    call = FunctionCache(True)
    for _ in range(3):
        for n in range(1, 20):
            assert len(call("f", torch.neg, torch.ones(n))) == n
            assert len(call.calls) <= 9
    for _ in range(3):
        for n in range(1, 5):
            call("g", torch.neg, torch.ones(n))
    assert len(call.traced) == 2
