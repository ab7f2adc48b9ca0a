"""Sums over samples and pixels in programs."""

import os

import pytest
import torch
import torch.nn.functional as F

from fedloom.engine.graph.tracing import trace
from fedloom.nn.kernels import channel_sum as sums
from fedloom.nn.kernels.channel_sum import replace_channel_sums
from fedloom.nn.kernels.pooling import replace_pooling

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def program_for(f, *inputs):
    program = trace(f, inputs)
    replace_pooling(program)
    replace_channel_sums(program)
    program.graph.lint()
    torch.testing.assert_close(program(*inputs), f(*inputs), rtol=1e-6, atol=1e-6)
    return program.code


def test_programs_sum_what_is_not_zero(monkeypatch):
    x = torch.randn(2, 4, 3, 6, 6, dtype=torch.float64)
    for network in (torch.tanh, lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(torch.relu(x), 2)):

        def bias(x):
            return torch.func.grad(lambda x: ((network(x) - 1) ** 2).sum())(x).sum((0, 2, 3))  # noqa: B023

        f = torch.func.vmap(bias)
        code = program_for(lambda x: [f(x)], x)  # noqa: B023
        assert "channel_sums" in code
        assert "aten.sum" not in code
        assert "unpool" not in code  # nobody else wants it
    for left in (lambda x: x.sum((1, 3, 4), keepdim=True), lambda x: x.sum((1, 2, 4)), lambda x: x[0].sum((0, 2, 3))):
        assert "channel_sums" not in program_for(lambda x: [left(x)], x)  # noqa: B023
    monkeypatch.setattr(sums, "MOST", 4 * 9 - 1)
    assert "channel_sums" not in program_for(lambda x: [f(x)], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_kernel_sums_by_channel(dtype):
    pytest.importorskip("triton")
    from fedloom.nn.kernels.triton import channel_sum as sums_triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    g = torch.randn(2, 7, 3, 9, 11, device=device).to(dtype)  # more than a block
    places = torch.randint(-1, 2, g.shape, device=device).to(torch.int8)
    for where in (None, places):
        exact = (g if where is None else g.masked_fill(where < 0, 0)).double().sum((1, 3, 4))
        close = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(sums_triton.channel_sums(g, where).double(), exact, rtol=close, atol=close)
