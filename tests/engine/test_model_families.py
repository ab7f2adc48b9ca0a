"""The stacked executor equals the reference for every kind of model: convolutions, GroupNorm and BatchNorm beside
shortcuts, LSTMs with a prediction at the end or at every position, embeddings, dropout."""

import numpy as np
import pytest
import torch
from helpers import assert_same, method, model_task, run_and_evaluate

from fedloom.core.task import Task
from fedloom.engine.executors import scoring
from fedloom.engine.plan import Plan

MODELS = {
    "cnn4": ((1, 16, 16), {}),
    "cnn_kt": ((2, 16, 17), {}),
    "harcnn": ((2, 1, 28), {}),
    "mlp3": ((6,), {"options": {"widths": (8, 7, 5), "dropout": 0.3}}),
    "resnet18_bn": ((2, 16, 16), {"options": {"width": 2}, "batch_size": 8}),
    "resnet18_gn": ((2, 16, 16), {"options": {"width": 2}}),
    "resnet18_gn_c": ((2, 8, 8), {"options": {"width": 2}}),
    "resnet50_gn_t": ((2, 8, 8), {"options": {"width": 2}}),
    "wrn28_10_gn": ((2, 8, 8), {"options": {"depth": 10, "widen": 1, "dropout": 0.3}}),
    "fasttext": ((7,), {"vocab": 11}),
    "lstm_shakes": ((6,), {"vocab": 9, "options": {"width": 5, "dropout": 0.3, "padding": 0}}),
    "lstm_so": ((6,), {"vocab": 9, "classes": None, "options": {"embedding": 4, "width": 5, "layers": 2}}),
}
BY_LAYER = ("cnn4", "mlp3", "resnet18_bn", "fasttext", "lstm_shakes", "lstm_so")
TRACED = ("cnn4", "mlp3", "resnet18_bn", "wrn28_10_gn", "fasttext", "lstm_shakes", "lstm_so")
EAGER = Plan("stacked", "eager", "per-client", chunk=3)
ONE_TRACE = Plan("stacked", "traced", chunk=4, shrink=0)


def task_of(name, **settings):
    shape, more = MODELS[name]
    return model_task(name, shape, **{"weight_decay": 0.01, "momentum": 0.5, "lr": 0.02, **more, **settings})


@pytest.mark.parametrize(
    ("name", "alg"), [*((name, "fedrep") for name in MODELS), *((name, "plgu-lf") for name in BY_LAYER)]
)
def test_stacked_equals_reference_by_head_and_body_and_by_layer(name, alg):
    task = task_of(name)
    assert_same(method(alg), task, EAGER, 1e-9, rounds=2 if task.network.buffers else 1)  # statistics are kept


@pytest.mark.parametrize("name", TRACED)
def test_traced_equals_reference(name):
    assert_same(method("fedavg"), task_of(name), ONE_TRACE, 1e-9, rounds=2)


@pytest.mark.parametrize("name", ["harcnn", "lstm_so"])
def test_gpfl_works_on_the_features_of_a_head_of_several_layers_and_of_every_position(name):
    assert_same(method("gpfl"), task_of(name), EAGER, 1e-9, rounds=1)


@pytest.mark.parametrize(
    ("alg", "plan", "most"),
    [  # two stacked models share the limit; one model for both clients is scored on the samples of both at once
        ("fedavg", Plan("per-client"), 2),
        ("fedavg", Plan("stacked", "eager", chunk=4), 2),
        ("local", Plan("stacked", "eager", chunk=4), 1),
    ],
)
def test_the_number_of_logits_that_are_computed_at_once_is_limited(alg, plan, most, monkeypatch):
    """Six positions and nine words make 54 logits per sample, so a limit of 120 allows two samples."""
    task, score, seen = task_of("lstm_so", sizes=(3, 9)), Task.score, []
    _, (expected,) = run_and_evaluate(method(alg), task, plan, rounds=1)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 120)
    monkeypatch.setattr(
        Task, "score", lambda task, logits, y, mask: seen.append(logits.shape) or score(task, logits, y, mask)
    )
    _, (found,) = run_and_evaluate(method(alg), task, plan, rounds=1)
    assert max(shape[-3] for shape in seen) == most
    for view, splits in expected.scores.items():
        for split, numbers in splits.items():
            np.testing.assert_allclose(found.scores[view][split], numbers, rtol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("alg", ["fedavg", "fedrep"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_graphs_equal_the_reference_on_a_gpu(name, alg):
    assert_same(method(alg), task_of(name, device="cuda"), Plan("stacked", "captured", chunk=3), 1e-9, rounds=2)
