"""Products of stacked clients: the kernels give what torch's product gives, and programs use them."""

import os
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from emulated import Emulated, compiles

from fedloom.engine.graph.tracing import fuse_matmul_updates, trace, write_to_inputs
from fedloom.kernels import products, products_cuda
from fedloom.nn.kernels.matmul import MATMUL, SUBTRACT_MATMUL, pieces, replace_matmuls, depth_per_program, way

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

BMM = torch.ops.aten.bmm.default
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("m", "k", "o", "tiles", "parts"),
    [
        (10, 300, 70, [16, 32, 32, 4, 3], 2),  # all sides ragged
        (17, 1024, 16, [32, 16, 64, 4, 3], 4),
        (10, 64, 130, [16, 64, 64, 4, 4], 1),
        (10, 10, 70, [16, 32, 16, 4, 1], 1),
        (70, 10, 90, [64, 64, 16, 4, 1], 1),
        (70, 36, 40, [64, 64, 32, 4, 3], 1),
        (20, 40, 130, [32, 128, 32, 4, 3], 1),
        (70, 40, 8, [64, 16, 32, 4, 4], 1),
    ],
)
def test_kernels_give_what_torch_gives_for_factors_in_any_layout(m, k, o, tiles, parts):
    pytest.importorskip("triton")
    from fedloom.nn.kernels.triton import matmul as products_triton

    torch.manual_seed(0)
    a, b = torch.randn(3, m, k, device=DEVICE), torch.randn(3, k, o, device=DEVICE)
    assert -(-k // depth_per_program(a, b, tiles)) == parts
    wide = torch.zeros(3, m, 2 * k, device=DEVICE)
    wide[:, :, ::2] = a
    turned = [v.mT.contiguous().mT for v in (a, b)]
    shared = b[:1].expand(3, k, o)
    for left, right in ((a, b), (a, turned[1]), (turned[0], b), (turned[0], turned[1]), (wide[:, :, ::2], shared)):
        found = products_triton.product(left, right, "tf32x3", tiles)
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), left.double() @ right.double(), rtol=1e-5, atol=2e-5)
    assert torch.equal(found, products_triton.product(left, right, "tf32x3", tiles))
    w = torch.randn(3, m, o, device=DEVICE)
    expected = w.double() - 0.1 * (a.double() @ b.double())
    products_triton.subtract(w, a, b, 0.1, "tf32x3", tiles)
    torch.testing.assert_close(w.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.fixture
def in_halves(tmp_path, monkeypatch):
    """The kernels of products.cu."""
    if DEVICE.type == "cuda":
        assert products_cuda.takes(DEVICE)
        return
    if not compiles("#include <barrier>"):
        pytest.skip("no compiler for C++20")

    @cache
    def emulated(device, tiles, deep, apart, update):
        constants = products_cuda.constants(tiles, deep, apart, update)
        kernels = Emulated(tmp_path, "products.cu", ("product", "rooms"), THREADS=32 * tiles[3], **constants)
        found = torch.zeros(1, dtype=torch.int64)
        kernels.launch("rooms", (1,), 1, 0, found)
        assert found.item() == products_cuda.room(list(tiles))
        return kernels

    monkeypatch.setattr(products_cuda, "kernels", emulated)
    monkeypatch.setattr(products_cuda, "processors", lambda device: 1)


@pytest.mark.parametrize(
    ("layout", "shape", "tiles"),
    [  # a's sums in one piece, b's columns; shape; rows, columns, depth, warps, stages, programs
        ((True, True), (71, 36, 20), [64, 16, 16, 4, 2, 1]),
        ((True, False), (13, 44, 38), [64, 40, 32, 4, 2, 3]),
        ((False, True), (20, 45, 36), [64, 40, 32, 4, 2, 1]),
        ((False, False), (68, 20, 14), [64, 16, 16, 4, 2, 2]),
    ],
    ids=str,
)
def test_in_halves_products_are_as_exact_as_in_float32(in_halves, layout, shape, tiles):
    """Factors lie in larger ones, of which nothing is used; all sides are ragged; programs compute several tiles."""
    torch.manual_seed(0)
    m, k, o = shape

    def some(rows, columns, in_rows):
        whole = torch.full((2, rows + 4, columns + 8), torch.nan, device=DEVICE)
        whole = whole if in_rows else whole.mT.contiguous().mT
        return whole[:, 4:, 4:-4].copy_(torch.randn(2, rows, columns))

    a, b = some(m, k, layout[0]), some(k, o, layout[1])
    expected = a.double() @ b.double()

    def error(found):
        return ((found - expected).abs().max() / expected.abs().max()).item()

    found = products_cuda.product(a, b, tiles)
    assert error(found) < 4e-7
    assert error(cut(a).double() @ cut(b).double()) > 1e-4  # what the halves are for
    if layout == (False, True):
        w = torch.randn(2, m, o, device=DEVICE)
        late = torch.empty(w.numel() + 1, device=DEVICE)[1:].view(w.shape).copy_(w)  # not at a multiple of two
        for mine in (w.clone(), late):
            products_cuda.subtract(mine, a, b, 0.5, tiles)
            torch.testing.assert_close(mine, w - 0.5 * found, rtol=1e-6, atol=1e-6)


def cut(x):
    """What a tensor core sees of it."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_work_is_split_until_all_processors_have_some():
    assert pieces(10 * products.PROGRAMS, 200) == 1
    assert pieces(products.PROGRAMS // 2, 200) == 2
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
    replace_matmuls(program)
    # two outputs, one input and two gradients to weights; all of the last layer are small
    assert (count(program, MATMUL), count(program, BMM)) == (5, 3)
    for a, b in zip(program(*inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "rows", "precision"),
    [(torch.float64, 10, "tf32x3"), (torch.float32, 33, "tf32x3"), (torch.float32, 60, "tf32")],
    ids=["double precision", "little to do", "rounded by the library"],
)
def test_a_program_stays_as_it_is_with(dtype, rows, precision, monkeypatch):
    monkeypatch.setattr(products, "precision", lambda: precision)
    program = trace(step, layers(dtype, rows=rows))
    replace_matmuls(program)
    assert count(program, MATMUL) == 0


def after(step, state, steps=2):
    """The state after some steps as the step returns it, the program that overwrites it, and what that leaves there."""
    expected, found = state, [v.clone() for v in state]
    for _ in range(steps):
        expected = step(*expected)
    at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    program = trace(lambda at, *flat: step(*flat), [at, *state])
    replace_matmuls(program)
    write_to_inputs(program, 1, 0)
    fuse_matmul_updates(program)
    for _ in range(steps):
        program(at, *found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return program


def descend(x, *weights):
    length = 3 / x.shape[1]  # so short that rounding does not grow
    return [x, *(torch.sub(w, g, alpha=length) for w, g in zip(weights, step(x, *weights), strict=True))]


def test_steps_on_weights_are_one_operation():
    program = after(descend, layers(torch.float32))
    # the first layer's factor is itself an input, which a program may write_to_inputs
    assert (count(program, SUBTRACT_MATMUL), count(program, MATMUL), count(program, BMM)) == (1, 4, 3)


@pytest.mark.parametrize(("rows", "joined"), [(40, 1), (400, 0)], ids=["whole", "split"])
def test_sums_over_many_rows_are_subtracted_as_they_are_computed_unless_they_are_split(rows, joined, monkeypatch):
    monkeypatch.setattr(products, "ENOUGH", 1)
    program = after(descend, layers(torch.float32, rows=rows, width=64))
    # three outputs, one input and two gradients to weights; in the rest of the last layer rows are three numbers
    assert (count(program, SUBTRACT_MATMUL), count(program, MATMUL), count(program, BMM)) == (joined, 6 - joined, 2)
    for node in program.graph.find_nodes(op="call_function", target=SUBTRACT_MATMUL):
        assert node.args[4] == [32, 64, 32, 4, 3]


def test_a_product_of_what_was_overwritten_is_not_put_off():
    def swap(u, v, w):
        product = torch.bmm(v.mT, u)
        return [torch.sub(u, v), torch.sub(v, u), torch.sub(w, product, alpha=0.5)]

    def keep(u, v, w):
        product = torch.bmm(torch.tanh(v).mT, torch.tanh(u))
        return [u, product, torch.sub(w, product)]

    u, v, w = torch.randn(4, 10, 512), torch.randn(4, 10, 512), torch.randn(4, 512, 512)
    assert count(after(swap, [t.to(DEVICE) for t in (u, v, w)]), SUBTRACT_MATMUL) == 0
    wide = torch.randn(4, 512, 512)
    assert (
        count(after(lambda v, w: keep(v[:, :10], v[:, 10:20], w)[1:], [wide.to(DEVICE), w.to(DEVICE)]), SUBTRACT_MATMUL)
        == 0
    )


def tiles_of(n, m, k, o, turned=False, gap=0):
    """Of a product whose left rows lie `gap` numbers apart."""
    a = torch.empty(n, m, k + gap, device="meta")[:, :, :k]
    return way(a, torch.empty(n, o, k, device="meta").mT if turned else torch.empty(n, k, o, device="meta"))


def test_tiles_fit_what_they_cover():
    for n, m, k, o in ((20, 10, 1024, 512), (50, 10, 12544, 128), (50, 10, 128, 12544), (50, 128, 10, 12544)):
        bm, bo, bk, *_ = tiles_of(n, m, k, o)
        assert min(bm, bo, bk) >= 16  # what a dot of a kernel asks for
        assert bm < 2 * max(m, 16)
        assert m <= bm or k <= bk  # rows in one tile, or one step
    assert tiles_of(100, 10, 64, 64) is None
    assert tiles_of(1 << 16, 10, 64, 64) is None
    assert tiles_of(2, 32, 2048, 512)[0] == 32


def test_tiles_of_larger_products_fit_their_layout():
    assert tiles_of(20, 800, 400, 100)[:3] == [32, 128, 32]
    assert tiles_of(20, 800, 100, 400, turned=True)[:3] == [64, 64, 32]
    assert tiles_of(20, 800, 8, 400, turned=True) == [64, 64, 16, 4, 1]  # one step
    assert tiles_of(20, 800, 400, 8) == tiles_of(20, 800, 400, 8, turned=True) == [64, 16, 32, 4, 4]
    assert tiles_of(1, 800, 400, 100) is None  # too little to do
    for k, o, gap in ((398, 100, 2), (400, 100, 1), (100, 398, 0)):
        assert tiles_of(20, 800, k, o, gap=gap) is None  # rows that do not begin, or end, at every fourth number
    assert tiles_of(20, 800, 100, 398, turned=True) == [64, 64, 32, 4, 3]  # only the result's
    assert way(torch.empty(20, 800, 1600, device="meta")[:, :, ::4], torch.empty(20, 400, 100, device="meta")) is None
    late = torch.empty(20 * 800 * 400 + 1, device="meta")[1:].view(20, 800, 400)
    assert way(late, torch.empty(20, 400, 100, device="meta")) is None


def test_where_there_are_kernels_for_halves_larger_products_go_there(monkeypatch):
    monkeypatch.setattr(products_cuda, "takes", lambda device: True)
    assert tiles_of(100, 800, 400, 100) == [64, 104, 32, 4, 2, 2]
    assert tiles_of(100, 800, 100, 400, turned=True) == [64, 80, 16, 4, 2, 3]
    assert tiles_of(100, 800, 8, 400, turned=True) == [64, 80, 16, 4, 2, 3]
    assert tiles_of(20, 800, 400, 128) == [64, 64, 32, 4, 2, 2]
    kept = (
        tiles_of(100, 800, 8, 400),  # not the output of a layer
        tiles_of(20, 400, 800, 100),  # 140 programs
        tiles_of(100, 800, 400, 48),
        tiles_of(100, 32, 2048, 512),
        tiles_of(20, 800, 100, 399, turned=True),  # two numbers of the result's rows begin anywhere
    )
    assert [len(tiles) for tiles in kept] == [5] * 5
    assert tiles_of(1, 800, 400, 100) is None
    monkeypatch.setattr(products, "precision", lambda: "tf32")
    assert tiles_of(100, 800, 400, 100) is None


def test_programs_hand_products_and_steps_to_the_kernels_for_halves(monkeypatch):
    seen = []

    def product(a, b, tiles):
        seen.append(tiles)
        return torch.bmm(a, b)

    def subtract(w, a, b, alpha, tiles):
        seen.append((alpha, tiles))
        w.sub_(torch.bmm(a, b), alpha=alpha)

    monkeypatch.setattr(products, "ENOUGH", 1)
    monkeypatch.setattr(products_cuda, "LEAST", 1)
    for name, f in {"takes": lambda device: True, "product": product, "subtract": subtract}.items():
        monkeypatch.setattr(products_cuda, name, f)
    after(descend, layers(torch.float32, rows=40, width=64), steps=1)
    tiles = [64, 64, 16, 4, 2, 3]
    assert sorted(seen, key=str) == [(3 / 40, tiles), *[tiles] * 4]
