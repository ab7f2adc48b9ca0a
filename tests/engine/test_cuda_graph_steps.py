"""The traced graphs that CUDA graphs are captured from, run on a CPU: they contain the custom operators, and write over
their inputs what the reference computes."""

import re

import pytest
import torch
from helpers import assert_same, make_task, method, model_task

from fedloom.engine.graph.cuda_graph_runner import CapturedSteps, CudaGraphRunner
from fedloom.engine.plan import Plan
from fedloom.nn.kernels import cross_entropy, dispatch, lstm, matmul
from fedloom.nn.kernels.warmup import compile_kernels

PLAN = Plan("stacked", "captured", chunk=3, shrink=0.5, convolutions={})


@pytest.fixture
def graphs(monkeypatch):
    """The code of the graphs of all steps."""
    found = []

    class Replay:
        def __init__(self, module, inputs):
            self.replay = lambda: module(*inputs)

    def capture(self, prefix):
        module, inputs = self.traced_step(prefix)
        compile_kernels(module)
        found.append(module.code)
        return CapturedSteps({1: Replay(module, inputs)}, module)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(CudaGraphRunner, "_capture", capture)
    monkeypatch.setattr(dispatch, "TRITON", True)  # the operators compute CPU tensors by plain operations
    monkeypatch.setattr(cross_entropy, "has_cuda_kernels", lambda x: True)
    return found


@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg", "scaffold", "fedala", "ditto"])
def test_traced_graphs_equal_the_reference(alg, graphs):
    task = make_task((5, 1, 19, 12), norm=alg == "ditto", dropout=0.3, momentum=0.5, dtype=torch.float32)
    assert_same(method(alg), task, PLAN, 2e-5, rounds=2)
    assert all(re.search(r"aten\.(sub|add|copy)_\.\w+\(\w+, [a-z]", code) for code in graphs)  # in place


def test_a_step_of_a_small_model_is_few_kernels(graphs):
    task = model_task("logreg", (6,), dtype=torch.float32)
    assert_same(method("fedavg"), task, PLAN, 1e-5, rounds=1)
    views = "transpose|view|unsqueeze|squeeze|select"
    calls = [name for name in re.findall(r"torch\.ops\.(\w+\.\w+)", graphs[0]) if name.split(".")[1] not in views]
    assert calls == [
        "fedloom.gather_batch",
        "aten.bmm",
        "aten.add",
        "fedloom.cross_entropy_gradient",
        "aten.bmm",
        "aten.sum",
        "aten.sub_",
        "aten.sub_",
        "aten.add_",
    ]


@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg"])
def test_pooling_and_relu_are_one_operation(alg, graphs):
    task = model_task("cnn8", (1, 8, 8), sizes=(5, 1, 9), dtype=torch.float32)
    assert_same(method(alg), task, PLAN, 2e-5, rounds=1)
    for code in graphs:
        poolings = code.count("fedloom.max_unpool")
        assert poolings == code.count("fedloom.max_pool") == 2 * code.count("aten.relu")  # of the hidden layer
        assert code.count("aten.relu") == code.count("aten.threshold_backward") > 0
        assert code.count("fedloom.channel_sums") == poolings  # for biases


@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg"])
def test_vectors_of_words_that_do_not_occur_and_of_padding_stay_as_they_are(alg, graphs):
    task = model_task("fasttext", (6,), vocab=9, sizes=(5, 1, 9), dtype=torch.float32)
    assert_same(method(alg), task, PLAN, 2e-5, rounds=1)


def test_the_zeros_that_an_lstm_starts_from_are_not_multiplied(graphs, monkeypatch):
    """So all of its weights are updated by the product that computes their gradient."""
    monkeypatch.setattr(lstm, "_use_kernel", lambda z: True)
    monkeypatch.setattr(matmul, "MIN_WEIGHTS", 0)
    task = model_task("lstm_shakes", (4,), vocab=9, options={"width": 8}, dtype=torch.float32)
    assert_same(method("fedavg"), task, PLAN, 2e-5, rounds=1)
    for code in graphs:
        assert code.count("fedloom.subtract_matmul") == 5  # input and recurrent weights of two layers, and the head's
        assert not re.search(r"aten\.\w*zeros", code)
