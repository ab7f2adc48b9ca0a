"""Recurrent layers: stacked, they give what torch's own give, values and gradients alike."""

import copy

import pytest
import torch
from sentences import user_error
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from fedloom.core.autodiff import grad, vmap
from fedloom.nn.kernels.lstm import Stepwise
from fedloom.nn.network import Network

DOUBLE = torch.float64
CLIENTS, BATCH, STEPS, INPUTS, WIDTH = 3, 4, 5, 3, 4


def randn(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


class Reader(nn.Module):
    """Reads sequences, uses everything that the layer gives, and may give it an initial state."""

    def __init__(self, layer, given=False):
        super().__init__()
        self.layer, self.given = layer, given
        directions = 2 if layer.bidirectional else 1
        self.states = layer.num_layers * directions
        self.head = nn.Linear(layer.hidden_size * (directions + self.states), 3)

    def forward(self, x):
        self.layer.flatten_parameters()
        sequences = x if self.layer.batch_first else x.transpose(0, 1)
        state = None
        if self.given:
            h = x[:, 0, :1].expand(self.states, -1, self.layer.hidden_size)
            state = (h, 2 * h) if isinstance(self.layer, nn.LSTM) or getattr(self.layer, "mode", "") == "LSTM" else h
        out, end = self.layer(sequences, state)
        last = end[0] * end[1] if isinstance(end, tuple) else end
        out = out if self.layer.batch_first else out.transpose(0, 1)
        return self.head(torch.cat([out.sum(1), *last], -1))


OPTIONS = [
    {},
    {"num_layers": 2, "batch_first": True},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
]


@pytest.mark.parametrize("given", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **o: nn.RNN(*a, nonlinearity="relu", **o)])
def test_stacked_models_have_the_logits_and_gradients_of_torchs_layers(kind, options, given):
    """Three models with weights of their own, against three modules."""
    modules = [Reader(kind(INPUTS, WIDTH, **options), given).double() for _ in range(CLIENTS)]
    x = randn(CLIENTS, BATCH, STEPS, INPUTS)
    network = Network(lambda: copy.deepcopy(modules[0]), "head", x[0])
    stacked = {
        name: torch.stack([dict(m.named_parameters())[name].detach() for m in modules]) for name in network.init(0)
    }

    def one(params, x):
        def loss(params):
            out = network.apply(params, {}, x, train=True)
            return (out.logits**3).sum(), out.logits

        return grad(loss, params)

    gradients, logits = vmap(one)(stacked, x)
    for i, module in enumerate(modules):
        expected = module(x[i])
        torch.testing.assert_close(logits[i], expected, rtol=1e-12, atol=1e-12)
        (expected**3).sum().backward()
        alone, _ = one({name: p[i] for name, p in stacked.items()}, x[i])
        for name, p in module.named_parameters():
            torch.testing.assert_close(gradients[name][i], p.grad, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(alone[name], p.grad, rtol=1e-10, atol=1e-10)


def test_in_single_precision_over_eighty_steps_the_lstm_agrees_to_a_millionth():
    layer = nn.LSTM(8, 100, 2, batch_first=True)
    module = Reader(layer)
    x = randn(1, 10, 80, 8, dtype=torch.float32)
    network = Network(lambda: copy.deepcopy(module), "head", x[0])
    params = {name: p.detach()[None] for name, p in module.named_parameters()}

    def one(params, x):
        return grad(lambda p: (network.apply(p, {}, x, train=True).logits.mean(), {}), params)[0]

    found = vmap(one)(params, x)
    module(x[0]).mean().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name][0], p.grad, rtol=1e-5, atol=1e-6)


def test_the_lstms_backward_pass_can_be_differentiated():
    z, h, c, w = randn(3, 2, 8), randn(2, 2, seed=1), randn(2, 2, seed=2), randn(8, 2, seed=3)
    inputs = [v.requires_grad_() for v in (z, h, c, w)]
    assert torch.autograd.gradcheck(Stepwise.apply, inputs)
    assert torch.autograd.gradgradcheck(Stepwise.apply, inputs)


def test_dropout_between_layers_is_keyed_and_does_not_shift_when_samples_are_padded():
    layer = nn.LSTM(INPUTS, WIDTH, 2, batch_first=True, dropout=0.5)
    x = randn(BATCH, STEPS, INPUTS)
    network = Network(lambda: Reader(copy.deepcopy(layer)), "head", x)

    def logits(x, key):
        return network.apply(network.init(0), {}, x, train=True, key=torch.tensor(key)).logits

    filled = torch.cat([x, randn(3, STEPS, INPUTS, seed=9)])
    torch.testing.assert_close(logits(filled, 1)[:BATCH], logits(x, 1))
    assert not torch.allclose(logits(x, 1), logits(x, 2))
    plain = network.apply(network.init(0), {}, x, train=False).logits
    assert not torch.allclose(logits(x, 1), plain)


def test_every_layer_of_a_recurrent_module_is_a_layer_with_both_directions_in_it():
    network = Network(lambda: Reader(nn.LSTM(INPUTS, WIDTH, 2, bidirectional=True)), "head", randn(2, STEPS, INPUTS))
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    first, second, head = network.layers
    assert first == tuple(f"layer.{kind}_l0{direction}" for direction in ("", "_reverse") for kind in kinds)
    assert second == tuple(f"layer.{kind}_l1{direction}" for direction in ("", "_reverse") for kind in kinds)
    assert head == ("head.weight", "head.bias")


def test_initial_values_are_those_of_torch():
    network = Network(lambda: Reader(nn.LSTM(INPUTS, WIDTH)), "head", randn(2, STEPS, INPUTS))
    torch.manual_seed(5)
    layer = nn.LSTM(INPUTS, WIDTH)
    for name, p in layer.named_parameters():
        assert torch.equal(network.init(5)[f"layer.{name}"], p.double())


def test_projections_and_packed_sequences_are_refused():
    with user_error("'layer'", "proj_size=2"):
        Network(lambda: Front(nn.LSTM(INPUTS, WIDTH, proj_size=2)), "head", randn(2, STEPS, INPUTS))
    with user_error("'layer'", "padded sequences"):
        Network(lambda: Front(nn.GRU(INPUTS, WIDTH), pack=True), "head", randn(2, STEPS, INPUTS))


class Front(nn.Module):
    def __init__(self, layer, pack=False):
        super().__init__()
        self.layer, self.pack = layer, pack
        self.head = nn.Linear(layer.proj_size or layer.hidden_size, 3)

    def forward(self, x):
        x = x.transpose(0, 1)
        if self.pack:
            return self.head(self.layer(pack_padded_sequence(x, [STEPS] * x.shape[1]))[1][0])
        return self.head(self.layer(x)[0][-1])
