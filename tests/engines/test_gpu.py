"""What a GPU does differently: own convolutions and products, compiled steps, memory."""

import logging

import numpy as np
import pytest
import torch
from helpers import assert_same, make_task, method, model_task, play

from fedloom.core.transfer import fetch
from fedloom.core.tree import leaves
from fedloom.engines import replayed, rounds
from fedloom.engines.plan import Plan
from fedloom.engines.rounds import Rounds
from fedloom.kernels import products
from fedloom.kernels.tune import fastest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CONVOLUTIONS = {
    "cnn4": ((1, 28, 28), {}),
    "harcnn": ((2, 1, 28), {}),
    "resnet18_gn": ((2, 16, 16), {"options": {"width": 8}}),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    for place in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(place, "allow_tf32", False)


def conv_task(name, **settings):
    shape, more = CONVOLUTIONS[name]
    return model_task(name, shape, **{"device": "cuda", "dtype": torch.float32, "lr": 0.02, **more, **settings})


@pytest.mark.parametrize("alg", ["fedavg", "gpfl", "per-fedavg"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_own_convolutions_equal_the_reference(name, alg):
    assert_same(method(alg), conv_task(name), Plan("stacked", "captured", chunk=3, convolutions={}), 1e-4, rounds=2)


def test_measured_ways_equal_the_reference():
    task = conv_task("cnn4", rounds=10**6)  # so many that all is tried
    plan = Rounds(method("fedavg"), task, 0).plan
    if plan.mode == "stacked":
        assert len(plan.convolutions) == 5  # two layers; nobody wants the gradient to images
    for way in ("grouped", "64 64 32 4 3"):
        ways = dict.fromkeys(plan.convolutions or {}, way)
        assert_same(method("fedavg"), task, Plan("stacked", "captured", chunk=4, convolutions=ways), 1e-4, rounds=1)
    assert fastest([], 4, torch.device("cuda"), torch.float32) == {}


@pytest.mark.parametrize("alg", ["fedavg", "fedrep", "scaffold"])
def test_compiled_steps_equal_the_reference(alg):
    plan = Plan("stacked", "captured", chunk=4, shrink=0, convolutions={}, compiled=True)
    assert_same(method(alg), conv_task("cnn4"), plan, 1e-4, rounds=2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg", "scaffold"])
def test_own_products_and_dropout_equal_the_reference(alg, compiled, monkeypatch):
    calls, take = [], products._triton()
    for name in ("product", "subtract"):
        kernel = getattr(take, name)
        monkeypatch.setattr(take, name, lambda *args, kernel=kernel: calls.append(1) or kernel(*args))
    monkeypatch.setattr(products, "LEAST", 1)
    task = make_task((5, 1, 19, 12), dropout=0.3, device="cuda", dtype=torch.float32)
    plan = Plan("stacked", "captured", chunk=4, shrink=0, compiled=compiled)
    assert_same(method(alg), task, plan, 1e-4, rounds=2)
    assert calls


def test_memory_does_not_grow_over_rounds():
    run = Rounds(method("ditto"), conv_task("cnn4"), 0, plan=Plan("stacked", "captured", chunk=2, convolutions={}))
    held = []
    for _ in range(6):
        run.advance()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert held[2] == held[5]


def test_a_gpu_that_is_too_small_gets_fewer_clients_at_once(caplog):
    sizes = (20,) * 64
    alg, plan = method("fedavg"), Plan("stacked", "captured", chunk=64)
    task = conv_task("cnn4", sizes=sizes, batch_size=64)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    expected, _ = play(alg, task, plan, rounds=1)
    peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    server = expected.server
    del expected
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(0.6 * peak / total)
        with caplog.at_level(logging.WARNING, "fedloom"):
            found, _ = play(alg, task, plan, rounds=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "Out of memory with 64 clients at once: going on with 32." in caplog.text
    for name, value in server["w"].items():
        torch.testing.assert_close(found.server["w"][name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it may miss some, but finds copies that wait
@pytest.mark.parametrize("after", [0, 100], ids=["traced", "called"])
@pytest.mark.parametrize("alg", ["fedavg", "ditto", "scaffold", "gpfl", "fedrep", "mapper"])
def test_a_round_waits_for_the_device_where_it_fetches_results_and_nowhere_else(alg, after, monkeypatch):
    """Half of eight clients train in a round, so some come for the first time, and some are not evaluated."""
    monkeypatch.setattr(replayed, "AFTER", after)
    task = conv_task("cnn4", sizes=(8,) * 8, participation=0.5)
    plan = Plan("stacked", "captured", chunk=4, convolutions={})
    run = Rounds(method(alg), task, 0, plan=plan, evaluated=np.array([1, 2, 5]))
    run.advance()  # steps are captured
    fetched = []

    def waiting(tree):
        fetched.append(leaves(tree))
        torch.cuda.set_sync_debug_mode("default")
        found = fetch(tree)
        torch.cuda.set_sync_debug_mode("error")
        return found

    monkeypatch.setattr(rounds, "fetch", waiting)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            run.advance(evaluate=False)
        with pytest.raises(RuntimeError, match="synchroniz"):  # so the mode is on
            leaves(run.server)[0].sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([found for found in fetched if found]) == 5


def test_scores_from_traces_change_no_byte(monkeypatch):
    """Which are captured, with own pooling."""
    task, found, scores = conv_task("cnn4"), [], {"personal", "shared"}
    for after in (0, 10**6):
        monkeypatch.setattr(replayed, "AFTER", after)
        run = Rounds(method("ditto"), task, 0, plan=Plan("stacked", "captured", chunk=4, convolutions={}))
        found.append([v.tobytes() for v in leaves([run.advance().scores for _ in range(2)])])
        programs = run.executor.replayed.programs
        own = {key[0] for key, v in programs.items() if key[0] in scores and "fedloom.pool" in v.run.program.code}
        assert own == (scores if after == 0 else set())
    assert found[0] == found[1]
