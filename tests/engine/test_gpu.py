"""What a GPU does differently: own convolutions and products, compiled steps, memory."""

import logging

import numpy as np
import pytest
import torch
from helpers import SingleRun, assert_same, make_task, method, model_task, play

from fedloom.core.tree import leaves
from fedloom.engine.planning.plan import Plan
from fedloom.engine.planning.tuning import fastest
from fedloom.engines import choose, replayed, rounds
from fedloom.nn.kernels import matmul as products
from fedloom.nn.kernels.dispatch import triton

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


EXACT = {"float32": (2**-24, 3, "tf32x3"), "tf32": (2**-10, 2, "tf32"), "bf16": (2**-8, 1, "tf32")}


@pytest.mark.parametrize(
    ("name", "alg"), [("cnn4", "fedavg"), ("cnn4", "gpfl"), ("resnet18_gn", "gpfl"), ("lstm_shakes", "fedavg")]
)
def test_training_that_rounds_is_off_by_what_rounding_explains(name, alg, monkeypatch):
    """With an error of u, a share of about u of the units of a layer is on where it should be off, or is not the
    largest in its window. Each is a part of the gradient too many or too few, so the square of the gradient's error is
    u for a layer, and L u for a network: no tensor's change may be further off than sqrt(L u) of itself, 0.06 to 0.29
    here. The kernels' rounding in plain operations gives 0.002 to 0.006 (tf32) and up to 0.13 (bf16); a convolution
    without its bias gives 0.4, one that lacks a tap or has its kernel the wrong way round more than 1."""
    used = noted(monkeypatch)
    exact = changes(method(alg), rounded_task(name, "float64"), Plan("per-client"))
    found = {}
    for dtype, (u, *kinds) in EXACT.items():
        used.clear()
        task = rounded_task(name, dtype)
        with _precision(dtype):
            plan = Plan("stacked", "captured", chunk=3, convolutions={})
            found[dtype] = changes(method(alg), task, plan)
        assert used == {kinds["lstm" in name]}
        bound = max(0.01, (len(task.layers) * u) ** 0.5)
        for mine, right in zip(found[dtype], exact, strict=True):
            assert (mine - right).norm() <= bound * right.norm()
    for dtype in ("tf32", "bf16"):
        assert not all(torch.equal(mine, full) for mine, full in zip(found[dtype], found["float32"], strict=True))


def rounded_task(name, dtype):
    """In steps so short that errors do not feed on themselves, and so long that weights can hold their changes."""
    more = {"dtype": torch.float64 if dtype == "float64" else torch.float32, "half": dtype == "bf16"}
    more |= {"sizes": (30, 16, 40), "batch_size": 20}
    if name == "lstm_shakes":
        return model_task(name, (12,), vocab=9, device="cuda", options={"width": 22}, lr=0.5, **more)  # by Triton
    return conv_task(name, signal=2.0, lr=0.001, **more)


def noted(monkeypatch):
    """The pieces that convolutions multiply, and how the steps of LSTMs are multiplied."""
    found = set()
    for kernels, names, kind in (
        (triton("conv"), ("correlate", "weight_gradient"), lambda x, *_: x.shape[1]),
        (triton("lstm"), ("forward", "backward"), lambda *args: args[-1]),
    ):
        for name in names:
            kernel = getattr(kernels, name)
            monkeypatch.setattr(
                kernels, name, lambda *args, kernel=kernel, kind=kind: found.add(kind(*args)) or kernel(*args)
            )
    return found


def changes(alg, task, plan):
    """Of everything that server and clients keep, in three rounds."""
    run = SingleRun(alg, task, 7, plan=plan)

    def kept():
        values = leaves((run.server, run.store.everyone()["own"]))
        return [v.to("cpu", torch.float64, copy=True) for v in values if v.is_floating_point()]

    before = kept()
    for _ in range(3):
        run.advance(evaluate=False)
    return [now - was for now, was in zip(kept(), before, strict=True)]


def test_measured_ways_equal_the_reference(monkeypatch):
    task, found = conv_task("cnn4", rounds=10**6), []  # so many that all is tried
    monkeypatch.setattr(choose, "fastest", lambda *args: found.append(fastest(*args)) or found[-1])
    SingleRun(method("fedavg"), task, 0)
    [measured] = found
    assert len(measured) == 5  # two layers; nobody wants the gradient to images
    for way in ("grouped", "64 64 32 4 3"):
        ways = dict.fromkeys(measured, way)
        assert_same(method("fedavg"), task, Plan("stacked", "captured", chunk=4, convolutions=ways), 1e-4, rounds=1)
    assert fastest([], 4, torch.device("cuda"), torch.float32) == {}


@pytest.mark.parametrize("alg", ["fedavg", "fedrep", "scaffold"])
def test_compiled_steps_equal_the_reference(alg):
    plan = Plan("stacked", "captured", chunk=4, shrink=0, convolutions={}, compiled=True)
    assert_same(method(alg), conv_task("cnn4"), plan, 1e-4, rounds=2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg", "scaffold"])
def test_own_products_and_dropout_equal_the_reference(alg, compiled, monkeypatch):
    calls, take = [], triton("products")
    for name in ("product", "subtract"):
        kernel = getattr(take, name)
        monkeypatch.setattr(take, name, lambda *args, kernel=kernel: calls.append(1) or kernel(*args))
    monkeypatch.setattr(products, "LEAST", 1)
    task = make_task((5, 1, 19, 12), dropout=0.3, device="cuda", dtype=torch.float32)
    plan = Plan("stacked", "captured", chunk=4, shrink=0, compiled=compiled)
    assert_same(method(alg), task, plan, 1e-4, rounds=2)
    assert calls


def test_memory_does_not_grow_over_rounds(monkeypatch):
    monkeypatch.setattr(replayed, "AFTER", 0)
    run = SingleRun(method("ditto"), conv_task("cnn4"), 0, plan=Plan("stacked", "captured", chunk=2, convolutions={}))
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
    run = SingleRun(method(alg), task, 0, plan=plan, evaluated=np.array([1, 2, 5]))
    run.advance()  # steps are captured
    fetched = []

    def waiting(tree):
        fetched.append(leaves(tree))
        torch.cuda.set_sync_debug_mode("default")
        found = to_numpy(tree)
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
        run = SingleRun(method("ditto"), task, 0, plan=Plan("stacked", "captured", chunk=4, convolutions={}))
        found.append([v.tobytes() for v in leaves([run.advance().scores for _ in range(2)])])
        programs = run.executor.call.traced
        own = {key[0] for key, v in programs.items() if key[0] in scores and "fedloom.pool" in v.run.program.code}
        assert own == (scores if after == 0 else set())
    assert found[0] == found[1]
