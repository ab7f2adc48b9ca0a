"""The stacked executor equals the reference for every registered method and every feature of the contract. The plans
prescribe stacking, so a method that cannot be stacked fails here."""

import pytest
import torch
from helpers import PER_CLIENT, RAGGED, assert_same, make_task, method, methods, run_and_evaluate

from fedloom.engine.graph import cpu_passes
from fedloom.engine.plan import Plan

FEW = 0.3  # for two prefix sizes only, since a trace takes longer than all its steps; test_features has more sizes
# one chunk for all clients is in the float32 test
PLANS = [Plan("stacked", "eager", "per-client", chunk=5), Plan("stacked", "traced", chunk=4, shrink=FEW)]


@pytest.fixture(autouse=True)
def small_steps_are_fused_too(monkeypatch):
    monkeypatch.setattr(cpu_passes, "MIN_ROWS", 1)


def task_for(name, sizes=RAGGED, **settings):
    """A task that the method can run: its documented minimum of samples applies."""
    alg = method(name)
    probe = make_task(sizes, data={"server": 20}, **settings)
    least = alg.min_samples(probe)
    return alg, make_task([max(n, least) for n in sizes], data={"server": 20}, **settings)


@pytest.mark.parametrize("name", methods())
def test_stacked_equals_reference_for_every_method(name):
    alg, task = task_for(name)
    reference = run_and_evaluate(alg, task, PER_CLIENT)
    for plan in PLANS:
        assert_same(alg, task, plan, 1e-9, reference=reference)


@pytest.mark.parametrize("name", methods())
def test_stacked_equals_reference_with_partial_participation(name):
    alg, task = task_for(name, participation=0.4, epochs=2)
    if not alg.partial:
        pytest.skip(f"{name} needs all clients in every round")
    assert_same(alg, task, Plan("stacked", "eager", chunk=3), 1e-9, rounds=4)


@pytest.mark.parametrize("name", methods())
def test_stacked_equals_reference_with_batchnorm_dropout_momentum_decay_and_clipping(name):
    rest = {"momentum": 0.9, "lr": 0.02} if name != "scaffold" else {"lr": 0.02}
    alg, task = task_for(name, norm=True, dropout=0.3, weight_decay=0.01, clip=1.0, epochs=2, **rest)
    assert_same(alg, task, Plan("stacked", "traced", chunk=7, shrink=FEW), 1e-9)


@pytest.mark.parametrize("name", methods())
def test_stacked_equals_reference_in_float32(name):
    alg, task = task_for(name, dtype=torch.float32)
    assert_same(alg, task, Plan("stacked", "traced", chunk=len(RAGGED), shrink=FEW), 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("chunk", [len(RAGGED), 5])
@pytest.mark.parametrize("name", methods())
def test_captured_graphs_equal_the_reference_on_a_gpu(name, chunk, dtype, tolerance):
    exact = dtype == torch.float64  # BatchNorm over two samples turns rounding in float32 into 0.01 in any executor
    alg, task = task_for(name, device="cuda", dtype=dtype, norm=exact, dropout=0.2, epochs=2)
    assert_same(alg, task, Plan("stacked", "captured", chunk=chunk), tolerance)
