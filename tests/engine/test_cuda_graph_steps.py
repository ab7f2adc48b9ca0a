"""Programs for CUDA graphs, run without graphs: they write over their inputs what the reference computes."""

import re

import pytest
import torch
from helpers import assert_same, make_task, method, model_task

from fedloom.core import task as core_task
from fedloom.engine.graph.stacked_step import CudaGraphRunner, CapturedSteps
from fedloom.engine.planning.plan import Plan
from fedloom.kernels import lstm, products
from fedloom.nn.kernels.warmup import compile_kernels

PLAN = Plan("stacked", "captured", chunk=3, shrink=0.5, convolutions={})


@pytest.fixture
def programs(monkeypatch):
    """Of all steps, by their code."""
    found = []

    class Replay:
        def __init__(self, program, inputs):
            self.replay = lambda: program(*inputs)

    def capture(self, prefix):
        program, inputs = self.program(prefix)
        compile_kernels(program)
        found.append(program.code)
        return CapturedSteps({1: Replay(program, inputs)}, program)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(CudaGraphRunner, "_capture", capture)
    monkeypatch.setattr(core_task, "own_loss", lambda *_: True)
    return found


@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg", "scaffold", "fedala", "ditto"])
def test_programs_equal_the_reference(alg, programs):
    task = make_task((5, 1, 19, 12), norm=alg == "ditto", dropout=0.3, momentum=0.5, dtype=torch.float32)
    assert_same(method(alg), task, PLAN, 2e-5, rounds=2)
    assert all("fedloom.update" in code for code in programs)
    assert not any(re.search(r"aten\.(sub|add|copy)_\.\w+\(\w+, [a-z]", code) for code in programs)


def test_a_step_of_a_small_model_is_few_kernels(programs):
    task = model_task("logreg", (6,), dtype=torch.float32)
    assert_same(method("fedavg"), task, PLAN, 1e-5, rounds=1)
    views = "transpose|view|unsqueeze|squeeze|select"
    calls = [name for name in re.findall(r"torch\.ops\.(\w+\.\w+)", programs[0]) if name.split(".")[1] not in views]
    assert calls == [
        "fedloom.take_samples",
        "aten.bmm",
        "aten.add",
        "fedloom.cross_entropy_gradient",
        "aten.bmm",
        "fedloom.update",
    ]


@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg"])
def test_pooling_takes_positive_parts_with_it(alg, programs):
    task = model_task("cnn8", (1, 8, 8), sizes=(5, 1, 9), dtype=torch.float32)
    assert_same(method(alg), task, PLAN, 2e-5, rounds=1)
    for code in programs:
        poolings = code.count("fedloom.unpool")
        assert poolings == code.count("fedloom.pool") == 2 * code.count("aten.relu")  # of the hidden layer
        assert code.count("aten.relu") == code.count("aten.threshold_backward") > 0
        assert code.count("fedloom.channel_sums") == poolings  # for biases


@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg"])
def test_words_without_tokens_and_padding_stay_as_they_are(alg, programs):
    task = model_task("fasttext", (6,), vocab=9, sizes=(5, 1, 9), dtype=torch.float32)
    assert_same(method(alg), task, PLAN, 2e-5, rounds=1)
    for code in programs:
        assert code.count("fedloom.vectors") == code.count("fedloom.vector_sums") > 0
        assert not re.search("aten.embedding|fill_|arange", code)


def test_the_zeros_that_an_lstm_starts_from_are_not_multiplied(programs, monkeypatch):
    """So all of its steps on weights are taken while the gradient is computed."""
    monkeypatch.setattr(lstm, "_own_kernels", lambda z: True)
    monkeypatch.setattr(products, "LEAST", 0)
    task = model_task("lstm_shakes", (4,), vocab=9, options={"width": 8}, dtype=torch.float32)
    assert_same(method("fedavg"), task, PLAN, 2e-5, rounds=1)
    for code in programs:
        assert code.count("fedloom.subtract_products") == 5  # two layers and the last one
        assert not re.search(r"aten\.(\w*zeros|sum)", code)
