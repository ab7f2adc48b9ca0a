"""Sums over samples and pixels per client and channel, in traced graphs and by the kernel."""

import pytest
import torch
import torch.nn.functional as F

from fedloom.engine.graph.tracing import trace
from fedloom.nn.kernels import channel_sum
from fedloom.nn.kernels.channel_sum import channel_sums, replace_channel_sums
from fedloom.nn.kernels.pooling import replace_pooling


def replaced(f, *inputs):
    """The code of a traced graph with pooling and sums replaced, which must give what f gives."""
    module = trace(f, inputs)
    replace_pooling(module)
    replace_channel_sums(module)
    module.graph.lint()
    torch.testing.assert_close(module(*inputs), f(*inputs), rtol=1e-6, atol=1e-6)
    return module.code


def bias_gradients(network):
    """Gradients to biases that are added to all pixels of a channel, for clients on the first axis."""

    def one(x):
        return torch.func.grad(lambda x: ((network(x) - 1) ** 2).sum())(x).sum((0, 2, 3))

    return lambda x: [torch.func.vmap(one)(x)]


POOLED = bias_gradients(lambda x: F.max_pool2d(torch.relu(x), 2))
IMAGES = (2, 4, 3, 6, 6)


@pytest.mark.parametrize("network", [torch.tanh, lambda x: F.max_pool2d(x, 2), None], ids=["tanh", "pool", "relu-pool"])
def test_gradients_to_biases_are_summed_by_the_operator(network):
    x = torch.randn(IMAGES, dtype=torch.float64)
    code = replaced(bias_gradients(network) if network else POOLED, x)
    assert "channel_sums" in code
    assert "aten.sum" not in code
    assert "unpool" not in code  # only the pooled gradient is summed: the rest of the image is zero


def test_other_sums_are_left_to_torch(monkeypatch):
    x = torch.randn(IMAGES, dtype=torch.float64)
    for other in (
        lambda x: [x.sum((1, 3, 4), keepdim=True)],
        lambda x: [x.sum((1, 2, 4))],
        lambda x: [x[0].sum((0, 2, 3))],
    ):
        assert "channel_sums" not in replaced(other, x)
    monkeypatch.setattr(channel_sum, "MAX_TERMS", 4 * 9 - 1)  # pooled images have 3 x 3 pixels
    assert "channel_sums" not in replaced(POOLED, x)
    monkeypatch.setattr(channel_sum, "MAX_TERMS", 4 * 9)
    assert "channel_sums" in replaced(POOLED, x)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)], ids=str
)
def test_the_kernel_sums_by_channel(dtype, error, triton_module, device):
    module = triton_module("channel_sum")
    g = torch.randn(2, 7, 3, 9, 11, device=device).to(dtype)
    assert g[0, :, 0].numel() > module.BLOCK  # several steps, of which the last is ragged
    places = torch.randint(-1, 2, g.shape, device=device).to(torch.int8)
    for where in (None, places):
        exact = channel_sums(g.double().cpu(), where if where is None else where.cpu())
        torch.testing.assert_close(module.channel_sums(g, where).double().cpu(), exact, rtol=error, atol=error)


def test_terms_with_negative_places_are_left_out():
    g = torch.randn(2, 2, 3, 2, 2, dtype=torch.float64)
    places = torch.randint(-1, 2, g.shape).to(torch.int8)
    torch.testing.assert_close(channel_sums(g, places), (g * (places >= 0)).sum((1, 3, 4)))
    torch.library.opcheck(channel_sums, (g, places), test_utils=("test_schema", "test_faketensor"))
