"""Products of stacked clients with few rows: the kernels give what torch's product gives, and programs use them."""

import os

import pytest
import torch
import torch.nn.functional as F

from fedloom.engines.trace import join_updates, overwrite, trace
from fedloom.kernels.products import PRODUCTS, SUBTRACT, replace_products, way

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

BMM = torch.ops.aten.bmm.default
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
    w = torch.randn(3, m, o, device=DEVICE)
    expected = w.double() - 0.1 * (a.double() @ b.double())
    products_triton.subtract(w, a, b, 0.1, precision, tiles)
    torch.testing.assert_close(w.double(), expected, rtol=1e-5, atol=2e-5)


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
    assert count(program, BMM) == 8  # outputs and weights of three layers, inputs of two
    replace_products(program)
    # two outputs, one input and two gradients to weights; all of the last layer are small
    assert (count(program, PRODUCTS), count(program, BMM)) == (5, 3)
    for a, b in zip(program(*inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float64, 10), (torch.float32, 33)])
def test_a_program_in_double_precision_or_with_many_rows_stays_as_it_is(dtype, rows):
    program = trace(step, layers(dtype, rows=rows))
    replace_products(program)
    assert count(program, PRODUCTS) == 0


def after(step, state, steps=2):
    """The state after some steps as the step returns it, the program that overwrites it, and what that leaves there."""
    expected, found = state, [v.clone() for v in state]
    for _ in range(steps):
        expected = step(*expected)
    at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    program = trace(lambda at, *flat: step(*flat), [at, *state])
    replace_products(program)
    overwrite(program, 1, 0)
    join_updates(program)
    for _ in range(steps):
        program(at, *found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return program


def test_steps_on_weights_are_one_operation():
    def descend(x, *weights):
        return [x, *(torch.sub(w, g, alpha=0.3) for w, g in zip(weights, step(x, *weights), strict=True))]

    program = after(descend, layers(torch.float32))
    # the first layer's factor is itself an input, which a program may overwrite
    assert (count(program, SUBTRACT), count(program, PRODUCTS), count(program, BMM)) == (1, 4, 3)


def test_a_product_of_what_was_overwritten_is_not_put_off():
    def swap(u, v, w):
        product = torch.bmm(v.mT, u)
        return [torch.sub(u, v), torch.sub(v, u), torch.sub(w, product, alpha=0.5)]

    def keep(u, v, w):
        product = torch.bmm(torch.tanh(v).mT, torch.tanh(u))
        return [u, product, torch.sub(w, product)]

    u, v, w = torch.randn(4, 10, 512), torch.randn(4, 10, 512), torch.randn(4, 512, 512)
    assert count(after(swap, [t.to(DEVICE) for t in (u, v, w)]), SUBTRACT) == 0
    wide = torch.randn(4, 512, 512)
    assert (
        count(after(lambda v, w: keep(v[:, :10], v[:, 10:20], w)[1:], [wide.to(DEVICE), w.to(DEVICE)]), SUBTRACT) == 0
    )


def test_tiles_fit_what_they_cover():
    for n, m, k, o in ((20, 10, 1024, 512), (50, 10, 12544, 128), (50, 10, 128, 12544), (50, 128, 10, 12544)):
        bm, bo, bk, *_ = way(n, m, k, o)
        assert min(bm, bo, bk) >= 16  # what a dot of a kernel asks for
        assert bm < 2 * max(m, 16)
        assert m <= bm or k <= bk  # rows in one tile, or one step
    assert way(100, 10, 64, 64) is None
    assert way(1 << 16, 10, 64, 64) is None
    assert way(2, 32, 2048, 512)[0] == 32
