"""Max-pooling, ReLU of its results and their gradient, in traced graphs and by kernels: as in torch, to the bit."""

import pytest
import torch
import torch.nn.functional as F

from fedloom.engine.graph.tracing import trace
from fedloom.nn.kernels.pooling import max_pool, max_unpool, replace_pooling

ORDERS = {
    "relu first": lambda x, **options: F.max_pool2d(torch.relu(x), **options),
    "pool first": lambda x, **options: torch.relu(F.max_pool2d(x, **options)),
    "alone": F.max_pool2d,
}


def images(*shape, dtype=torch.float32):
    """With ties, NaN, infinities and negative zeros, and with windows that are all negative."""
    x = torch.randn(shape).round()
    for value in (torch.nan, torch.inf, -torch.inf, -0.0):
        x[torch.rand(shape) < 0.1] = value
    x[..., :2, :2], x[..., 2:4, :2] = -torch.inf, -1.0
    return x.to(dtype)


def replaced(f, *inputs):
    """The code of a traced graph with pooling replaced, which must give what f gives."""
    module = trace(f, inputs)
    replace_pooling(module)
    module.graph.lint()
    torch.testing.assert_close(module(*inputs), f(*inputs), rtol=0, atol=0, equal_nan=True)
    return module.code


def gradient(network, **options):
    return lambda x: [torch.func.grad(lambda x: (network(x, **options) ** 2 * torch.arange(4.0)).sum())(x)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("options", "size", "fits"),
    [
        ({"kernel_size": 2}, (7, 9), True),  # some pixels are in no window
        ({"kernel_size": (3, 2)}, (6, 8), True),
        ({"kernel_size": 2, "ceil_mode": True}, (7, 7), True),
        ({"kernel_size": 3, "stride": 2}, (7, 9), False),
        ({"kernel_size": 2, "padding": 1}, (4, 6), False),
        ({"kernel_size": (2, 32)}, (4, 128), True),
        ({"kernel_size": (4, 32)}, (4, 128), False),  # positions in a window do not fit a byte
    ],
)
def test_disjoint_windows_are_pooled_by_the_operators_with_torchs_results(options, size, fits, order):
    x = images(3, 2, *size)
    f = gradient(ORDERS[order], **options)
    for code in (replaced(f, x), replaced(torch.func.vmap(f), x[:, None].expand(-1, 2, -1, -1, -1).contiguous())):
        found = [name in code for name in ("fedloom.max_pool", "fedloom.max_unpool", "aten.max_pool")]
        assert found == [fits, fits, not fits]
        assert ("relu" in code or "threshold" in code) == (not fits and order != "alone")
    code = replaced(lambda x: [ORDERS[order](x, **options)], x)
    if fits:  # without a gradient, places are not needed
        assert f"{order != 'alone'}, False)" in code
        assert "relu" not in code


def test_what_other_operations_read_is_left_as_it_is():
    """Indices, which second derivatives read; maxima before ReLU; gradients and images that are not contiguous."""
    x, options = images(3, 2, 8, 8).nan_to_num(1, 1, -1), {"kernel_size": 2}
    once = gradient(lambda x, **options: ORDERS["pool first"](x**2 - 1, **options), **options)
    code = replaced(lambda x: [torch.func.grad(lambda x: (once(x)[0] ** 2).sum())(x)], x)
    assert "fedloom.max_unpool" in code  # by torch's indices
    assert "aten.max_pool2d_with_indices.default" in code
    assert "fedloom.max_pool." not in code

    def raw(x, **options):
        y = F.max_pool2d(x, **options)
        return torch.relu(y) + y.detach()

    def expanded_gradient(x):
        return [torch.func.grad(lambda x: ORDERS["pool first"](x, **options).sum())(x)]

    for f, given in ((gradient(raw, **options), x), (torch.func.vmap(expanded_gradient), x[:, None])):
        code = replaced(f, given)
        assert "[2, 2], [4, 4], False, True)" in code
        assert "threshold" in code
    code = replaced(lambda x: [*F.max_pool2d(x, 2, return_indices=True)], x)
    assert "fedloom" not in code
    code = replaced(gradient(ORDERS["pool first"], **options), x.to(memory_format=torch.channels_last))
    assert "fedloom" not in code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "kernel", "ceil"), [((15, 19), (2, 2), False), ((15, 19), (2, 3), True), ((6, 6), (3, 3), False)]
)
def test_the_kernels_give_what_torch_gives(size, kernel, ceil, dtype, triton_module, device):
    module, shape = triton_module("pooling"), list(size)
    x = images(5, 3, *size, dtype=dtype).to(device)
    y, indices = F.max_pool2d(x, kernel, ceil_mode=ceil, return_indices=True)
    g = torch.randn(y.shape).to(x)
    kernel, pooled = list(kernel), list(y.shape[-2:])
    for relu, expected in ((False, y), (True, y.relu())):
        values, places = module.max_pool(x, kernel, pooled, relu, True)
        alone, none = module.max_pool(x, kernel, pooled, relu, False)
        assert (places.dtype, none.numel()) == (torch.int8, 0)
        for found in (values, alone):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(places.cpu(), max_pool(x.cpu(), kernel, pooled, relu, True)[1])
        masked = torch.ops.aten.threshold_backward(g, expected, 0) if relu else g
        image = torch.ops.aten.max_pool2d_with_indices_backward(masked, x, kernel, kernel, 0, 1, ceil, indices)
        for where, given in ((places, g), (indices, masked)):
            assert torch.equal(module.max_unpool(given, where, shape, kernel), image)
            assert torch.equal(max_unpool(given.cpu(), where.cpu(), shape, kernel), image.cpu())


def test_fake_tensors_have_the_shapes_of_the_results():
    tests = ("test_schema", "test_faketensor")
    x = torch.randn(2, 3, 7, 9)
    for with_places in (True, False):
        torch.library.opcheck(max_pool, (x, [2, 3], [3, 3], True, with_places), test_utils=tests)
    y, places = max_pool(x, [2, 3], [3, 3], True, True)
    torch.library.opcheck(max_unpool, (y, places, [7, 9], [2, 3]), test_utils=tests)
