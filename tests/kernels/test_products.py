"""Products of stacked clients with few rows: the kernels give what torch's product gives, and programs use them."""

import os

import pytest
import torch
import torch.nn.functional as F

from fedloom.engines.trace import trace
from fedloom.kernels import products
from fedloom.kernels.products import replace_products, way

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

aten, own = torch.ops.aten.bmm.default, torch.ops.fedloom.products.default
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("m", "k", "o", "tiles", "pieces"),
    [
        (10, 300, 70, [16, 32, 32, 4, 3], 2),  # all sides ragged
        (17, 1024, 16, [32, 16, 64, 4, 3], 4),
        (10, 64, 130, [16, 64, 64, 4, 4], 1),
        (10, 10, 70, [16, 32, 16, 4, 1], 1),
        (70, 10, 90, [64, 64, 16, 4, 1], 1),
    ],
)
def test_kernels_give_what_torch_gives_for_factors_in_any_layout(m, k, o, tiles, pieces):
    pytest.importorskip("triton")
    from fedloom.kernels import products_triton

    torch.manual_seed(0)
    programs = -(-m // tiles[0]) * -(-o // tiles[1]) * 3
    assert products_triton.pieces(programs, -(-k // tiles[2])) == pieces
    a, b = torch.randn(3, m, k, device=DEVICE), torch.randn(3, k, o, device=DEVICE)
    wide = torch.zeros(3, m, 2 * k, device=DEVICE)
    wide[:, :, ::2] = a
    turned = [v.mT.contiguous().mT for v in (a, b)]
    shared = b[:1].expand(3, k, o)
    precision = "tf32x3" if DEVICE.type == "cuda" else "ieee"  # the interpreter rounds nothing
    for left, right in ((a, b), (a, turned[1]), (turned[0], b), (turned[0], turned[1]), (wide[:, :, ::2], shared)):
        found = products_triton.product(left, right, precision, tiles)
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), left.double() @ right.double(), rtol=1e-5, atol=2e-5)
        assert torch.equal(found, products_triton.product(left, right, precision, tiles))


def test_work_is_split_until_all_processors_have_some():
    pytest.importorskip("triton")
    from fedloom.kernels.products_triton import PROGRAMS, pieces

    assert pieces(10 * PROGRAMS, 200) == 1
    assert pieces(PROGRAMS // 2, 200) == 2
    assert pieces(1, 3) == 1  # too short
    assert all(1 <= pieces(programs, steps) <= max(1, steps) for programs in (1, 7, 999) for steps in (1, 2, 9, 500))


def layers(dtype, n=4, rows=10, width=512):
    torch.manual_seed(0)
    sizes = [(width, width), (width, width), (3, width)]
    weights = [torch.randn(n, *size, dtype=dtype, device=DEVICE) / width**0.5 for size in sizes]
    return [torch.randn(n, rows, width, dtype=dtype, device=DEVICE), *weights]


def step(x, *weights):
    """Gradients of a network of three layers, for clients on the first axis."""

    def loss(weights, x):
        for w in weights:
            x = torch.tanh(F.linear(x, w))
        return (x**2).sum()

    return list(torch.func.vmap(torch.func.grad(loss))(weights, x))


def count(program, op):
    return len(program.graph.find_nodes(op="call_function", target=op))


def test_a_program_uses_them_for_the_large_layers_and_gives_the_same():
    inputs = layers(torch.float32)
    program = trace(step, inputs)
    expected = program(*inputs)
    assert count(program, aten) == 8  # outputs and weights of three layers, inputs of two
    replace_products(program)
    # two outputs, one input and two gradients to weights; all of the last layer are small
    assert (count(program, own), count(program, aten)) == (5, 3)
    for a, b in zip(program(*inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float64, 10), (torch.float32, 33)])
def test_a_program_in_double_precision_or_with_many_rows_stays_as_it_is(dtype, rows):
    program = trace(step, layers(dtype, rows=rows))
    replace_products(program)
    assert count(program, own) == 0


def test_tiles_fit_what_they_cover():
    for n, m, k, o in ((20, 10, 1024, 512), (50, 10, 12544, 128), (50, 10, 128, 12544), (50, 128, 10, 12544)):
        bm, bo, bk, *_ = way(n, m, k, o)
        assert min(bm, bo, bk) >= 16  # what a dot of a kernel asks for
        assert bm < 2 * max(m, 16)
        assert m <= bm or k <= bk  # rows in one tile, or one step
    assert way(100, 10, 64, 64) is None
    assert way(1 << 16, 10, 64, 64) is None
    assert products.way(2, 32, 2048, 512)[0] == 32
