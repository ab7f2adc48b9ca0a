"""Word vectors of stacked clients in programs: looked up to the bit, summed by words."""

import os
import re

import pytest
import torch
import torch.nn.functional as F

from fedloom.engine.graph.tracing import trace
from fedloom.nn.kernels import embedding
from fedloom.nn.kernels.embedding import replace_embeddings, vectors, word_gradients

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

N, WORDS, WIDTH, BATCH, LENGTH = 3, 7, 5, 4, 6


def program_for(f, *inputs):
    """A trace of it with own lookups, which must give what it gives; its operations, without views."""
    program = trace(f, inputs)
    replace_embeddings(program)
    program.graph.lint()
    for found, expected in zip(program(*inputs), f(*inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    calls = re.findall(r"torch\.ops\.(\w+\.\w+)", program.code)
    return [call for call in calls if call not in ("aten.view", "aten._unsafe_view", "aten.transpose", "aten.select")]


def given(dtype=torch.float32, ids=torch.int64):
    tables, g = (torch.randn(N, *shape, WIDTH, dtype=dtype) for shape in ((WORDS,), (BATCH, LENGTH)))
    return tables, torch.randint(0, WORDS, (N, BATCH, LENGTH)).to(ids), g


def slope(padding=None, clients=torch.func.vmap, **options):
    """The gradient of sums of tanh(vectors) * g, whose tokens lie in the other order."""

    def one(table, ids, g):
        found = F.embedding(ids, table, padding, **options).transpose(0, 1).contiguous()
        return (torch.tanh(found) * g.transpose(0, 1)).sum()

    gradient = clients(torch.func.grad(one))
    return lambda *inputs: [gradient(*inputs)]


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_clients_have_their_own_tables(padding, ids):
    """Nothing is shifted, copied into another order or set to zero on the way."""
    calls = program_for(slope(padding), *given(ids=ids))
    assert (calls[0], calls[-1]) == ("fedloom.vectors", "fedloom.vector_sums")
    assert not re.search(r"aten\.(add|clone|fill_|embedding)", " ".join(calls))


def test_vectors_come_out_to_the_bit():
    """Of clients' own tables, of one table for all, and of tables within clients."""
    tables, ids, _ = given()

    def look_up(*dims):
        return lambda tables, ids: [torch.func.vmap(lambda t, i: F.embedding(i, t), dims)(tables, ids)]

    pairs = torch.func.vmap(torch.func.vmap(lambda t, i: F.embedding(i, t)))
    cases = (look_up(0, 0), tables, ids), (look_up(None, 0), tables[0], ids), (look_up(0, None), tables, ids[0])
    cases += ((lambda *v: [pairs(*v)], torch.stack([tables, tables + 1], 1), ids[:, :2]),)
    cases += ((lambda table, ids: [F.embedding(ids // 2 + 1, table)], tables[0], ids),)
    for f, *inputs in cases:
        program = trace(f, inputs)
        replace_embeddings(program)
        assert torch.equal(program(*inputs)[0], f(*inputs)[0])
        assert "fedloom.vectors" in program.code
        assert "aten.embedding" not in program.code
    program = trace(lambda t, i: [v.transpose(1, 3).contiguous() for v in look_up(0, 0)(t, i)], (tables, ids))
    replace_embeddings(program)  # numbers of vectors, not vectors, in another order
    assert torch.equal(program(tables, ids)[0], look_up(0, 0)(tables, ids)[0].transpose(1, 3))
    assert "fedloom" not in " ".join(program_for(lambda t, i: [F.embedding(i, t.t())], torch.randn(WIDTH, WORDS), ids))


def test_gradients_that_do_not_fit_are_left_to_the_library(monkeypatch):
    tables, ids, g = given()
    assert "fedloom.vector_sums" not in program_for(slope(scale_grad_by_freq=True), tables, ids, g)
    assert "fedloom.vector_sums" not in program_for(slope(), *given(torch.float64))
    one = slope(2, lambda f: torch.func.vmap(f, (None, 0, 0)))  # whose gradients are clients' own
    assert "fedloom.vector_sums" in program_for(one, tables[0], ids, g)
    assert "fedloom.vector_sums" not in program_for(slope(2, lambda f: f), tables[0], ids[0], g[0])

    for step, times in ((WORDS - 1, 1), (WORDS, 0)):  # by what is no client's place in a table

        def moved(tables, ids, g):
            shift = torch.arange(0, N * step, step).view(N, 1, 1)  # noqa: B023
            shifted = torch.add(ids, shift, alpha=times)  # noqa: B023
            return slope(clients=lambda f: f)(tables.flatten(0, 1), shifted, g)

        assert {"aten.add", "aten.embedding_dense_backward"} <= {*program_for(moved, tables, ids, g)}
    monkeypatch.setattr(embedding, "MOST", N * BATCH * LENGTH * WORDS * 16 - 1)
    assert "fedloom.vector_sums" not in program_for(slope(), tables, ids, g)


def test_a_row_that_is_read_before_it_is_zero_keeps_its_gradient():
    def f(tables, ids, g):
        found = torch.func.vmap(lambda i, g: torch.ops.aten.embedding_dense_backward(g, i, WORDS, -1, False))(ids, g)
        before = found[:, 1] * 2
        found[:, 1].fill_(0)
        return [found, before]

    assert "aten.fill_" in program_for(f, *given())


@pytest.mark.parametrize("words", [7, 80])
@pytest.mark.parametrize(("width", "shape"), [(8, (10, 16)), (5, (3,)), (40, (2, 3, 7)), (70, ())])
def test_kernels_give_what_torch_gives(words, width, shape, monkeypatch):
    triton = pytest.importorskip("triton")
    from fedloom.nn.kernels.triton import embedding as embedding_triton

    if not torch.cuda.is_available():
        monkeypatch.setattr(embedding_triton, "HALF", triton.language.float16)  # the interpreter multiplies no other
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    ids = torch.randint(0, words, (N, *shape), device=device)
    tables, g = torch.randn(N, words, width, device=device), torch.randn(N, *shape, width, device=device)
    plain = vectors(tables.cpu(), ids.cpu())
    assert torch.equal(plain, tables.cpu()[torch.arange(N).view(N, *[1] * len(shape)), ids.cpu()])
    turned = [(ids, g)]
    if len(shape) == 2:
        turned.append((ids.transpose(1, 2), g.transpose(1, 2)))
        turned.append((ids.transpose(1, 2).contiguous(), g.mT.contiguous().mT.transpose(1, 2)))
    for i, (where, given) in enumerate(turned):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            found = embedding_triton.vectors(tables.to(dtype), where)
            assert torch.equal(found.cpu(), (plain.transpose(1, 2) if i else plain).to(dtype))
            assert found.is_contiguous()
        for padding in (-1, words - 1):
            exact = word_gradients(given.double().cpu(), where.cpu(), words, padding)
            found = embedding_triton.vector_sums(given, where, words, padding)
            largest = exact.abs().max().item()  # tensor cores cut off sums on the way, which are as large
            torch.testing.assert_close(found.double().cpu(), exact, rtol=1e-6, atol=5e-7 * largest)
            assert (found[:, padding] == 0).all() == (padding >= 0 or not (ids == words - 1).any())


def test_traces_expect_what_comes():
    tables, ids, g = given()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(vectors, (tables, ids.transpose(1, 2)), test_utils=tests)
    torch.library.opcheck(word_gradients, (g.transpose(1, 2), ids.transpose(1, 2), WORDS, 2), test_utils=tests)
