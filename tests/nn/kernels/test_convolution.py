"""Convolutions with weights per client: all ways give what torch's convolution gives, with its first and second
derivatives, alone and inside of training."""

import os

import pytest
import torch
import torch.nn.functional as F
from helpers import SingleRun, assert_same, method, model_task
from torch.nn.grad import conv2d_input, conv2d_weight

from fedloom.engine.planning import tuning as tune
from fedloom.engine.planning.plan import Plan
from fedloom.engines import choose, replayed, stacked
from fedloom.models.zoo import MODELS
from fedloom.nn.kernels.convolution import ConvCase, Convolution, _chosen_algo, _ToOutput, convolutions
from fedloom.nn.network import Network

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

WAYS = ["grouped", "16 16 16 4 2"]
SHAPES = [((1, 1), (0, 0)), ((1, 1), (1, 1)), ((2, 2), (1, 1)), ((2, 1), (0, 1))]  # stride, padding


class Everywhere(dict):
    """One way for all."""

    def __init__(self, way):
        self.way = way

    def get(self, key, default=None):
        return self.way


def derivatives(convolve, w, x):
    """Of a small network: gradients, and gradients of a function of them."""

    def loss(w, x):
        return (convolve(torch.tanh(convolve(x, w[0], w[2])), w[1], None) ** 2).mean()

    def length(w, x):
        return sum((g**2).sum() for g in torch.func.grad(loss)(w, x))

    both = [torch.func.grad(f, argnums=(0, 1)) for f in (loss, length)]
    return [torch.func.vmap(f)(w, x) for f in both]


@pytest.mark.parametrize(("stride", "padding"), SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_values_and_derivatives_are_those_of_torch(way, stride, padding):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 12, 11, dtype=torch.float64)
    w = [torch.randn(2, 4, 2, 3, 3, dtype=torch.float64), torch.randn(2, 3, 4, 3, 3, dtype=torch.float64)]
    w.append(torch.randn(2, 4, dtype=torch.float64))

    def own(x, weight, bias):
        return _ToOutput.apply(x, weight, bias, list(stride), list(padding))

    expected = derivatives(lambda x, weight, bias: F.conv2d(x, weight, bias, stride, padding), w, x)
    seen: dict[str, ConvCase] = {}
    with convolutions(Everywhere(way), seen):
        found = derivatives(own, w, x)
    assert {case.part for case in seen.values()} == {"output", "input", "weights"}
    for a, b in zip(torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(found), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "shape"), [("cnn4", (1, 16, 16)), ("resnet18_gn", (2, 8, 8))])
def test_training_is_the_same_whichever_way(name, shape, way):
    options = {"options": {"width": 2}} if name == "resnet18_gn" else {}
    task = model_task(name, shape, **options)
    plan = Plan("stacked", "eager", chunk=3, convolutions=Everywhere(way))
    assert_same(method("per-fedavg"), task, plan, 1e-9, rounds=1)


@pytest.mark.parametrize(("rows", "block"), [(4, 1), (8, 2), (44, 4), (400, 4)])  # in steps of 1, 2, 11 and all samples
def test_one_model_scores_everybodys_samples_in_blocks(rows, block, monkeypatch):
    """With own convolutions, from a trace after the first step, and without the samples that fill up the last block."""
    monkeypatch.setattr(replayed, "AFTER", 1)
    monkeypatch.setattr(stacked, "BLOCK", 4)
    task, seen = model_task("cnn4", (1, 16, 16)), {}
    expected = SingleRun(method("fedavg"), task, 0, plan=Plan("per-client"))
    found = SingleRun(method("fedavg"), task, 0, plan=Plan("stacked", "traced", chunk=4, rows=rows, convolutions={}))
    for splits in (("train", "val", "test"), ("val", "test"), ("train", "val", "test")):
        cohort, w = expected.first_cohort(), expected.server["w"]
        right = expected.executor.score_global(w, cohort, splits)
        with convolutions(None, seen):
            mine = found.executor.score_global(w, cohort, splits)
        for split in splits:
            torch.testing.assert_close(mine[split], right[split], rtol=1e-9, atol=1e-9)
    assert right["train"][:, 2].tolist() == [5, 1, 9, 12]
    assert {case.part for case in seen.values()} == {"output"}
    assert max(case.x[0] for case in seen.values()) == block
    assert any(key[0] == "shared" for key in found.executor.call.traced)


def test_what_kernels_cannot_count_is_left_to_torch():
    """Whether tiles were measured or not; and no others are tried."""
    large, patched = ((4096, 64, 64, 64), (64, 64, 3, 3), (1, 1)), ((2048, 1, 64, 64), (8, 1, 15, 15), (7, 7))
    small = (2048, *large[0][1:]), *large[1:]  # 2^29 numbers; `patched` has 225 of a patch, not 8 of an output
    for part in ("output", "input", "weights"):
        for known in ({}, Everywhere("64 64 32 4 3")):
            with convolutions(known):
                ways = [_chosen_algo(part, x, w, (1, 1), padding) for x, w, padding in (large, patched, small)]
            assert (ways[:2], "grouped" in ways[2]) == (["grouped", "grouped"], False)
        tried = [tune.ways(ConvCase(part, x, w, (1, 1), padding)) for x, w, padding in (large, patched, small)]
        assert (tried[:2], len(tried[2]) > 2) == ([["grouped"], ["grouped"]], True)


def test_a_layer_that_no_way_knows_is_torchs():
    x = torch.randn(2, 3, 4, 8, 8, dtype=torch.float64)
    for more in ({"groups": 2}, {"dilation": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}):
        like = torch.nn.Conv2d(4, 6, 3, dtype=torch.float64, **more)
        seen: dict[str, ConvCase] = {}
        with convolutions({}, seen):
            y = torch.func.vmap(Convolution(like))(x)
        torch.testing.assert_close(y[0], like(x[0]))
        assert not seen


@pytest.mark.parametrize(
    ("rounds", "tried", "left_out"),
    [
        (290, "", "; not tuned: 7 s to save 5.8 s at most; not compiled: 5 s to save 9.7 s at most"),
        (310, "compiled", "; not tuned: 7 s to save 6.2 s at most"),
        (710, "tuned, compiled", ""),
    ],
)
def test_what_costs_time_is_tried_where_a_run_is_long_enough(rounds, tried, left_out, monkeypatch):
    """Of two layers, of which the first needs no gradient to images, output (2 and 4 ways), input (2) and weights (2
    and 4) take 7 s, which is half of a fifth of 700 rounds of 0.1 s; 5 s of the compiler are half of a third of 300."""
    asked = []

    def fastest(cases, clients, device, dtype):
        asked.append((clients, dtype))
        return {case.key: "grouped" for case in cases}

    def measured(alg, task, cohort, evaluated, plan):
        seconds = 0.1 - 0.0001 * bool(plan.convolutions) - 0.0001 * plan.compiled
        return choose.Option(plan, None, seconds, compiling=5.0)

    monkeypatch.setattr(choose, "_own_kernels", lambda task: True)
    monkeypatch.setattr(choose, "_captures", lambda task: True)
    monkeypatch.setattr(choose, "fastest", fastest)
    monkeypatch.setattr(choose, "_measure_stacked", measured)
    monkeypatch.setattr(choose, "_measure_per_client", lambda *given: choose.Option(choose.ALONE, None, 1.0))
    task = model_task("cnn4", (1, 16, 16), rounds=rounds, sizes=(5, 9))
    plan = choose.choose(method("fedavg"), task, SingleRun(method("fedavg"), task, 0, plan=None).first_cohort(), 2)[0]
    tuned = "tuned" in tried
    assert asked == [(2, torch.float32)] * tuned
    assert list(plan.convolutions.values()) == ["grouped"] * 5 * tuned
    assert plan.compiled == ("compiled" in tried)
    assert plan.reason.endswith(left_out)
    assert ("; not" in plan.reason) == bool(left_out)
    assert f"stacked (captured{', ' * bool(tried)}{tried}) " in plan.reason


def test_the_layers_of_a_model_keep_their_names():
    shape = (1, 16, 16)
    network = Network(lambda: MODELS["cnn4"]().build(shape, 3), "head", torch.zeros(2, *shape))
    plain = MODELS["cnn4"]().build(shape, 3)
    assert set(network.init(0)) == {name for name, _ in plain.named_parameters()}


@pytest.fixture
def kernels(monkeypatch):
    pytest.importorskip("triton")
    from fedloom.nn.kernels.triton import convolution as conv_triton

    if not torch.cuda.is_available():
        monkeypatch.setattr(conv_triton, "HALF", torch.float16)  # the interpreter cannot multiply the other kind
    return conv_triton, torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("stride", "padding"), SHAPES)
@pytest.mark.parametrize(("inner", "out", "tiles"), [(17, 20, (16, 16, 16, 4, 2)), (32, 40, (32, 32, 32, 4, 3))])
def test_kernels_give_what_torch_gives(kernels, stride, padding, inner, out, tiles):
    triton, device = kernels
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, inner, 8, 7, device=device), torch.randn(2, out, inner, 3, 3, device=device)
    each, options = torch.func.vmap, (list(stride), list(padding))
    expected = each(lambda a, b: F.conv2d(a, b, stride=stride, padding=padding))(x.double(), w.double())
    g = torch.randn(expected.shape, device=device)
    to_w = each(lambda a, b: conv2d_weight(a, w.shape[1:], b, stride, padding))(x.double(), g.double())
    for count, error in ((3, 1e-6), (2, 5e-5), (1, 1e-2)):
        xs, ws, gs = (triton.pieces(v, count) for v in (x, w, g))
        bias = torch.randn(2, out, device=device)
        assert_near(triton.correlate(xs, ws, None, *options, False, tiles), expected, error)
        more = bias.double()[:, None, :, None, None]
        assert_near(triton.correlate(xs, ws, bias, *options, False, tiles), expected + more, error)
        assert_near(triton.weight_gradient(xs, gs, [out, inner], [3, 3], *options, tiles), to_w, error)
        if stride == (1, 1):
            to_x = each(lambda a, b: conv2d_input(x.shape[1:], b, a, 1, padding))(g.double(), w.double())
            turned = triton.pieces(w.transpose(1, 2), count)
            assert_near(triton.correlate(gs, turned, None, [1, 1], [2 - p for p in padding], True, tiles), to_x, error)


@pytest.mark.parametrize(("stride", "padding"), SHAPES)
def test_patches_are_what_the_kernel_sees(kernels, stride, padding):
    triton, device = kernels
    x = torch.randn(2, 3, 5, 11, 9, device=device)
    found = triton.patches(x, [3, 3], list(stride), list(padding), 3).float().sum(1)
    seen = F.unfold(x.flatten(0, 1), (3, 3), padding=padding, stride=stride).transpose(1, 2)
    assert_near(found[..., :45].flatten(2, 3), seen.unflatten(0, (2, 3)).double(), 1e-6)
    assert found.shape[-1] == 48
    assert not found[..., 45:].any()


def assert_near(found, wanted, error):
    """Relative to the largest value."""
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=error * wanted.abs().max().item())
