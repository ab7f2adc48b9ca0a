"""A module as pure functions: BatchNorm under padding, dropout by key, the cut between body and head."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from sentences import user_error
from torch import nn

from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network

DOUBLE = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


class Front(nn.Module):
    """A layer under test, then the head: the features are what the layer gives."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.layer(x).flatten(1))


def front(layer, *shape):
    """The network of a layer for samples of a shape."""
    return Network(lambda: Front(copy.deepcopy(layer), math.prod(shape)), "head", randn(2, *shape))


def padded(x, rows):
    """The batch filled up with samples that must not count, and its mask."""
    rubbish = 1e3 * randn(rows, *x.shape[1:], seed=99)
    return torch.cat([x, rubbish]), torch.tensor([1.0] * len(x) + [0.0] * rows, dtype=DOUBLE)


# -- BatchNorm

NORMS = [
    (lambda **o: nn.BatchNorm1d(5, **o), (5,)),
    (lambda **o: nn.BatchNorm1d(5, **o), (5, 7)),
    (lambda **o: nn.BatchNorm2d(4, **o), (4, 3, 6)),
]
each_norm = pytest.mark.parametrize(("make", "shape"), NORMS, ids=["1d", "1d with length", "2d"])


def norm_pair(make, shape, **options):
    """torch's own layer with weights of its own, and the network that has it with the same weights."""
    layer = make(**options).double()
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    network = front(layer, *shape)
    params = network.init(0)
    params.update({f"layer.{name}": p.detach() for name, p in layer.named_parameters()})
    return layer, network, params


def assert_statistics(buffers, layer):
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(buffers[f"layer.{name}"], getattr(layer, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 4], ids=["no padding", "padding"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.3}, {"affine": False}, {"eps": 0.1}], ids=str)
@each_norm
def test_batchnorm_of_a_padded_batch_equals_torchs_of_the_batch_without_padding(make, shape, options, rows):
    layer, network, params = norm_pair(make, shape, **options)
    buffers = network.buffers
    for seed, n in enumerate((6, 2, 9)):  # running statistics build on those before
        x = 2 + 3 * randn(n, *shape, seed=seed)
        filled, mask = padded(x, rows)
        out = network.apply(params, buffers, filled, train=True, mask=mask)
        torch.testing.assert_close(out.features[:n], layer(x).flatten(1), rtol=1e-10, atol=1e-10)
        buffers = out.buffers
        assert_statistics(buffers, layer)
    x = randn(5, *shape, seed=50)
    out = network.apply(params, buffers, x, train=False)
    torch.testing.assert_close(out.features, layer.eval()(x).flatten(1), rtol=1e-10, atol=1e-10)
    assert_statistics(out.buffers, layer)  # evaluation leaves them alone


@each_norm
def test_batchnorm_without_a_mask_counts_every_sample(make, shape):
    layer, network, params = norm_pair(make, shape)
    x = 2 + 3 * randn(6, *shape)
    out = network.apply(params, network.buffers, x, train=True)
    torch.testing.assert_close(out.features, layer(x).flatten(1), rtol=1e-10, atol=1e-10)
    assert_statistics(out.buffers, layer)


@each_norm
def test_batchnorm_gradients_of_a_padded_batch_equal_torchs(make, shape):
    layer, network, params = norm_pair(make, shape)
    x = randn(6, *shape)
    (layer(x) ** 3).sum().backward()
    filled, mask = padded(x, 3)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    out = network.apply(leaves, network.buffers, filled, train=True, mask=mask)
    (out.features[:6] ** 3).sum().backward()
    torch.testing.assert_close(leaves["layer.weight"].grad, layer.weight.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(leaves["layer.bias"].grad, layer.bias.grad, rtol=1e-9, atol=1e-9)


def test_a_pass_leaves_given_statistics_and_parameters_as_they_were():
    _, network, params = norm_pair(*NORMS[0])
    before = copy.deepcopy((params, network.buffers))
    network.apply(params, network.buffers, randn(6, 5), train=True)
    for found, kept in zip((params, network.buffers), before, strict=True):
        assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_batchnorm_in_the_head_has_statistics_too():
    head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    network = Network(lambda: nn.Sequential(nn.Linear(5, 4), copy.deepcopy(head)), "1", randn(2, 5))
    out = network.apply(network.init(0), network.buffers, randn(6, 5), train=True)
    torch.testing.assert_close(out.buffers["1.0.running_mean"], 0.1 * out.features.mean(0))  # momentum 0.1 from 0
    assert network.head == ("1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias")


def test_batchnorm_without_running_statistics_is_refused():
    with user_error("'layer'", "track_running_stats=True"):
        front(nn.BatchNorm1d(5, track_running_stats=False), 5)


# -- dropout


def dropped(network, x, key, train=True):
    key = None if key is None else torch.tensor(key)
    return network.apply(network.init(0), network.buffers, x, train=train, key=key).features


def test_dropout_masks_are_a_function_of_the_key():
    network, x = front(nn.Dropout(0.4), 50), torch.ones(8, 50, dtype=DOUBLE)
    assert torch.equal(dropped(network, x, 1), dropped(network, x, 1))
    assert not torch.equal(dropped(network, x, 1), dropped(network, x, 2))


def test_dropout_masks_do_not_shift_when_rows_are_padded():
    network, x = front(nn.Dropout(0.4), 6, 5), torch.ones(4, 6, 5, dtype=DOUBLE)
    filled, _ = padded(x, 7)
    assert torch.equal(dropped(network, x, 1), dropped(network, filled, 1)[:4])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_keeps_its_share_and_scales_it_up(p):
    found = dropped(front(nn.Dropout(p), 100), torch.ones(1000, 100, dtype=DOUBLE), 3)
    kept = found != 0
    # standard error sqrt(p (1-p) / 100000) <= 0.0016, bound at four of them
    assert float(kept.double().mean()) == pytest.approx(1 - p, abs=0.0064)
    torch.testing.assert_close(found[kept], torch.full_like(found[kept], 1 / (1 - p)))


def test_dropout_of_everything_gives_zeros():
    found = dropped(front(nn.Dropout(1.0), 10), torch.ones(4, 10, dtype=DOUBLE), 3)
    assert torch.equal(found, torch.zeros(4, 10, dtype=DOUBLE))


def test_two_dropouts_in_one_pass_draw_different_masks():
    network = front(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), 1000)
    found = dropped(network, torch.ones(10, 1000, dtype=DOUBLE), 3)
    # a quarter survives both; it would be half if the masks were the same; standard error 0.0043
    assert float((found != 0).double().mean()) == pytest.approx(0.25, abs=0.02)


def test_evaluation_drops_nothing():
    network, x = front(nn.Dropout(0.4), 50), randn(8, 50)
    assert torch.equal(dropped(network, x, 1, train=False), x)


def test_dropout_leaves_torchs_generator_alone():
    network, before = front(nn.Dropout(0.4), 50), torch.random.get_rng_state()
    dropped(network, randn(8, 50), 1)
    assert torch.equal(before, torch.random.get_rng_state())


# -- body and head


def zoo(name, shape, classes):
    return Network(lambda: MODELS[name]().build(shape, classes), "head", torch.zeros(2, *shape))


@pytest.mark.parametrize(
    ("name", "shape", "body", "feature_dim"),
    [
        ("logreg", (30,), (), 30),  # the input width
        ("mlp", (1, 8, 8), ("1.weight", "1.bias"), 64),
        ("cnn4", (1, 28, 28), ("0.weight", "0.bias", "3.weight", "3.bias", "7.weight", "7.bias"), 512),
    ],
)
def test_parameters_belong_to_body_or_head_and_features_are_as_wide_as_the_head_takes(name, shape, body, feature_dim):
    network = zoo(name, shape, 10)
    assert network.body == body
    assert network.head == ("head.weight", "head.bias")
    assert network.feature_dim == feature_dim
    params = network.init(0)
    assert tuple(params) == body + network.head
    assert params["head.weight"].shape == (10, feature_dim)


@pytest.mark.parametrize("name", ["cnn4", "mlp"])
def test_the_head_of_the_features_gives_the_logits_of_the_module(name):
    shape = (1, 28, 28)
    torch.manual_seed(4)
    module = MODELS[name]().build(shape, 10)
    network, params = zoo(name, shape, 10), dict(module.named_parameters())
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = network.apply(params, network.buffers, x, train=False)
        torch.testing.assert_close(out.logits, module(x))
        torch.testing.assert_close(module.head(out.features), out.logits)
        torch.testing.assert_close(network.apply_head(params, network.buffers, out.features), out.logits)


def test_a_head_may_lie_deeper_and_have_several_layers():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.ModuleDict(
                {"body": nn.Linear(6, 5), "top": nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))}
            )

        def forward(self, x):
            return self.trunk["top"](torch.tanh(self.trunk["body"](x)))

    network = Network(Deep, "trunk.top", randn(2, 6))
    assert network.body == ("trunk.body.weight", "trunk.body.bias")
    assert network.head == ("trunk.top.0.weight", "trunk.top.0.bias", "trunk.top.1.weight", "trunk.top.1.bias")
    assert network.feature_dim == 5


def test_initial_values_are_a_function_of_the_seed_and_leave_torchs_generator_alone():
    network, before = zoo("mlp", (8,), 3), torch.random.get_rng_state()
    first, other = network.init(1), network.init(2)
    assert torch.equal(before, torch.random.get_rng_state())
    again = zoo("mlp", (8,), 3).init(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_parameters_have_the_precision_of_the_data():
    assert {p.dtype for p in front(nn.BatchNorm1d(5), 5).init(0).values()} == {DOUBLE}
    assert {b.dtype for b in front(nn.BatchNorm1d(5), 5).buffers.values()} == {DOUBLE}


# -- models that do not fit


class After(nn.Module):
    """A model with something between its body and its head, and something after its head."""

    def __init__(self, after, before=nn.Identity()):  # noqa: B008
        super().__init__()
        self.body, self.between, self.head, self.after = nn.Linear(6, 5), before, nn.Linear(5, 3), after

    def forward(self, x):
        return self.after(self.head(self.between(torch.tanh(self.body(x)))))


class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


@pytest.mark.parametrize(
    "after",
    [
        nn.LogSoftmax(-1),
        nn.Softmax(-1),
        Function(lambda z: F.log_softmax(z, -1)),
        Function(lambda z: z / 2),
        Function(lambda z: z.view(-1, 3, 1)),  # does not even run on features
        Function(lambda z: z[:, :2]),
    ],
    ids=["LogSoftmax", "Softmax", "log_softmax", "scale", "view", "cut"],
)
def test_a_model_that_does_something_after_its_head_is_refused(after):
    with user_error("after its head 'head'", "must come last"):
        Network(lambda: After(after), "head", randn(2, 6))


def test_a_scale_after_a_head_that_starts_at_zero_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 3)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

        def forward(self, x):
            return 2 * self.head(x)

    with user_error("after its head 'head'"):
        Network(Scaled, "head", randn(2, 6))


@pytest.mark.parametrize("beside", [nn.Identity(), nn.Dropout(0.1)], ids=["alone", "beside nn.Dropout"])
def test_a_model_with_functional_dropout_is_refused(beside):
    class FunctionalDropout(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, training=self.training)

    layers = nn.Sequential(beside, FunctionalDropout())
    with user_error("random numbers", "nn.Dropout"):
        Network(lambda: After(nn.Identity(), layers), "head", randn(2, 6))


@pytest.mark.parametrize("layer", [nn.Dropout2d(0.5), nn.AlphaDropout(0.5)], ids=["Dropout2d", "AlphaDropout"])
def test_a_model_with_dropout_of_another_kind_is_refused(layer):
    with user_error("nn.Dropout"):
        front(layer, 4, 3, 3)


def test_checking_a_model_leaves_torchs_generator_alone():
    module = After(nn.Identity(), nn.Dropout(0.5))
    before = torch.random.get_rng_state()
    Network(lambda: copy.deepcopy(module), "head", randn(2, 6))
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_unknown_head_is_refused_with_the_nearest_name():
    with user_error("'haed'", "did you mean 'head'?"):
        Network(lambda: After(nn.Identity()), "haed", randn(2, 6))
    with user_error("'zzz'", "after, between, body, head"):
        Network(lambda: After(nn.Identity()), "zzz", randn(2, 6))


def test_a_model_that_does_not_take_the_samples_is_refused_with_the_reason():
    with user_error("(7,)", "2x7 and 6x5"):
        Network(lambda: After(nn.Identity()), "head", randn(2, 7))


def test_a_model_that_fails_without_a_word_is_refused_too():
    def fail(x):
        raise AssertionError

    with user_error("(6,)", "AssertionError"):
        Network(lambda: After(nn.Identity(), Function(fail)), "head", randn(2, 6))


class Odd(nn.Module):
    """A normalisation before the first layer, two after layers, a tied weight."""

    def __init__(self):
        super().__init__()
        self.early = nn.LayerNorm(3)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4))
        self.again = nn.Linear(4, 4)
        self.again.weight = self.second[0].weight
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.again(self.second(self.norm(self.first(self.early(x))))))


def test_a_layer_is_a_module_with_the_normalisation_that_follows_it():
    """What comes before any layer joins the next one, and a tied weight belongs to its first owner."""
    network = Network(Odd, "head", torch.zeros(2, 3))
    assert network.layers == (
        ("early.weight", "early.bias", "first.weight", "first.bias", "norm.weight", "norm.bias"),
        ("second.0.weight", "second.0.bias", "second.1.weight", "second.1.bias"),
        ("again.bias",),
        ("head.weight", "head.bias"),
    )
    assert sorted(name for layer in network.layers for name in layer) == sorted(network.body + network.head)
