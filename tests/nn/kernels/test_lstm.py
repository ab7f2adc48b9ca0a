"""An LSTM layer by kernels: states, gradients and second derivatives are those of the steps in plain operations."""

import os
from functools import cache

import pytest
import torch
from emulated import Emulated, compiles
from helpers import assert_same, method, model_task

from fedloom.core.autodiff import vmap
from fedloom.engine.planning.plan import Plan
from fedloom.nn.kernels import lstm as module
from fedloom.nn.kernels.hopper import lstm as lstm_cuda
from fedloom.nn.kernels.lstm import Lstm, Stepwise, lstm, lstm_backward, lstm_forward

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

DOUBLE = torch.float64


def given(n, steps, batch, size, dtype=DOUBLE, device="cpu"):
    """z, h, c, w and bias of n clients."""
    torch.manual_seed(0)
    shapes = (n, steps, batch, 4 * size), (n, batch, size), (n, batch, size), (n, 4 * size, size), (n, 4 * size)
    z, h, c, w, bias = (torch.randn(shape, dtype=DOUBLE).to(device, dtype) for shape in shapes)
    return z, h, c, w * size**-0.5, bias


def stepwise(z, h, c, w, bias):
    return Stepwise.apply(z + bias, h, c, w)


def derivatives(layer, inputs):
    """Of a function of both outputs: gradients, and gradients of a function of them."""

    def loss(*inputs):
        hs, cs = layer(*inputs)[:2]
        return (hs**3).sum() + (torch.tanh(cs) * hs.detach().cos()).sum()

    def length(*inputs):
        return sum((g**2).sum() for g in torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))(*inputs))

    both = [torch.func.grad(f, argnums=(0, 1, 2, 3, 4)) for f in (loss, length)]
    return [g for f in both for g in vmap(f)(*inputs)]


def test_by_the_operators_first_and_second_derivatives_are_those_of_the_steps():
    """Of clients in several runs."""
    inputs = [v.unflatten(0, (2, 3)) for v in given(6, 4, 2, 3)]
    ways = (vmap(lambda *v, f=f: derivatives(f, v))(*inputs) for f in (Lstm.apply, stepwise))
    for found, expected in zip(*ways, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_one_client_at_a_time_the_operators_can_be_differentiated_twice():
    inputs = [v[0].requires_grad_() for v in given(1, 3, 2, 2)]
    assert torch.autograd.gradcheck(lambda *v: Lstm.apply(*v)[:2], inputs)
    assert torch.autograd.gradgradcheck(lambda *v: Lstm.apply(*v)[:2], inputs)


def test_the_operators_say_what_they_will_return():
    inputs = given(2, 3, 4, 5)
    for keep in (True, False):
        torch.library.opcheck(lstm_forward, (*inputs, keep))
    hs, cs, gates = lstm_forward(*inputs, True)
    _, _, c, w, _ = inputs
    torch.library.opcheck(lstm_backward, (hs, cs, gates, c, cs, w))


@pytest.fixture
def everywhere(monkeypatch):
    """As on a GPU in float32."""
    monkeypatch.setattr(module, "_own_kernels", lambda z: True)


def test_gates_are_kept_where_there_will_be_a_backward_pass(everywhere, monkeypatch):
    inputs, kept = [v[0] for v in given(1, 3, 2, 2)], []

    def noted(*args):
        kept.append(args[-1])
        return lstm_forward(*args)

    monkeypatch.setattr(module, "lstm_forward", noted)
    with_gates = lstm(*inputs)
    with torch.no_grad():
        without = lstm(*inputs)
    assert kept == [True, False]
    torch.testing.assert_close(with_gates, without)


@pytest.mark.parametrize("replay", ["eager", "traced"])
def test_training_by_the_operators_is_that_by_torchs_layers(everywhere, replay):
    """Evaluation, too; the method differentiates a gradient, and clients share a model at the start."""
    options = {"vocab": 9, "options": {"width": 5, "dropout": 0.3}}
    task = model_task("lstm_shakes", (4,), **options)
    assert_same(method("per-fedavg"), task, Plan("stacked", replay, chunk=3), 1e-9, rounds=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("lstm_shakes", {"options": {"width": 20}}),
        ("lstm_shakes", {"options": {"width": 22}}),  # by Triton
        ("lstm_so", {"classes": None, "options": {"width": 40}}),
    ],
)
def test_in_single_precision_captured_graphs_give_what_torchs_layers_give(name, more):
    task = model_task(name, (12,), vocab=9, device="cuda", dtype=torch.float32, **more)
    assert_same(method("fedavg"), task, Plan("stacked", "captured", chunk=3), 1e-4, rounds=2)


@pytest.fixture
def kernels():
    pytest.importorskip("triton")
    from fedloom.nn.kernels.triton import lstm as lstm_triton

    return lstm_triton, torch.device("cuda" if torch.cuda.is_available() else "cpu")


CASES = [  # clients, steps, samples, units; tiles; samples of a program
    ((2, 3, 10, 20), (32, 16, 4, 2), 16),  # one block of units
    ((2, 3, 5, 37), (16, 16, 4, 2), 16),  # three, of which the last is ragged
    ((3, 1, 1, 16), None, 16),
    ((2, 2, 35, 18), (32, 32, 4, 1), 16),  # three programs share a client
    ((2, 2, 35, 18), None, 32),
]


@pytest.mark.parametrize(("shape", "tiles", "samples"), CASES, ids=str)
def test_kernels_give_what_the_steps_give(kernels, shape, tiles, samples, monkeypatch):
    triton, device = kernels
    monkeypatch.setattr(triton, "PROGRAMS", {16: 132, 32: 1}[samples])
    rest = "tf32x3", triton.Tiles(*tiles) if tiles else None
    check(lambda *given: triton.forward(*given, *rest), lambda *given: triton.backward(*given, *rest), shape, device)


def check(forward, backward, shape, device):
    inputs = given(*shape, torch.float32, device)
    z, h, c, w, bias = inputs
    double = [v.double() for v in inputs]
    expected, pull = torch.func.vjp(torch.func.vmap(stepwise), *double)

    def close(found, wanted):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)

    def across(x):  # samples first in memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    hs, cs, gates = forward(across(z), h, c, w, bias, True)
    close(hs, expected[0])
    close(cs, expected[1])
    again, _, none = forward(*inputs, False)
    assert torch.equal(again, hs)
    assert none.numel() == 0
    dhs, dcs = across(torch.randn_like(hs)), across(torch.randn_like(cs))
    *wanted, _, bias_wanted = pull((dhs.double(), dcs.double()))
    for found, gradient in zip(backward(dhs, dcs, gates, c, cs, w), (*wanted, bias_wanted), strict=True):
        close(found, gradient)
    if shape[0] == 2:  # clients that share their weights
        shared = [v[:1].expand_as(v) for v in (w, bias)]
        found = forward(z, h, c, *shared, False)[0]
        close(found, torch.func.vmap(stepwise)(*double[:3], *(v.double() for v in shared))[0])


WITHIN = [  # clients, steps, samples, units; as if twelve warps could have no more units
    ((2, 3, 10, 20), 16),  # a whole tile of samples, and one that halves of numbers share
    ((1, 2, 13, 12), 96),  # two programs with a whole tile each, warps with too few units
    ((2, 2, 3, 12), 96),
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lstm")

    @cache
    def kernels(**constants):
        return Emulated(folder, "lstm.cu", ("forward", "backward", "rooms"), **constants)

    return kernels


@pytest.fixture
def within(emulated, monkeypatch):
    """The device whose kernels keep the weights. A CPU needs a compiler that knows C++20."""
    if not torch.cuda.is_available() and not compiles("#include <barrier>"):
        pytest.skip("no compiler for C++20")

    def prepare(size, most):
        if torch.cuda.is_available():
            assert lstm_cuda.takes(torch.device("cuda", 0), size)
            return torch.device("cuda", 0)
        monkeypatch.setattr(lstm_cuda, "IN_TWELVE_WARPS", most)
        monkeypatch.setattr(lstm_cuda, "kernels", lambda device, *given: emulated(**lstm_cuda.constants(*given)))
        lstm_cuda.rooms.cache_clear()
        return torch.device("cpu")

    return prepare


@pytest.mark.parametrize(("shape", "most"), WITHIN, ids=str)
def test_kernels_that_keep_the_weights_give_what_the_steps_give(within, shape, most):
    check(lstm_cuda.forward, lstm_cuda.backward, shape, within(shape[-1], most))


def test_kernels_that_keep_the_weights_take_gradients_of_any_size(within):
    """They are multiplied as halves (16 bits), so those of a step are brought to a size that fits."""
    device = within(12, 96)
    inputs = given(1, 4, 3, 12, torch.float32, device)
    _, _, c, w, _ = inputs
    _, pull = torch.func.vjp(torch.func.vmap(stepwise), *(v.double() for v in inputs))
    sizes = torch.tensor([1e-9, 1, 1e-20, 1e-12], device=device)[:, None, None]
    dhs = torch.randn(1, 4, 3, 12, device=device) * sizes
    dcs = torch.zeros_like(dhs)
    _, cs, gates = lstm_cuda.forward(*inputs, True)
    found, expected = lstm_cuda.backward(dhs, dcs, gates, c, cs, w)[0], pull((dhs.double(), dcs.double()))[0]
    largest = expected.abs().amax((0, 2, 3))
    assert largest.max() > 1e9 * largest.min()
    assert ((found.double() - expected).abs().amax((0, 2, 3)) < 1e-6 * largest).all()


def test_kernels_that_keep_the_weights_take_rows_that_begin_anywhere(within):
    z, h, c, w, bias = given(1, 2, 3, 12, torch.float32, within(12, 96))

    def moved(x):
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)

    hs, cs, gates = lstm_cuda.forward(z, h, c, w, bias, True)
    assert torch.equal(lstm_cuda.forward(*map(moved, (z, h, c, w, bias)), True)[2], gates)
    inputs = hs, cs, gates, c, cs, w
    assert torch.equal(lstm_cuda.backward(*map(moved, inputs))[0], lstm_cuda.backward(*inputs)[0])
