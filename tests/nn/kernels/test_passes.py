"""The graph passes that insert custom operators, and compiling the kernels of a graph."""

import pytest
import torch
import torch.nn.functional as F

from fedloom.engine.graph.tracing import trace
from fedloom.nn.kernels import dispatch, matmul, warmup
from fedloom.nn.kernels.passes import insert_kernels
from fedloom.nn.kernels.warmup import compile_kernels

CLIENTS = 3
OPERATORS = ["batched_matmul", "channel_sums", "max_pool"]


def step(images, a, b):
    """One operation for each pass."""
    pooled = torch.func.vmap(lambda x: F.max_pool2d(x, 2))(images)
    return [pooled, images.sum((1, 3, 4)), torch.bmm(a, b), torch.bmm(a + 1, b)]


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(matmul, "MIN_WEIGHTS", 1)
    inputs = torch.randn(CLIENTS, 2, 3, 4, 4), torch.randn(CLIENTS, 4, 20), torch.randn(CLIENTS, 20, 6)
    return trace(step, inputs), inputs


def inserted(module):
    return [name for name in OPERATORS if f"fedloom.{name}." in module.code]


@pytest.mark.parametrize(
    ("installed", "compiled", "expected"),
    [(True, False, OPERATORS), (True, True, ["batched_matmul"]), (False, False, [])],
    ids=["all", "before torch's compiler", "without Triton"],
)
def test_operators_are_inserted_and_the_graph_gives_the_same(installed, compiled, expected, graph, monkeypatch):
    monkeypatch.setattr(dispatch, "TRITON", installed)
    module, inputs = graph
    insert_kernels(module, compiled)
    assert inserted(module) == expected
    torch.testing.assert_close(list(module(*inputs)), step(*inputs))


def test_disabled_kernels_are_not_inserted(graph, monkeypatch):
    monkeypatch.setattr(dispatch, "TRITON", True)
    monkeypatch.setattr(dispatch, "DISABLED", {"matmul", "pooling"})
    insert_kernels(graph[0])
    assert inserted(graph[0]) == ["channel_sums"]


def test_every_kernel_of_a_graph_is_compiled_once_for_one_client(graph, monkeypatch):
    monkeypatch.setattr(dispatch, "TRITON", True)
    module, _ = graph
    insert_kernels(module)
    called, call = [], warmup._call
    monkeypatch.setattr(warmup, "_call", lambda node: called.append(node.target._opname) or call(node))
    compile_kernels(module)
    assert sorted(called) == OPERATORS  # the two products have the same shapes

    value = torch.randn(CLIENTS, 4, 6).mT
    zeros = warmup._zeros(value)
    assert (zeros.shape, zeros.stride()) == ((1, 6, 4), value.stride())
    assert not zeros.any()
