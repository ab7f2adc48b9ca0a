"""What is different on a GPU: kernels for convolutions and matrix products, compiled steps, memory, synchronization."""

import logging
from importlib import import_module

import numpy as np
import pytest
import torch
from helpers import SingleRun, assert_same, make_task, method, model_task, run_and_evaluate

from fedloom.core.tree import leaves
from fedloom.device.torch_settings import precision
from fedloom.device.transfer import to_numpy
from fedloom.engine import driver
from fedloom.engine.graph import function_cache
from fedloom.engine.plan import Plan
from fedloom.engine.planning import choose
from fedloom.engine.planning.tuning import fastest_algos
from fedloom.nn.kernels import matmul

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CONVOLUTIONS = {
    "cnn4": ((1, 28, 28), {}),
    "harcnn": ((2, 1, 28), {}),
    "resnet18_gn": ((2, 16, 16), {"options": {"width": 8}}),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """float32 is not rounded to TF32."""
    for place in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(place, "allow_tf32", False)


def conv_task(name, **settings):
    shape, more = CONVOLUTIONS[name]
    return model_task(name, shape, **{"device": "cuda", "dtype": torch.float32, "lr": 0.02, **more, **settings})


def triton_kernels(name):
    """A module that cannot be imported without Triton."""
    return import_module(f"fedloom.nn.kernels.triton.{name}")


@pytest.mark.parametrize("alg", ["fedavg", "gpfl", "per-fedavg"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_stacked_convolutions_equal_the_reference(name, alg):
    assert_same(method(alg), conv_task(name), Plan("stacked", "captured", chunk=3, convolutions={}), 1e-4, rounds=2)


# unit roundoff, bf16 splits of a number in convolutions, precision of products in LSTMs
ROUNDING = {"float32": (2**-24, 3, "tf32x3"), "tf32": (2**-10, 2, "tf32"), "bf16": (2**-8, 1, "tf32")}


@pytest.mark.parametrize(
    ("name", "alg"), [("cnn4", "fedavg"), ("cnn4", "gpfl"), ("resnet18_gn", "gpfl"), ("lstm_shakes", "fedavg")]
)
def test_the_error_of_training_in_low_precision_is_bounded_by_rounding(name, alg, monkeypatch):
    """With a rounding error of u, a share of about u of the units of a layer is active and should not be, or is not the
    maximum of its pooling window. Each adds a term to the gradient or removes one, so the square of the gradient's
    relative error is u for a layer, and L u for a network of L layers: the change of a tensor may have a relative error
    of sqrt(L u), 0.06 to 0.29 here. Plain operations with the rounding of the kernels have 0.002 to 0.006 (tf32) and up
    to 0.13 (bf16); a convolution without its bias has 0.4, one without a kernel element or with a flipped kernel more
    than 1."""
    used = used_precisions(monkeypatch)
    exact = changes(method(alg), rounded_task(name, "float64"), Plan("per-client"))
    found = {}
    for dtype, (u, *kinds) in ROUNDING.items():
        used.clear()
        task = rounded_task(name, dtype)
        with precision(dtype):
            plan = Plan("stacked", "captured", chunk=3, convolutions={})
            found[dtype] = changes(method(alg), task, plan)
        assert used == {kinds["lstm" in name]}
        bound = max(0.01, (len(task.layers) * u) ** 0.5)
        for mine, right in zip(found[dtype], exact, strict=True):
            assert (mine - right).norm() <= bound * right.norm()
    for dtype in ("tf32", "bf16"):
        assert not all(torch.equal(mine, full) for mine, full in zip(found[dtype], found["float32"], strict=True))


def rounded_task(name, dtype):
    """With a learning rate so small that errors do not grow, and so large that weights can represent their changes."""
    more = {"dtype": torch.float64 if dtype == "float64" else torch.float32, "half": dtype == "bf16"}
    more |= {"sizes": (30, 16, 40), "batch_size": 20}
    if name == "lstm_shakes":
        more |= {"options": {"width": 22}, "lr": 0.5}  # a width that Hopper's kernel does not take
        return model_task(name, (12,), vocab=9, device="cuda", **more)
    return conv_task(name, signal=2.0, lr=0.001, **more)


def used_precisions(monkeypatch):
    """Collects the number of bf16 splits in convolutions, and the precision of products in LSTMs."""
    found = set()
    for kernels, names, kind in (
        (triton_kernels("convolution"), ("correlate", "weight_gradient"), lambda x, *_: x.shape[1]),
        (triton_kernels("lstm"), ("forward", "backward"), lambda *args: args[-1]),
    ):
        for name in names:
            kernel = getattr(kernels, name)
            monkeypatch.setattr(
                kernels, name, lambda *args, kernel=kernel, kind=kind: found.add(kind(*args)) or kernel(*args)
            )
    return found


def changes(alg, task, plan):
    """How three rounds change the state of the server and of the clients."""
    run = SingleRun(alg, task, 7, plan=plan)

    def kept():
        values = leaves((run.server, run.store.everyone()["own"]))
        return [v.to("cpu", torch.float64, copy=True) for v in values if v.is_floating_point()]

    before = kept()
    for _ in range(3):
        run.advance(evaluate=False)
    return [now - was for now, was in zip(kept(), before, strict=True)]


def test_tuned_convolutions_equal_the_reference(monkeypatch):
    task, found = conv_task("cnn4", rounds=10**6), []  # so many rounds that tuning pays
    monkeypatch.setattr(choose, "fastest_algos", lambda *args: found.append(fastest_algos(*args)) or found[-1])
    SingleRun(method("fedavg"), task, 0)
    [measured] = found
    assert len(measured) == 5  # three for each of two layers, but no gradient to the images
    for algo in ("grouped", "64 64 32 4 3"):
        algos = dict.fromkeys(measured, algo)
        assert_same(method("fedavg"), task, Plan("stacked", "captured", chunk=4, convolutions=algos), 1e-4, rounds=1)
    assert fastest_algos([], 4, torch.device("cuda"), torch.float32) == {}


@pytest.mark.parametrize("alg", ["fedavg", "fedrep", "scaffold"])
def test_compiled_steps_equal_the_reference(alg):
    plan = Plan("stacked", "captured", chunk=4, shrink=0, convolutions={}, compiled=True)
    assert_same(method(alg), conv_task("cnn4"), plan, 1e-4, rounds=2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg", "scaffold"])
def test_matmul_and_dropout_kernels_equal_the_reference(alg, compiled, monkeypatch):
    calls, kernels = [], triton_kernels("matmul")
    for name in ("batched_matmul", "subtract_matmul"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, kernel=kernel: calls.append(1) or kernel(*args))
    monkeypatch.setattr(matmul, "MIN_WEIGHTS", 1)
    task = make_task((5, 1, 19, 12), dropout=0.3, device="cuda", dtype=torch.float32)
    plan = Plan("stacked", "captured", chunk=4, shrink=0, compiled=compiled)
    assert_same(method(alg), task, plan, 1e-4, rounds=2)
    assert calls


def test_memory_does_not_grow_over_rounds(monkeypatch):
    monkeypatch.setattr(function_cache, "CALLS_BEFORE_CAPTURE", 0)
    run = SingleRun(method("ditto"), conv_task("cnn4"), 0, plan=Plan("stacked", "captured", chunk=2, convolutions={}))
    used = []
    for _ in range(6):
        run.advance()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert used[2] == used[5]


def test_fewer_clients_are_stacked_when_gpu_memory_is_short(caplog):
    sizes = (20,) * 64
    alg, plan = method("fedavg"), Plan("stacked", "captured", chunk=64)
    task = conv_task("cnn4", sizes=sizes, batch_size=64)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    expected, _ = run_and_evaluate(alg, task, plan, rounds=1)
    peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    server = expected.server
    del expected
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(0.6 * peak / total)
        with caplog.at_level(logging.WARNING, "fedloom"):
            found, _ = run_and_evaluate(alg, task, plan, rounds=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "Out of memory with 64 clients at once: going on with 32." in caplog.text
    for name, value in server["w"].items():
        torch.testing.assert_close(found.server["w"][name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it may miss some, but finds copies that wait
@pytest.mark.parametrize("calls", [0, 100], ids=["captured", "called"])
@pytest.mark.parametrize("alg", ["fedavg", "ditto", "scaffold", "gpfl", "fedrep", "mapper"])
def test_a_round_waits_for_the_device_only_when_it_copies_results_to_the_host(alg, calls, monkeypatch):
    """Half of eight clients train in a round, so some train for the first time, and some are not evaluated."""
    monkeypatch.setattr(function_cache, "CALLS_BEFORE_CAPTURE", calls)
    task = conv_task("cnn4", sizes=(8,) * 8, participation=0.5)
    plan = Plan("stacked", "captured", chunk=4, convolutions={})
    run = SingleRun(method(alg), task, 0, plan=plan, eval_client_ids=np.array([1, 2, 5]))
    run.advance()  # steps are captured
    copied = []

    def waiting(tree):
        copied.append(leaves(tree))
        torch.cuda.set_sync_debug_mode("default")
        found = to_numpy(tree)
        torch.cuda.set_sync_debug_mode("error")
        return found

    monkeypatch.setattr(driver, "to_numpy", waiting)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            run.advance(evaluate=False)
        with pytest.raises(RuntimeError, match="synchroniz"):  # so the mode is on
            leaves(run.server)[0].sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([found for found in copied if found]) == 5


def test_captured_scoring_is_the_same_to_the_bit(monkeypatch):
    """Scores from CUDA graphs with the kernel for max-pooling, and from direct calls."""
    task, found, scoring = conv_task("cnn4"), [], {"personal", "shared"}
    for calls in (0, 10**6):
        monkeypatch.setattr(function_cache, "CALLS_BEFORE_CAPTURE", calls)
        run = SingleRun(method("ditto"), task, 0, plan=Plan("stacked", "captured", chunk=4, convolutions={}))
        found.append([v.tobytes() for v in leaves([run.advance().scores for _ in range(2)])])
        traced = [(key[0], function.run) for key, function in run.executor.call.traced.items() if key[0] in scoring]
        with_kernel = {name for name, captured in traced if "fedloom.max_pool" in captured.module.code}
        assert with_kernel == (scoring if calls == 0 else set())
    assert found[0] == found[1]
