"""Dropout masks from keys: the kernel drops what the formula of `core.keys` drops."""

import math

import pytest
import torch
from torch import nn

from fedloom.core.keys import fold, salt, uniform
from fedloom.nn.kernels.dropout import dropout_factors
from fedloom.nn.network import Network

KEYS = [0, 1, -1, 1234567, 2**63 - 1, -(2**63), -6457827717110365317]

DRAWN = uniform(fold(torch.tensor(1234567), 2), (300,), torch.float32).min()  # with this p, the element is kept ...
ABOVE = torch.nextafter(DRAWN, torch.tensor(1.0)).item()  # ... and with this one it is dropped
DRAWN = DRAWN.item()


def kept(key, draw, shape, p):
    return uniform(fold(key, draw), tuple(shape), torch.float32) >= p


@pytest.fixture
def keys(device):
    return torch.tensor(KEYS, device=device)


@pytest.mark.parametrize("p", [0.25, 0.1, DRAWN, ABOVE, 1.0])
@pytest.mark.parametrize("shape", [(1,), (7, 150), (2, 3, 512)])
def test_kernel_and_formula_agree_to_the_bit(p, shape, keys, triton_module):
    module = triton_module("dropout")
    for draw in (1, 2, 900):
        found = module.factors(keys, salt(draw), math.prod(shape), p, 3.0)
        expected = torch.stack([kept(key, draw, shape, p) for key in keys])
        assert torch.equal(found.view(-1, *shape), 3.0 * expected)


def test_the_kernel_takes_keys_of_any_shape(keys, triton_module):
    found = triton_module("dropout").dropout_factors(keys[:6].view(2, 3), 2, [4, 5], 0.3)
    assert torch.equal(found, dropout_factors(keys[:6].view(2, 3), 2, [4, 5], 0.3))


@pytest.mark.parametrize("p", [0.25, 0.1, DRAWN, ABOVE, 1.0])
def test_factors_are_zero_or_keep_the_mean(p, keys):
    found = torch.func.vmap(lambda key: dropout_factors(key, 2, [4, 100], p))(keys)
    for row, key in zip(found, keys, strict=True):
        assert torch.equal(row, kept(key, 2, (4, 100), p) / ((1 - p) or 1))
    assert torch.equal(found, dropout_factors(keys, 2, [4, 100], p))
    assert torch.equal(found[3], dropout_factors(keys[3], 2, [4, 100], p))


def test_first_and_second_derivatives_of_many_clients_pass_through_the_factors(keys, device):
    x = torch.randn(len(KEYS), 5, 3, device=device)

    def second_derivative(x, key):
        def cube(x):
            return ((x * dropout_factors(key, 1, [5, 3], 0.5)) ** 3).sum()

        return torch.func.grad(lambda x: torch.func.grad(cube)(x).sum())(x)

    expected = torch.stack([48 * v * kept(key, 1, (5, 3), 0.5) for v, key in zip(x, keys, strict=True)])  # 6 * 2^3
    torch.testing.assert_close(torch.func.vmap(second_derivative)(x, keys), expected)


def test_fake_tensors_have_the_shapes_of_the_results(keys):
    torch.library.opcheck(dropout_factors, (keys, 2, [4, 5], 0.3), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_drop_the_same_on_every_device():
    def make():
        return nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.1), nn.Linear(40, 2))

    x, key, found = torch.randn(6, 40), torch.tensor(77), []
    for device in ("cpu", "cuda"):
        network = Network(make, "2", x.to(device))
        out = network.apply(network.init(0), {}, x.to(device), train=True, key=key.to(device))
        found.append(out.features.cpu())
    assert 0 < (found[0] == 0).sum() < x.numel() / 2
    torch.testing.assert_close(*found)
