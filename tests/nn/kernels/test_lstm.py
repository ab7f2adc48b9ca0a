"""An LSTM layer by kernels: states, gradients and second derivatives are those of the steps in plain operations."""

from functools import cache

import pytest
import torch
from emulated import Emulated, compiles, session_folder
from helpers import assert_same, method, model_task

from fedloom.core.autodiff import vmap
from fedloom.engine.plan import Plan
from fedloom.nn.kernels import lstm as layer
from fedloom.nn.kernels.gpu import H100, SHARED_KIB
from fedloom.nn.kernels.hopper import lstm as hopper
from fedloom.nn.kernels.lstm import Lstm, Stepwise, lstm, lstm_backward, lstm_forward

DOUBLE = torch.float64


def given(n, steps, batch, size, dtype=DOUBLE, device="cpu"):
    """z, h, c, w and bias of n clients."""
    shapes = (n, steps, batch, 4 * size), (n, batch, size), (n, batch, size), (n, 4 * size, size), (n, 4 * size)
    z, h, c, w, bias = (torch.randn(shape, dtype=DOUBLE).to(device, dtype) for shape in shapes)
    return z, h, c, w * size**-0.5, bias


def stepwise(z, h, c, w, bias):
    return Stepwise.apply(z + bias, h, c, w)


# -- operators -------------------------------------------------------------------------------------------------------


def derivatives(f, inputs):
    """Of a function of both outputs: gradients, and gradients of a function of them."""

    def loss(*inputs):
        hs, cs = f(*inputs)[:2]
        return (hs**3).sum() + (torch.tanh(cs) * hs.detach().cos()).sum()

    def squared_norm(*inputs):
        return sum((g**2).sum() for g in torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))(*inputs))

    both = [torch.func.grad(f, argnums=(0, 1, 2, 3, 4)) for f in (loss, squared_norm)]
    return [g for f in both for g in vmap(f)(*inputs)]


def test_by_the_operators_first_and_second_derivatives_are_those_of_the_steps():
    """For clients of several stacked runs."""
    inputs = [v.unflatten(0, (2, 3)) for v in given(6, 4, 2, 3)]
    both = (vmap(lambda *v, f=f: derivatives(f, v))(*inputs) for f in (Lstm.apply, stepwise))
    for found, expected in zip(*both, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_for_one_client_the_operators_can_be_differentiated_twice():
    inputs = [v[0].requires_grad_() for v in given(1, 3, 2, 2)]
    assert torch.autograd.gradcheck(lambda *v: Lstm.apply(*v)[:2], inputs)
    assert torch.autograd.gradgradcheck(lambda *v: Lstm.apply(*v)[:2], inputs)


def test_fake_tensors_have_the_shapes_of_the_results():
    inputs = given(2, 3, 4, 5)
    for keep in (True, False):
        torch.library.opcheck(lstm_forward, (*inputs, keep))
    hs, cs, gates = lstm_forward(*inputs, True)
    _, _, c, w, _ = inputs
    torch.library.opcheck(lstm_backward, (hs, cs, gates, c, cs, w))


@pytest.fixture
def by_operators(monkeypatch):
    """Layers use the operators, as on a GPU in float32."""
    monkeypatch.setattr(layer, "_use_kernel", lambda z: True)


@pytest.mark.usefixtures("by_operators")
def test_gates_are_kept_where_there_will_be_a_backward_pass(monkeypatch):
    inputs, kept = [v[0] for v in given(1, 3, 2, 2)], []

    def noted(*args):
        kept.append(args[-1])
        return lstm_forward(*args)

    monkeypatch.setattr(layer, "lstm_forward", noted)
    with_gates = lstm(*inputs)
    with torch.no_grad():
        without = lstm(*inputs)
    assert kept == [True, False]
    torch.testing.assert_close(with_gates, without)


@pytest.mark.usefixtures("by_operators")
def test_a_layer_without_biases_has_biases_of_zero():
    z, h, c, w, bias = (v[0] for v in given(1, 3, 2, 2))
    torch.testing.assert_close(lstm(z, h, c, w, None), lstm(z, h, c, w, torch.zeros_like(bias)))


@pytest.mark.usefixtures("by_operators")
@pytest.mark.parametrize("replay", ["eager", "traced"])
def test_training_by_the_operators_is_that_by_torchs_layers(replay):
    """Evaluation, too; the method differentiates a gradient, and clients share a model at the start."""
    options = {"vocab": 9, "options": {"width": 5, "dropout": 0.3}}
    task = model_task("lstm_shakes", (4,), sizes=(5, 1, 9), **options)
    assert_same(method("per-fedavg"), task, Plan("stacked", replay, chunk=3), 1e-9, rounds=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("lstm_shakes", {"options": {"width": 20}}),
        ("lstm_shakes", {"options": {"width": 22}}),  # no multiple of 4, so by Triton
        ("lstm_so", {"classes": None, "options": {"width": 40}}),
    ],
)
def test_captured_graphs_in_float32_give_what_torchs_layers_give(name, more):
    task = model_task(name, (12,), vocab=9, device="cuda", dtype=torch.float32, **more)
    assert_same(method("fedavg"), task, Plan("stacked", "captured", chunk=3), 1e-4, rounds=2)


# -- kernels ---------------------------------------------------------------------------------------------------------


def check(forward, backward, shape, device, evaluation=True):
    """Forward and backward pass against the plain steps in float64, for rows in other orders in memory and for shared
    weights. In evaluation, gates are not kept."""
    inputs = given(*shape, torch.float32, device)
    z, h, c, w, bias = inputs
    double = [v.double() for v in inputs]
    expected, pull = torch.func.vjp(torch.func.vmap(stepwise), *double)

    def close(found, expected):
        largest = max(1.0, float(expected.abs().max()))  # gradients of biases are sums over all steps and samples
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=5e-6 * largest)

    def samples_first(x):  # in memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    hs, cs, gates = forward(samples_first(z), h, c, w, bias, True)
    close(hs, expected[0])
    close(cs, expected[1])
    if evaluation:
        again, _, none = forward(*inputs, False)
        close(again, expected[0])
        assert none.numel() == 0
    dhs, dcs = samples_first(torch.randn_like(hs)), samples_first(torch.randn_like(cs))
    *to_inputs, _, to_bias = pull((dhs.double(), dcs.double()))
    for found, gradient in zip(backward(dhs, dcs, gates, c, cs, w), (*to_inputs, to_bias), strict=True):
        close(found, gradient)
    if shape[0] == 2:  # clients that share their weights
        shared = [v[:1].expand_as(v) for v in (w, bias)]
        found = forward(z, h, c, *shared, True)[0]
        close(found, torch.func.vmap(stepwise)(*double[:3], *(v.double() for v in shared))[0])


@pytest.fixture
def kernels(triton_module):
    return triton_module("lstm")


CASES = [  # clients, steps, samples, units; tiles; SMs, of which few mean more samples for a program
    ((2, 3, 5, 20), (32, 16, 4, 2), 132),  # all units at once
    ((2, 2, 5, 20), (16, 16, 4, 2), 132),  # in two blocks, of which the last is ragged
    ((3, 1, 1, 16), None, 132),
    ((1, 2, 35, 18), (32, 32, 4, 1), 132),  # several programs share a client
    ((1, 2, 35, 18), None, 1),
]


@pytest.mark.parametrize(("shape", "tiles", "sms"), CASES, ids=str)
def test_triton_kernels_give_what_the_steps_give(kernels, device, shape, tiles, sms, monkeypatch):
    monkeypatch.setattr(kernels, "gpu_properties", lambda device: H100._replace(sms=sms))
    rest = "tf32x3", kernels.Tiles(*tiles) if tiles else None
    check(lambda *v: kernels.forward(*v, *rest), lambda *v: kernels.backward(*v, *rest), shape, device)


def test_programs_have_more_samples_where_all_sms_have_work(kernels):
    few, many = kernels.rows_per_program(1, 100, 132), kernels.rows_per_program(1000, 100, 132)
    assert 16 <= few < many <= kernels.MAX_ROWS
    assert kernels.rows_per_program(1000, 10, 132) == few  # there are no more samples


@pytest.mark.parametrize("size", [3, 16, 37, 100, 512])
@pytest.mark.parametrize("rows", [16, 32])
def test_default_tiles_are_powers_of_two_that_fit_the_layer(kernels, size, rows):
    tiles = kernels.default_tiles(size, rows, H100.shared_bytes)
    assert all(v & (v - 1) == 0 for v in tiles[:3])
    assert 16 <= tiles.units < 2 * max(16, size)
    assert 16 <= tiles.depth < 2 * max(16, size)
    assert tiles.stages == 3


def test_there_are_fewer_stages_where_shared_memory_is_small(kernels):
    """The backward pass of a wide layer keeps 4 * 32 * (16 + 128) numbers of 4 bytes per stage, which is 72 KiB, for
    all stages but one."""
    stages = {kib: kernels.default_tiles(100, 16, kib << 10).stages for kib in sorted(set(SHARED_KIB.values()))}
    assert stages == {48: 1, 64: 1, 96: 2, 99: 2, 163: 3, 227: 3}


@pytest.mark.parametrize("fits", [True, False])
def test_layers_use_the_hopper_kernel_where_it_fits(kernels, device, fits, monkeypatch):
    seen = []
    for module, name in ((hopper, "hopper"), (kernels, "triton")):
        for function in ("forward", "backward"):
            monkeypatch.setattr(module, function, lambda *_, found=(name, function): seen.append(found))
    monkeypatch.setattr(hopper, "fits", lambda device, size: fits)
    z, h, c, w, bias = given(1, 2, 3, 4, torch.float32, device)
    kernels.lstm_forward(z, h, c, w, bias, True)
    kernels.lstm_backward(z, z, z, c, z, w)
    name = "hopper" if fits else "triton"
    assert seen == [(name, "forward"), (name, "backward")]


# -- the Hopper kernel -------------------------------------------------------------------------------------------------


def test_the_hopper_kernel_says_why_it_is_not_used(monkeypatch):
    device, obstacle = torch.device("cuda", 0), hopper._obstacle.__wrapped__  # without its cache

    def compile_error(*_):
        raise RuntimeError("lstm.cu: no such instruction\nmore of the log")

    monkeypatch.setattr(hopper, "gpu_properties", lambda device: H100)
    monkeypatch.setattr(hopper, "shared_bytes", lambda *_: (0, 0))
    assert obstacle(device, hopper.MAX_UNITS) is None
    assert "units" in obstacle(device, hopper.MAX_UNITS + 4)
    assert "units" in obstacle(device, 22)
    monkeypatch.setattr(hopper, "shared_bytes", compile_error)
    assert obstacle(device, 20) == "it does not compile here (lstm.cu: no such instruction)"
    for capability in ((8, 0), (12, 0)):
        monkeypatch.setattr(hopper, "gpu_properties", lambda device, c=capability: H100._replace(capability=c))
        assert "Hopper" in obstacle(device, 20)


@pytest.mark.parametrize("batch", [1, 3, 12, 13, 100])
def test_thread_blocks_have_a_limited_number_of_samples_and_together_all(batch):
    rows, blocks = hopper._split(batch)
    assert 1 <= rows <= hopper.MAX_ROWS
    assert (blocks - 1) * rows < batch <= blocks * rows


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    folder = session_folder(tmp_path_factory)

    @cache
    def compiled(**constants):
        return Emulated(folder, "lstm.cu", ("forward", "backward", "shared_bytes"), **constants)

    return compiled


@pytest.fixture
def hopper_device(emulated, device, monkeypatch):
    """Returns the device on which layers of a size use the Hopper kernel; without a GPU, the CPU emulates it, as if
    twelve warps could hold the weights of only so many units."""
    if device.type == "cpu" and not compiles("#include <barrier>"):
        pytest.skip("no compiler for C++20")

    def prepare(size, twelve_warp_units=96):
        if device.type == "cuda":
            if not hopper.fits(device, size):
                pytest.skip("not a Hopper GPU")
            return device
        monkeypatch.setattr(hopper, "TWELVE_WARP_UNITS", twelve_warp_units)
        monkeypatch.setattr(hopper, "kernels", lambda device, *given: emulated(**hopper.constants(*given)))
        hopper.shared_bytes.cache_clear()
        return device

    yield prepare
    hopper.shared_bytes.cache_clear()


HOPPER_CASES = [  # clients, steps, samples, units; units that twelve warps hold; also in evaluation?
    ((2, 5, 10, 20), 16, True),  # a tile of eight samples, and one whose columns two float16 of a number share
    ((1, 2, 13, 12), 96, False),  # two thread blocks with a tile of eight samples each, a warp with too few units
    ((2, 3, 3, 12), 96, False),  # only the shared tile
]


@pytest.mark.parametrize(("shape", "twelve_warp_units", "evaluation"), HOPPER_CASES, ids=str)
def test_the_hopper_kernel_gives_what_the_steps_give(hopper_device, shape, twelve_warp_units, evaluation):
    device = hopper_device(shape[-1], twelve_warp_units)
    check(hopper.forward, hopper.backward, shape, device, evaluation or device.type == "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [4, 32, 64, 96, 100])
def test_on_a_gpu_the_hopper_kernel_takes_layers_of_all_sizes(hopper_device, size):
    check(hopper.forward, hopper.backward, (2, 9, 25, size), hopper_device(size))


@pytest.mark.parametrize(("batch", "size", "twelve_warp_units"), [(3, 12, 96), (10, 20, 16)])
def test_the_hopper_kernel_takes_gradients_of_any_magnitude(hopper_device, batch, size, twelve_warp_units):
    """They are multiplied as float16, so those of a step are scaled to a range that fits."""
    device = hopper_device(size, twelve_warp_units)
    inputs = given(1, 4, batch, size, torch.float32, device)
    _, _, c, w, _ = inputs
    _, pull = torch.func.vjp(torch.func.vmap(stepwise), *(v.double() for v in inputs))
    magnitudes = torch.tensor([1e-9, 1, 1e-20, 1e-12], device=device)[:, None, None]
    dhs = torch.randn(1, 4, batch, size, device=device) * magnitudes
    dcs = torch.zeros_like(dhs)
    _, cs, gates = hopper.forward(*inputs, True)
    found, expected = hopper.backward(dhs, dcs, gates, c, cs, w)[0], pull((dhs.double(), dcs.double()))[0]
    largest = expected.abs().amax((0, 2, 3))
    assert largest.max() > 1e9 * largest.min()
    assert ((found.double() - expected).abs().amax((0, 2, 3)) < 1e-6 * largest).all()


def test_the_hopper_kernel_takes_tensors_that_are_not_aligned(hopper_device):
    z, h, c, w, bias = given(1, 2, 3, 12, torch.float32, hopper_device(12))

    def unaligned(x):
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)

    hs, cs, gates = hopper.forward(z, h, c, w, bias, True)
    assert torch.equal(hopper.forward(*map(unaligned, (z, h, c, w, bias)), True)[2], gates)
    inputs = hs, cs, gates, c, cs, w
    assert torch.equal(hopper.backward(*map(unaligned, inputs))[0], hopper.backward(*inputs)[0])
