"""Dropout in one kernel drops what the formula from keys drops."""

import math
import os

import pytest
import torch
from torch import nn

from fedloom.core.keys import fold, salt, uniform
from fedloom.nn.kernels.dropout import dropout_factors
from fedloom.nn.network import Network

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEYS = [0, 1, -1, 1234567, 2**63 - 1, -(2**63), -6457827717110365317]


SOME = uniform(fold(torch.tensor(1234567), 2), (300,), torch.float32).min()  # a number that is drawn: it is kept ...
ABOVE = torch.nextafter(SOME, torch.tensor(1.0)).item()  # ... and here it is not
SOME = SOME.item()


def kept(key, draw, shape, p):
    return uniform(fold(key, draw), tuple(shape), torch.float32) >= p


@pytest.mark.parametrize("p", [0.25, 0.1, SOME, ABOVE, 1.0])
@pytest.mark.parametrize("shape", [(1,), (7, 150), (2, 3, 512)])
def test_kernel_and_formula_agree_to_the_bit(p, shape):
    pytest.importorskip("triton")
    from fedloom.nn.kernels.triton import dropout as dropout_triton

    keys = torch.tensor(KEYS, device=DEVICE)
    for draw in (1, 2, 900):
        found = dropout_triton.factors(keys, salt(draw), math.prod(shape), p, 3.0)
        expected = torch.stack([kept(key, draw, shape, p) for key in keys])
        assert torch.equal(found.view(-1, *shape), 3.0 * expected)


@pytest.mark.parametrize("p", [0.25, 0.1, SOME, ABOVE, 1.0])
def test_factors_are_zero_or_what_keeps_the_mean(p):
    keys = torch.tensor(KEYS, device=DEVICE)
    found = torch.func.vmap(lambda key: dropout_factors(key, 2, [4, 100], p))(keys)
    for row, key in zip(found, keys, strict=True):
        assert torch.equal(row, kept(key, 2, (4, 100), p) / ((1 - p) or 1))
    assert torch.equal(found, dropout_factors(keys, 2, [4, 100], p))
    assert torch.equal(found[3], dropout_factors(keys[3], 2, [4, 100], p))


def test_factors_serve_first_and_second_derivatives_of_many_clients():
    keys, x = torch.tensor(KEYS, device=DEVICE), torch.randn(len(KEYS), 5, 3, device=DEVICE)

    def curvature(x, key):
        def cube(x):
            return ((x * dropout_factors(key, 1, [5, 3], 0.5)) ** 3).sum()

        return torch.func.grad(lambda x: torch.func.grad(cube)(x).sum())(x)

    expected = torch.stack([48 * v * kept(key, 1, (5, 3), 0.5) for v, key in zip(x, keys, strict=True)])  # 6 * 2^3
    torch.testing.assert_close(torch.func.vmap(curvature)(x, keys), expected)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
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
