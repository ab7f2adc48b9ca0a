"""The stacked executor gives what the reference gives: for every registered method, and for every feature of the
contract. Stacking is forced; a method that cannot be stacked fails here."""

import numpy as np
import pytest
import torch
from conftest import RAGGED, make_task, method, methods

from fedloom.core.tree import tree_flatten
from fedloom.engines.plan import Plan
from fedloom.engines.rounds import Rounds

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def play(alg, task, plan, rounds=3, seed=7):
    run = Rounds(alg, task, seed, plan=plan)
    records = [run.advance() for _ in range(rounds)]
    return run, records


def assert_same(alg, task, plan, tolerance, rounds=3):
    """State of server and clients, and the scores of all views in all rounds."""
    expected, expected_records = play(alg, task, Plan("per-client"), rounds)
    found, found_records = play(alg, task, plan, rounds)
    for name, a, b in (
        ("server", expected.server, found.server),
        ("clients", expected.store.rows, found.store.rows),
    ):
        flat_a, spec_a = tree_flatten(a)
        flat_b, spec_b = tree_flatten(b)
        assert spec_a == spec_b
        for x, y in zip(flat_a, flat_b, strict=True):
            assert torch.isfinite(x).all() and torch.isfinite(y).all(), name
            torch.testing.assert_close(y, x, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for a, b in zip(expected_records, found_records, strict=True):
        assert a.scores.keys() == b.scores.keys()
        for view in a.scores:
            for split in a.scores[view]:
                np.testing.assert_allclose(b.scores[view][split], a.scores[view][split], rtol=1e-6, atol=1e-6)
    return expected


PLANS = [
    Plan("stacked", "eager", chunk=len(RAGGED)),
    Plan("stacked", "eager", chunk=5),
    Plan("stacked", "traced", chunk=len(RAGGED)),
    Plan("stacked", "traced", chunk=4),
]


def plan_id(plan):
    return f"{plan.replay}-{plan.chunk}"


def task_for(name, sizes=RAGGED, **settings):
    """A task that the method can run: its documented minimum of samples applies."""
    alg = method(name)
    probe = make_task(sizes, data={"server": 20}, **settings)
    least = alg.min_samples(probe)
    return alg, make_task([max(n, least) for n in sizes], data={"server": 20}, **settings)


@pytest.mark.parametrize("plan", PLANS, ids=plan_id)
@pytest.mark.parametrize("name", methods())
def test_stacked_equals_reference_for_every_method(name, plan):
    alg, task = task_for(name)
    assert_same(alg, task, plan, 1e-9)


@pytest.mark.parametrize("name", methods())
def test_stacked_equals_reference_with_partial_participation(name):
    alg, task = task_for(name, participation=0.4, epochs=2)
    if not alg.partial:
        pytest.skip(f"{name} needs all clients in every round")
    assert_same(alg, task, Plan("stacked", "traced", chunk=3), 1e-9, rounds=4)


@pytest.mark.parametrize("name", methods())
def test_stacked_equals_reference_with_batchnorm_dropout_momentum_decay_and_clipping(name):
    rest = {"momentum": 0.9, "lr": 0.02} if name != "scaffold" else {"lr": 0.02}
    alg, task = task_for(name, norm=True, dropout=0.3, weight_decay=0.01, clip=1.0, epochs=2, **rest)
    assert_same(alg, task, Plan("stacked", "traced", chunk=7), 1e-9)


@pytest.mark.parametrize("name", methods())
def test_stacked_equals_reference_in_float32(name):
    alg, task = task_for(name, dtype=torch.float32)
    assert_same(alg, task, Plan("stacked", "traced", chunk=len(RAGGED)), 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("chunk", [len(RAGGED), 5])
@pytest.mark.parametrize("name", methods())
def test_captured_graphs_equal_the_reference_on_a_gpu(name, chunk, dtype, tolerance):
    alg, task = task_for(name, device="cuda", dtype=dtype, norm=True, dropout=0.2, epochs=2)
    assert_same(alg, task, Plan("stacked", "captured", chunk=chunk), tolerance)
