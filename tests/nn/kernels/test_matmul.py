"""Batched products of stacked clients: the kernel gives what torch's product gives, and traced graphs use it."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from fedloom.engine.graph.in_place import fuse_matmul_updates, write_to_inputs
from fedloom.engine.graph.tracing import trace
from fedloom.nn.kernels import matmul
from fedloom.nn.kernels.matmul import (
    FEW_COLUMNS,
    FEW_ROWS,
    MATMUL,
    MAX_SPLITS,
    MIN_PRODUCTS,
    MIN_WEIGHTS,
    SUBTRACT_MATMUL,
    batched_matmul,
    choose_tiles,
    depth_per_program,
    replace_matmuls,
    splits,
    subtract_matmul,
)

BMM = torch.ops.aten.bmm.default
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# -- the kernel ------------------------------------------------------------------------------------------------------

CASES = [  # m, k, o; tiles; into how many sums k is split
    (10, 90, 40, [16, 32, 16, 4, 3], 2),  # all sides ragged
    (17, 100, 16, [16, 16, 16, 4, 3], 3),
    (10, 10, 70, [16, 32, 16, 4, 1], 1),  # one step
    (70, 36, 40, [64, 32, 32, 4, 3], 1),
    *(
        pytest.param(*case, marks=gpu_only)
        for case in (
            (10, 300, 70, [16, 32, 32, 4, 3], 2),
            (17, 1024, 16, [32, 16, 64, 4, 3], 4),
            (10, 64, 130, [16, 64, 64, 4, 4], 1),
            (70, 10, 90, [64, 64, 16, 4, 1], 1),
            (20, 40, 130, [32, 128, 32, 4, 3], 1),
            (70, 40, 8, [64, 16, 32, 4, 4], 1),
        )
    ),
]


@pytest.fixture
def kernels(triton_module):
    return triton_module("matmul")


@pytest.mark.parametrize(("m", "k", "o", "tiles", "parts"), CASES)
def test_the_kernel_gives_what_torch_gives_for_factors_in_any_layout(
    m, k, o, tiles, parts, kernels, device, monkeypatch
):
    steps = -(-k // tiles[2])
    monkeypatch.setattr(kernels, "depth_per_program", lambda *_: -(-steps // parts) * tiles[2])
    a, b = torch.randn(2, m, k, device=device), torch.randn(2, k, o, device=device)
    strided = torch.zeros(2, m, 2 * k, device=device)[:, :, ::2]
    strided.copy_(a)
    transposed = [v.mT.contiguous().mT for v in (a, b)]
    shared = b[:1].expand(2, k, o)
    for left, right in ((a, b), (a, transposed[1]), (transposed[0], b), transposed, (strided, shared)):
        found = kernels.batched_matmul(left, right, tiles)
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), left.double() @ right.double(), rtol=1e-5, atol=2e-5)
    assert torch.equal(found, kernels.batched_matmul(left, right, tiles))
    w = torch.randn(2, m, o, device=device)
    expected = w.double() - 0.1 * (a.double() @ b.double())
    kernels.subtract_matmul(w, a, b, 0.1, tiles)
    torch.testing.assert_close(w.double(), expected, rtol=1e-5, atol=2e-5)


def test_the_kernel_may_round_to_tf32(kernels, device, monkeypatch):
    monkeypatch.setattr(kernels, "precision", lambda: "tf32")
    a, b = torch.randn(2, 20, 40, device=device), torch.randn(2, 40, 20, device=device)
    found = kernels.batched_matmul(a, b, [16, 16, 32, 4, 2])
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=0, atol=5e-2)


def test_fake_tensors_have_the_shapes_of_the_results():
    tests = ("test_schema", "test_faketensor")
    a, b, tiles = torch.randn(2, 3, 4), torch.randn(2, 4, 5), [16, 16, 16, 4, 2]
    torch.library.opcheck(batched_matmul, (a, b, tiles), test_utils=tests)
    torch.library.opcheck(subtract_matmul, (torch.randn(2, 3, 5), a, b, 0.5, tiles), test_utils=tests)


# -- tiles -----------------------------------------------------------------------------------------------------------


def factors(n, m, k, o, transposed=False, gap=0):
    """Factors without memory; `gap` numbers lie between the rows of the left ones."""
    a = torch.empty(n, m, k + gap, device="meta")[:, :, :k]
    return a, torch.empty(n, o, k, device="meta").mT if transposed else torch.empty(n, k, o, device="meta")


def tiles_of(*sizes, **layout):
    return choose_tiles(*factors(*sizes, **layout))


@pytest.mark.parametrize("transposed", [False, True])
def test_tiles_are_powers_of_two_that_fit_the_product(transposed):
    chosen = 0
    for n, m, k, o in product((20, 100), (1, 10, 32, 200, 800), (10, 100, 1024), (8, 100, 512, 12544)):
        tiles = tiles_of(n, m, k, o, transposed=transposed)
        if tiles is None:
            continue
        chosen += 1
        *sides, warps, stages = tiles
        assert all(size >= 16 for size in sides)  # what tl.dot needs
        assert all(size & (size - 1) == 0 for size in (*sides, warps))
        assert stages >= 1
        assert sides[0] < 2 * max(m, 16)
        assert sides[1] < 2 * max(o, 16)
        if m <= FEW_ROWS:
            assert sides[0] >= m  # every weight is read once
        if k <= FEW_ROWS:
            assert sides[2] >= k  # one step
        if o <= FEW_COLUMNS:
            assert sides[1] >= o
    assert chosen > 50


def test_few_weights_or_little_work_are_left_to_cublas():
    side = int(MIN_WEIGHTS**0.5)
    assert tiles_of(1, 10, side, side)  # outputs of a layer
    assert tiles_of(1, side, 10, side)  # gradient to its weights
    assert tiles_of(1, 10, side - 1, side) is None
    assert tiles_of(1, side, 10, side - 1) is None
    rows = 4 * (MIN_PRODUCTS // (4 * 400 * 100) + 1)  # more than FEW_ROWS
    assert tiles_of(1, rows, 400, 100)
    assert tiles_of(1, rows - 8, 400, 100) is None


def test_products_beyond_the_limits_of_the_kernel_are_left_to_cublas():
    assert tiles_of(100, 10, 512, 512)
    assert tiles_of(1 << 16, 10, 512, 512) is None  # the limit of a grid
    assert tiles_of(1, 10, 1 << 17, 1 << 15) is None  # a client's weights cannot be indexed in 32 bits
    a, b = factors(100, 10, 512, 512)
    assert choose_tiles(a.double(), b.double()) is None
    assert choose_tiles(a, torch.empty(100, 512, 1024, device="meta")[:, :, ::2]) is None


def test_large_products_need_rows_that_can_be_loaded_four_numbers_at_a_time():
    assert tiles_of(20, 800, 400, 100)
    assert tiles_of(20, 800, 400, 100, gap=4)
    for k, o, gap in ((398, 100, 2), (400, 100, 1), (100, 398, 0)):
        assert tiles_of(20, 800, k, o, gap=gap) is None  # rows that do not begin, or end, at every fourth number
    assert tiles_of(20, 800, 100, 398, transposed=True)  # only the rows of the result
    b = torch.empty(20, 400, 100, device="meta")
    assert choose_tiles(torch.empty(20, 800, 1600, device="meta")[:, :, ::4], b) is None
    unaligned = torch.empty(20 * 800 * 400 + 1, device="meta")[1:].view(20, 800, 400)
    assert choose_tiles(unaligned, b) is None


def test_large_products_are_left_to_cublas_where_torch_may_round_to_tf32(monkeypatch):
    monkeypatch.setattr(matmul, "precision", lambda: "tf32")
    assert tiles_of(20, 800, 400, 100) is None
    assert tiles_of(100, 10, 512, 512)  # bound by memory


def test_sums_are_split_until_all_sms_have_work():
    at_once = 264
    assert splits(10 * at_once, 200, at_once) == 1
    few = splits(at_once // 2, 200, at_once)
    assert few > 1
    assert few * (at_once // 2) <= at_once
    assert splits(1, 3, at_once) == 1  # too short
    for programs, steps in product((1, 7, 999), (1, 2, 9, 500)):
        assert 1 <= splits(programs, steps, at_once) <= min(steps, MAX_SPLITS)


@pytest.mark.parametrize("sizes", [(1, 10, 1000, 16), (50, 10, 12544, 128), (20, 800, 400, 100), (3, 17, 5, 16)])
def test_programs_sum_whole_steps_and_together_all_of_k(sizes):
    a, b = factors(*sizes)
    k, tiles = sizes[2], [16, 64, 32, 4, 3]
    depth = depth_per_program(a, b, tiles)
    assert depth % tiles[2] == 0
    assert depth < k + tiles[2]
    assert 1 <= -(-k // depth) <= MAX_SPLITS


# -- traced graphs ---------------------------------------------------------------------------------------------------

CLIENTS, ROWS, WIDTH = 4, 10, 64


@pytest.fixture
def small_limits(monkeypatch):
    """A layer of WIDTH x WIDTH has enough weights."""
    monkeypatch.setattr(matmul, "MIN_WEIGHTS", CLIENTS * WIDTH * WIDTH)


def layers(device, dtype=torch.float32, rows=ROWS):
    """Inputs and weights of a network of three layers."""
    sizes = [(WIDTH, WIDTH), (WIDTH, WIDTH), (3, WIDTH)]
    weights = [torch.randn(CLIENTS, *size, dtype=dtype, device=device) / WIDTH**0.5 for size in sizes]
    return [torch.randn(CLIENTS, rows, WIDTH, dtype=dtype, device=device), *weights]


def gradients(x, *weights):
    """Gradients to the weights, for clients on the first axis."""

    def loss(weights, x):
        for w in weights:
            x = torch.tanh(F.linear(x, w))
        return (x**2).sum()

    return list(torch.func.vmap(torch.func.grad(loss))(weights, x))


def count(module, *operators):
    return tuple(len(module.graph.find_nodes(op="call_function", target=op)) for op in operators)


@pytest.mark.usefixtures("small_limits")
def test_graphs_use_the_operator_for_large_layers(device):
    inputs = layers(device)
    module = trace(gradients, inputs)
    expected = module(*inputs)
    assert count(module, BMM) == (8,)  # outputs and weights of three layers, inputs of two
    replace_matmuls(module)
    # two outputs, one input and two gradients to weights; all of the last layer are small
    assert count(module, MATMUL, BMM) == (5, 3)
    for a, b in zip(module(*inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "rows", "precision"),
    [(torch.float64, ROWS, "tf32x3"), (torch.float32, FEW_ROWS + 1, "tf32x3"), (torch.float32, 60, "tf32")],
    ids=["double precision", "little to do", "TF32 in cuBLAS"],
)
@pytest.mark.usefixtures("small_limits")
def test_graphs_keep_torchs_products_with(dtype, rows, precision, monkeypatch):
    monkeypatch.setattr(matmul, "precision", lambda: precision)
    if precision == "tf32":
        monkeypatch.setattr(matmul, "MIN_PRODUCTS", 1)
    module = trace(gradients, layers("cpu", dtype, rows))
    replace_matmuls(module)
    assert count(module, MATMUL, BMM) == (0, 8)


def updated(step, state, steps=2):
    """The graph of a step that overwrites its state, after a comparison with the step itself over some steps."""
    expected, found = state, [v.clone() for v in state]
    for _ in range(steps):
        expected = step(*expected)
    at = torch.zeros(1, dtype=torch.int64, device=state[0].device)
    module = trace(lambda at, *flat: step(*flat), [at, *state])
    replace_matmuls(module)
    write_to_inputs(module, 1, 0)
    fuse_matmul_updates(module)
    for _ in range(steps):
        module(at, *found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return module


def sgd_step(x, *weights):
    alpha = 3 / x.shape[1]  # so small that rounding errors do not grow
    return [x, *(torch.sub(w, g, alpha=alpha) for w, g in zip(weights, gradients(x, *weights), strict=True))]


@pytest.mark.usefixtures("small_limits")
def test_graphs_subtract_a_gradient_while_it_is_computed(device):
    module = updated(sgd_step, layers(device))
    # not in the first layer: one factor is an input, which the graph may have overwritten by then
    assert count(module, SUBTRACT_MATMUL, MATMUL, BMM) == (1, 4, 3)


@pytest.mark.parametrize(("parts", "fused"), [(1, 1), (2, 0)], ids=["whole", "split"])
@pytest.mark.usefixtures("small_limits")
def test_graphs_subtract_sums_over_many_rows_unless_they_are_split(parts, fused, device, monkeypatch):
    monkeypatch.setattr(matmul, "MIN_PRODUCTS", 1)
    monkeypatch.setattr(matmul, "splits", lambda programs, steps, at_once: min(parts, steps))
    module = updated(sgd_step, layers(device, rows=FEW_ROWS + 8))
    # three outputs, one input and two gradients to weights; in the rest of the last layer, rows are three numbers
    assert count(module, SUBTRACT_MATMUL, MATMUL, BMM) == (fused, 6 - fused, 2)


@pytest.mark.usefixtures("small_limits")
def test_graphs_do_not_move_a_product_behind_writes_to_its_factors(device):
    def swap(u, v, w):
        found = torch.bmm(v.mT, u)
        return [torch.sub(u, v), torch.sub(v, u), torch.sub(w, found, alpha=0.5)]

    u, v, w = (torch.randn(CLIENTS, rows, WIDTH, device=device) for rows in (ROWS, ROWS, WIDTH))
    module = updated(swap, [u, v, w])
    assert count(module, SUBTRACT_MATMUL, MATMUL) == (0, 1)


@pytest.mark.usefixtures("small_limits")
def test_graphs_do_not_fuse_a_product_that_is_also_a_result(device):
    def keep(v, w):
        found = torch.bmm(torch.tanh(v[:, 10:20]).mT, torch.tanh(v[:, :10]))
        return [found, torch.sub(w, found)]

    v, w = (torch.randn(CLIENTS, WIDTH, WIDTH, device=device) for _ in range(2))
    module = updated(keep, [v, w])
    assert count(module, SUBTRACT_MATMUL, MATMUL) == (0, 1)
