"""Convolutions with weights per client: every algorithm gives what torch's convolution gives, with first and second
derivatives, as a single operation and within training."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import SingleRun, assert_same, method, model_task
from torch._subclasses import FakeTensorMode
from torch.nn.grad import conv2d_input, conv2d_weight

from fedloom.engine.executors import stacked_scoring
from fedloom.engine.graph import function_cache
from fedloom.engine.plan import Plan
from fedloom.engine.planning import choose
from fedloom.engine.planning.measure import Option
from fedloom.engine.planning.tuning import candidates
from fedloom.models.zoo import MODELS
from fedloom.nn.kernels.convolution import (
    GROUPED,
    ConvCase,
    Convolution,
    _chosen_algo,
    _split_count,
    _ToOutput,
    bf16_splits,
    convolutions,
    correlate,
    im2col_splits,
    output_size,
    padded_channels,
    weight_gradient,
)
from fedloom.nn.kernels.gpu import H100
from fedloom.nn.network import Network

ALGOS = [GROUPED, "16 16 16 4 2"]
SHAPES = [((1, 1), (0, 0)), ((1, 1), (1, 1)), ((2, 2), (1, 1)), ((2, 1), (0, 1))]  # stride, padding
KERNEL = (3, 2)
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Everywhere(dict):
    """One algorithm for all convolutions."""

    def __init__(self, algo):
        self.algo = algo

    def get(self, key, default=None):
        return self.algo


def derivatives(convolve, w, x):
    """Of a small network: gradients, and gradients of a function of them."""

    def loss(w, x):
        return (convolve(torch.tanh(convolve(x, w[0], w[2])), w[1], None) ** 2).mean()

    def squared_norm(w, x):
        return sum((g**2).sum() for g in torch.func.grad(loss)(w, x))

    both = [torch.func.grad(f, argnums=(0, 1)) for f in (loss, squared_norm)]
    return [torch.func.vmap(f)(w, x) for f in both]


@pytest.mark.parametrize(("stride", "padding"), SHAPES)
@pytest.mark.parametrize("algo", ALGOS)
def test_values_and_derivatives_are_those_of_torch(algo, stride, padding):
    x = torch.randn(2, 3, 2, 12, 11, dtype=torch.float64)
    w = [torch.randn(2, 4, 2, 3, 3, dtype=torch.float64), torch.randn(2, 3, 4, 3, 3, dtype=torch.float64)]
    w.append(torch.randn(2, 4, dtype=torch.float64))

    def convolve(x, weight, bias):
        return _ToOutput.apply(x, weight, bias, list(stride), list(padding))

    expected = derivatives(lambda x, weight, bias: F.conv2d(x, weight, bias, stride, padding), w, x)
    seen: dict[str, ConvCase] = {}
    with convolutions(Everywhere(algo), seen):
        found = derivatives(convolve, w, x)
    assert {case.part for case in seen.values()} == {"output", "input", "weights"}
    for a, b in zip(torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(found), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize(("name", "shape"), [("cnn4", (1, 16, 16)), ("resnet18_gn", (2, 8, 8))])
def test_training_is_the_same_with_every_algorithm(name, shape, algo):
    options = {"options": {"width": 2}} if name == "resnet18_gn" else {}
    task = model_task(name, shape, sizes=(5, 1, 9), **options)
    plan = Plan("stacked", "eager", chunk=3, convolutions=Everywhere(algo))
    assert_same(method("per-fedavg"), task, plan, 1e-9, rounds=1)


@pytest.mark.parametrize(("rows", "block"), [(4, 1), (8, 2), (44, 4), (400, 4)])  # in steps of 1, 2, 11 and all samples
def test_one_model_scores_the_samples_of_all_clients_in_blocks(rows, block, monkeypatch):
    """With custom convolutions, from a trace after the first step; samples that pad the last block do not count."""
    monkeypatch.setattr(function_cache, "CALLS_BEFORE_TRACE", 1)
    monkeypatch.setattr(stacked_scoring, "SHARED_MODEL_BLOCK", 4)
    task, seen = model_task("cnn4", (1, 16, 16)), {}
    expected = SingleRun(method("fedavg"), task, 0, plan=Plan("per-client"))
    found = SingleRun(method("fedavg"), task, 0, plan=Plan("stacked", "traced", chunk=4, rows=rows, convolutions={}))
    for splits in (("train", "val", "test"), ("val", "test"), ("train", "val", "test")):
        cohort, w = expected.first_cohort(), expected.server["w"]
        right = expected.executor.score_global(w, cohort, splits)
        with convolutions(None, seen):
            scores = found.executor.score_global(w, cohort, splits)
        for split in splits:
            torch.testing.assert_close(scores[split], right[split], rtol=1e-9, atol=1e-9)
    assert right["train"][:, 2].tolist() == [5, 1, 9, 12]
    assert {case.part for case in seen.values()} == {"output"}
    assert max(case.x[0] for case in seen.values()) == block
    assert any(key[0] == "shared" for key in found.executor.call.traced)


# -- which algorithm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["output", "input", "weights"])
def test_what_cannot_be_indexed_in_32_bits_is_left_to_torch(part):
    """Whether tiles were measured or not; and no others are tried."""
    large = (4096, 64, 64, 64), (64, 64, 3, 3), (1, 1)
    patches = (2048, 1, 64, 64), (8, 1, 15, 15), (7, 7)  # a patch has 225 numbers, where an output has 8 channels
    small = (2048, 64, 64, 64), *large[1:]  # 2^29 numbers
    cases = [ConvCase(part, x, w, (1, 1), padding) for x, w, padding in (large, patches, small)]
    assert [case.indexable for case in cases] == [False, False, True]
    for measured in ({}, Everywhere("64 64 32 4 3")):
        with convolutions(measured):
            algos = [_chosen_algo(part, case.x, case.w, case.stride, case.padding) for case in cases]
        assert algos[:2] == [GROUPED, GROUPED]
        assert algos[2] != GROUPED
    tried = [candidates(case) for case in cases]
    assert tried[:2] == [[GROUPED], [GROUPED]]
    assert GROUPED in tried[2]
    assert len(set(tried[2])) > 2


@pytest.mark.parametrize("part", ["output", "input", "weights"])
@pytest.mark.parametrize("out", [5, 32, 64, 300])
@pytest.mark.parametrize("inner", [1, 16, 64, 200])
def test_default_and_tried_tiles_are_ones_that_a_kernel_takes(part, out, inner):
    case = ConvCase(part, (10, inner, 9, 9), (out, inner, 3, 3), (1, 1), (1, 1))
    for algo in {case.default_algo(), *candidates(case)} - {GROUPED}:
        *tiles, warps, stages = map(int, algo.split())
        assert len(tiles) == 3
        assert all(size >= 16 and size & (size - 1) == 0 for size in tiles)  # powers of two, as tl.dot needs
        assert warps in (1, 2, 4, 8, 16)
        assert stages >= 1


UNSUPPORTED = [{"groups": 2}, {"dilation": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}]


@pytest.mark.parametrize("options", UNSUPPORTED, ids=str)
def test_a_layer_that_kernels_do_not_support_is_computed_by_torch(options):
    x = torch.randn(2, 3, 4, 8, 8, dtype=torch.float64)
    like = torch.nn.Conv2d(4, 6, 3, dtype=torch.float64, **options)
    seen: dict[str, ConvCase] = {}
    with convolutions({}, seen):
        y = torch.func.vmap(Convolution(like))(x)
    torch.testing.assert_close(y[0], like(x[0]))
    assert not seen


def test_on_a_gpu_float64_is_computed_by_torch():
    """The kernels sum in float32."""
    layer = Convolution(torch.nn.Conv2d(4, 6, 3))
    with FakeTensorMode():
        assert layer._use_kernel(torch.empty(1, device="cuda"))
        assert not layer._use_kernel(torch.empty(1, dtype=torch.float64, device="cuda"))


def test_the_layers_of_a_model_keep_their_names():
    shape = (1, 16, 16)
    network = Network(lambda: MODELS["cnn4"]().build(shape, 3), "head", torch.zeros(2, *shape))
    plain = MODELS["cnn4"]().build(shape, 3)
    assert set(network.init(0)) == {name for name, _ in plain.named_parameters()}


@pytest.mark.parametrize(
    ("rounds", "tried", "left_out"),
    [
        (290, "", "; not tuned: 7 s to save 5.8 s at most; not compiled: 5 s to save 9.7 s at most"),
        (310, "compiled", "; not tuned: 7 s to save 6.2 s at most"),
        (710, "tuned, compiled", ""),
    ],
)
def test_tuning_and_compiling_are_tried_where_a_run_is_long_enough(rounds, tried, left_out, monkeypatch):
    """Rounds take 0.1 s. Tuning takes 7 s, half of what it saves of 700 rounds if it saves a fifth; the compiler takes
    5 s, half of what it saves of 300 rounds if it saves a third."""
    asked = []

    def fastest_algos(cases, clients, device, dtype):
        asked.append((clients, dtype))
        return {case.key: GROUPED for case in cases}

    def measure_stacked(load, plan):
        seconds = 0.1 - 0.0001 * bool(plan.convolutions) - 0.0001 * plan.compiled
        return Option(plan, SimpleNamespace(), seconds, compiling=5.0)

    for name, value in {
        "TUNING_SAVES": 1 / 5,
        "COMPILER_SAVES": 1 / 3,
        "REQUIRED_GAIN": 2.0,
        "_tuning_seconds": lambda cases: 7.0,
        "_custom_convolutions": lambda task: True,
        "_captures": lambda task: True,
        "fastest_algos": fastest_algos,
        "measure_stacked": measure_stacked,
        "measure_per_client": lambda load, plan: Option(plan, SimpleNamespace(), 1.0),
    }.items():
        monkeypatch.setattr(choose, name, value)
    task = model_task("cnn4", (1, 16, 16), rounds=rounds, sizes=(5, 9))
    alg = method("fedavg")
    cohort = SingleRun(alg, task, 0, plan=Plan("per-client")).first_cohort()
    plan = choose.choose_executor(alg, task, task, cohort, 2).plan
    tuned = "tuned" in tried
    assert asked == [(2, torch.float32)] * tuned
    # of two layers, of which the first needs no gradient to images
    parts = [key.split()[0] for key in plan.convolutions]
    assert sorted(parts) == ["input", "output", "output", "weights", "weights"] * tuned
    assert plan.compiled == ("compiled" in tried)
    assert plan.reason.endswith(left_out)
    assert ("; not" in plan.reason) == bool(left_out)
    assert f"stacked (captured{', ' * bool(tried)}{tried}) " in plan.reason


def test_tuning_takes_longer_the_more_algorithms_are_tried():
    few, many = (ConvCase("output", (4, 16, 9, 9), (out, 16, 3, 3), (1, 1), (1, 1)) for out in (8, 256))
    assert len(candidates(few)) < len(candidates(many))
    times = [choose._tuning_seconds(cases) for cases in ([], [few], [many], [few, many])]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[3] == pytest.approx(times[1] + times[2])


# -- operators and kernels ------------------------------------------------------------------------------------------


def test_fake_tensors_have_the_shapes_of_the_results():
    tests = ("test_schema", "test_faketensor")
    x, w = torch.randn(2, 3, 5, 6, 7), torch.randn(2, 4, 5, *KERNEL)
    g = torch.randn(2, 3, 4, *output_size((6, 7), KERNEL, (2, 1), (1, 0)))
    options = [2, 1], [1, 0]
    torch.library.opcheck(bf16_splits, (x, 3), test_utils=tests)
    torch.library.opcheck(im2col_splits, (x, list(KERNEL), *options, 2), test_utils=tests)
    xs, ws, gs = (bf16_splits(v, 3) for v in (x, w, g))
    torch.library.opcheck(correlate, (xs, ws, torch.randn(2, 4), *options, False, [16] * 5), test_utils=tests)
    torch.library.opcheck(weight_gradient, (xs, gs, [4, 5], list(KERNEL), *options, [16] * 5), test_utils=tests)


@pytest.fixture
def kernels(triton_module, monkeypatch, device):
    module = triton_module("convolution")
    if device.type == "cpu":
        _let_interpreter_multiply_bfloat16(monkeypatch)
    return module


def _let_interpreter_multiply_bfloat16(monkeypatch):
    """It has bfloat16 as integers of 16 bits, converts them to and from float32, but would multiply the integers."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        return multiply(self, self.create_fp_ext(a, tl.float32), self.create_fp_ext(b, tl.float32), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def assert_near(found, expected, error):
    """Relative to the largest value."""
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=error * expected.abs().max().item())


def check_kernels(kernels, device, channels, size, stride, padding, splits, error, tiles=None):
    """All three computations of two clients against torch's in float64."""
    (inner, out), (tiles, weight_tiles) = channels, (tiles, tiles) if tiles else (TILES, WEIGHT_TILES)
    x, w = torch.randn(2, 3, inner, *size, device=device), torch.randn(2, out, inner, *KERNEL, device=device)
    bias = torch.randn(2, out, device=device)
    each, options = torch.func.vmap, (list(stride), list(padding))
    expected = each(lambda *v: F.conv2d(*v, stride=stride, padding=padding))(x.double(), w.double(), bias.double())
    g = torch.randn(expected.shape, device=device)
    xs, ws, gs = (kernels.bf16_splits(v, splits) for v in (x, w, g))
    assert_near(kernels.correlate(xs, ws, bias, *options, False, tiles), expected, error)
    to_w = each(lambda a, b: conv2d_weight(a, w.shape[1:], b, stride, padding))(x.double(), g.double())
    found = kernels.weight_gradient(xs, gs, [out, inner], list(KERNEL), *options, weight_tiles)
    assert_near(found, to_w, error)
    assert found.is_contiguous()
    if stride == (1, 1):
        to_x = each(lambda a, b: conv2d_input(x.shape[1:], b, a, 1, padding))(g.double(), w.double())
        ws = kernels.bf16_splits(w.transpose(1, 2), splits)
        border = [k - 1 - p for k, p in zip(KERNEL, padding, strict=True)]
        assert_near(kernels.correlate(gs, ws, None, [1, 1], border, True, tiles), to_x, error)


TILES, WEIGHT_TILES = (32, 16, 16, 4, 2), (16, 128, 32, 4, 2)
CHANNELS = [(17, 20), pytest.param((40, 70), marks=gpu_only)]  # more than a tile of each, and not a multiple of it


@pytest.mark.parametrize(("stride", "padding"), SHAPES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_kernels_give_what_torch_gives(kernels, device, channels, stride, padding):
    check_kernels(kernels, device, channels, (7, 5), stride, padding, splits=3, error=1e-6)


@pytest.mark.parametrize(("splits", "error"), [(2, 5e-5), (1, 1e-2)])
def test_with_fewer_splits_kernels_round_as_much_as_these_hold(kernels, device, splits, error):
    check_kernels(kernels, device, (5, 20), (5, 4), (1, 1), (1, 1), splits, error)


@gpu_only
@pytest.mark.parametrize("part", ["output", "input", "weights"])
def test_all_tiles_that_are_tried_give_what_torch_gives(kernels, device, part):
    for algo in candidates(ConvCase(part, (10, 40, 9, 9), (300, 40, *KERNEL), (1, 1), (1, 1))):
        if algo != GROUPED:
            tiles = tuple(map(int, algo.split()))
            check_kernels(kernels, device, (40, 300), (9, 9), (1, 1), (1, 1), 3, 1e-6, tiles)


@pytest.mark.parametrize("sms", [1, 132])
def test_gradients_to_weights_may_be_summed_in_spans(kernels, device, sms, monkeypatch):
    """With many SMs, several programs share the sum over samples and pixels, and their parts are added."""
    monkeypatch.setattr(kernels, "gpu_properties", lambda device: H100._replace(sms=sms))
    launched = []
    launch = kernels._weight_gradient

    class Noted:
        def __getitem__(self, grid):
            launched.append(grid)
            return launch[grid]

    monkeypatch.setattr(kernels, "_weight_gradient", Noted())
    x, g = torch.randn(2, 5, 5, 8, 7, device=device), torch.randn(2, 5, 4, 6, 6, device=device)  # 180 terms
    found = kernels.weight_gradient(
        *(kernels.bf16_splits(v, 3) for v in (x, g)), [4, 5], list(KERNEL), [1, 1], [0, 0], (16, 32, 16, 4, 2)
    )
    expected = torch.func.vmap(lambda a, b: conv2d_weight(a, (4, 5, *KERNEL), b))(x.double(), g.double())
    assert_near(found, expected, 1e-6)
    assert (launched[0][2] > 1) == (sms > 1)


@pytest.mark.parametrize("channels", [17, 40])
def test_splits_add_up_to_the_number(kernels, device, channels):
    x = torch.randn(2, 3, channels, 6, 5, device=device).mT  # rows are no longer contiguous
    for count, error in ((3, 1e-7), (2, 4e-5), (1, 1e-2)):
        found = kernels.bf16_splits(x, count)
        assert found.shape == (2, count, 3, 5, 6, padded_channels(channels))
        assert not found[..., channels:].any()
        assert_near(found[..., :channels].double().sum(1), x.permute(0, 1, 3, 4, 2).double(), error)


@pytest.mark.parametrize(("stride", "padding"), SHAPES)
def test_patches_are_those_of_unfold(kernels, device, stride, padding):
    x = torch.randn(2, 3, 5, 11, 9, device=device)
    columns = 5 * KERNEL[0] * KERNEL[1]
    found = kernels.im2col_splits(x, list(KERNEL), list(stride), list(padding), 3).double().sum(1)
    expected = F.unfold(x.flatten(0, 1), KERNEL, padding=padding, stride=stride).transpose(1, 2)
    assert_near(found[..., :columns].flatten(2, 3), expected.unflatten(0, (2, 3)).double(), 1e-6)
    assert found.shape[-1] == padded_channels(columns) > columns
    assert not found[..., columns:].any()


def test_numbers_have_as_many_splits_as_their_precision_needs(monkeypatch):
    """Fewer where torch may round to TF32, too."""
    assert _split_count(torch.empty(0)) == 3
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    assert _split_count(torch.empty(0)) == 2
    assert _split_count(torch.empty(0, dtype=torch.bfloat16)) == 1
