"""Max-pooling, the positive part of its results and their gradient in programs: as torch computes them, to the bit."""

import os

import pytest
import torch
import torch.nn.functional as F

from fedloom.engine.graph.tracing import trace
from fedloom.nn.kernels.pooling import pool, replace_pooling, unpool

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

ORDERS = {
    "relu first": lambda x, **options: F.max_pool2d(torch.relu(x), **options),
    "pool first": lambda x, **options: torch.relu(F.max_pool2d(x, **options)),
    "alone": F.max_pool2d,
}


def images(*shape, dtype=torch.float32):
    """With ties, and with pixels that nothing is larger than, or that are nothing."""
    x = torch.randn(shape).round()
    for value in (torch.nan, torch.inf, -torch.inf, -0.0):
        x[torch.rand(shape) < 0.1] = value
    x[..., :2, :2], x[..., 2:4, :2] = -torch.inf, -1.0
    return x.to(dtype)


def program_for(f, *inputs):
    """A trace of it with own pooling, which must give what it gives."""
    program = trace(f, inputs)
    replace_pooling(program)
    program.graph.lint()
    torch.testing.assert_close(program(*inputs), f(*inputs), rtol=0, atol=0, equal_nan=True)
    return program.code


def slope(network, **options):
    return lambda x: [torch.func.grad(lambda x: (network(x, **options) ** 2 * torch.arange(4.0)).sum())(x)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("options", "size", "own"),
    [
        ({"kernel_size": 2}, (7, 9), True),  # with pixels that no window covers
        ({"kernel_size": (3, 2)}, (6, 8), True),
        ({"kernel_size": 2, "ceil_mode": True}, (7, 7), True),
        ({"kernel_size": 3, "stride": 2}, (7, 9), False),
        ({"kernel_size": 2, "padding": 1}, (4, 6), False),
        ({"kernel_size": (2, 32)}, (4, 128), True),
        ({"kernel_size": (4, 32)}, (4, 128), False),  # places do not fit into a byte
    ],
)
def test_programs_give_what_torch_gives(options, size, own, order):
    x = images(3, 2, *size)
    f = slope(ORDERS[order], **options)
    for code in (program_for(f, x), program_for(torch.func.vmap(f), x[:, None].expand(-1, 2, -1, -1, -1).contiguous())):
        assert ("fedloom.pool" in code, "fedloom.unpool" in code, "aten.max_pool" in code) == (own, own, not own)
        assert ("relu" in code or "threshold" in code) == (not own and order != "alone")
    code = program_for(lambda x: [ORDERS[order](x, **options)], x)
    if own:  # nobody asks for places
        assert f"{order != 'alone'}, False)" in code
        assert "relu" not in code


def test_what_others_read_is_left_as_it_is():
    """The places, which second derivatives read; largest values that are not positive; gradients and
    images that lie otherwise."""
    x, options = images(3, 2, 8, 8).nan_to_num(1, 1, -1), {"kernel_size": 2}
    once = slope(lambda x, **options: ORDERS["pool first"](x**2 - 1, **options), **options)
    code = program_for(lambda x: [torch.func.grad(lambda x: (once(x)[0] ** 2).sum())(x)], x)
    assert "fedloom.unpool" in code  # by torch's places
    assert "aten.max_pool2d_with_indices.default" in code
    assert "fedloom.pool" not in code

    def raw(x, **options):
        y = F.max_pool2d(x, **options)
        return torch.relu(y) + y.detach()

    def spread(x):
        return [torch.func.grad(lambda x: ORDERS["pool first"](x, **options).sum())(x)]

    for f, given in ((slope(raw, **options), x), (torch.func.vmap(spread), x[:, None])):
        code = program_for(f, given)
        assert "[2, 2], [4, 4], False, True)" in code
        assert "threshold" in code
    code = program_for(lambda x: [*F.max_pool2d(x, 2, return_indices=True)], x)
    assert "fedloom" not in code
    code = program_for(slope(ORDERS["pool first"], **options), x.to(memory_format=torch.channels_last))
    assert "fedloom" not in code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "kernel", "ceil"), [((15, 19), (2, 2), False), ((15, 19), (2, 3), True), ((6, 6), (3, 3), False)]
)
def test_the_kernels_give_what_torch_gives(size, kernel, ceil, dtype):
    pytest.importorskip("triton")
    from fedloom.nn.kernels.triton import pooling as pooling_triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = images(5, 3, *size, dtype=dtype).to(device)
    y, at = F.max_pool2d(x, kernel, ceil_mode=ceil, return_indices=True)
    g = torch.randn(y.shape).to(x)
    sizes = list(y.shape[-2:])
    for positive, expected in ((False, y), (True, y.relu())):
        values, places = pooling_triton.pool(x, list(kernel), sizes, positive, True)
        alone, none = pooling_triton.pool(x, list(kernel), sizes, positive, False)
        assert (places.dtype, none.numel()) == (torch.int8, 0)
        for found in (values, alone):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(places.cpu(), pool(x.cpu(), list(kernel), sizes, positive, True)[1])
        into = torch.ops.aten.threshold_backward(g, expected, 0) if positive else g
        image = torch.ops.aten.max_pool2d_with_indices_backward(into, x, kernel, kernel, 0, 1, ceil, at)
        for where, given in ((places, g), (at, into)):
            for found in (pooling_triton.unpool(given, where, list(size), list(kernel)),
                          unpool(given.cpu(), where.cpu(), list(size), list(kernel)).to(device)):  # fmt: skip
                assert torch.equal(found, image)
