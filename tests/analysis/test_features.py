"""Features of test samples are what the methods predict with, and the silhouette is that of the definition."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers import QUICK, methods
from sentences import user_error

import fedloom
from fedloom.analysis.features import Features, features, silhouette, tsne
from fedloom.analysis.trained import load_model, load_trained
from fedloom.core.algorithm import ALGORITHMS


def trained(name, **settings):
    """A short run in memory."""
    server = {"server_share": 0.2} if ALGORITHMS[name].needs_server_data else {}
    made = ALGORITHMS[name](**QUICK.get(name, {}))
    return fedloom.run(made, "digits", rounds=1, clients=3, plan="per-client", device="cpu", **server, **settings)


@pytest.mark.parametrize("name", methods())
def test_a_methods_last_layer_makes_its_predictions_of_the_features(name):
    run = load_trained(trained(name))
    found = features(run)
    test = run.task.data.splits["test"]
    assert found.x.shape == (int(test.sizes.sum()), run.task.network.feature_dim)
    assert found.labels.tolist() == run.task.data.y[test.flat].tolist()
    for i in range(3):
        model, mine = load_model(run, i), torch.from_numpy(found.x[found.clients == i]).float()
        logits = model.predict(model.tree, run.task.data.samples(test[i]))
        expected = last_layer(name, run.task, model.tree, mine)
        torch.testing.assert_close(expected, logits, rtol=1e-4, atol=1e-5)


def last_layer(name, task, model, f):
    """What a method makes of its features, written down once more."""
    if name == "fedproto":
        near = 2 * f @ model["G"].T - (model["G"] ** 2).sum(-1)
        farthest = torch.where(model["known"], near, torch.inf).amin(-1, keepdim=True)
        return torch.where(model["known"], near, farthest - 27.6)
    w = model["w"] if isinstance(model, dict) else model
    logits = task.network.apply_head(w.params, w.buffers, f)
    return logits + task.network.apply_head(model["hP"], w.buffers, f) if name == "fedrod" else logits


def test_fewer_samples_are_some_of_all():
    run = load_trained(trained("fedavg"))
    whole, some = features(run), features(run, samples=20)
    assert len(some.x) == 20
    assert {row.tobytes() for row in some.x} <= {row.tobytes() for row in whole.x}


def by_definition(x, groups):
    """Rousseeuw's silhouette, sample by sample."""
    distance = np.linalg.norm(x[:, None] - x[None], axis=-1)
    values = []
    for i, group in enumerate(groups):
        others = np.array([j for j in np.flatnonzero(groups == group) if j != i])
        if not len(others):
            values.append(0.0)
            continue
        a = distance[i, others].mean()
        b = min(distance[i, groups == other].mean() for other in set(groups) - {group})
        values.append((b - a) / max(a, b))
    return np.mean(values)


def test_silhouette_is_that_of_the_definition():
    draw = np.random.default_rng(0)
    x, groups = draw.normal(size=(30, 4)), np.array([0] * 12 + [1] * 17 + [2])
    assert silhouette(x, groups) == pytest.approx(by_definition(x, groups), abs=1e-12)


def test_silhouette_of_two_pairs_by_hand():
    """Pairs at 0, 1 and 10, 11: a = 1; b = 10.5 for the outer points, 9.5 for the inner ones."""
    x, groups = np.array([[0.0], [1.0], [10.0], [11.0]]), np.array([0, 0, 1, 1])
    assert silhouette(x, groups) == pytest.approx((9.5 / 10.5 + 8.5 / 9.5) / 2)


@pytest.mark.parametrize(
    ("x", "groups"), [([[0.0], [1.0]], [3, 3]), ([[0.0], [1.0]], [0, 1]), ([[0], [np.nan], [1]], [0, 0, 1])]
)
def test_silhouette_is_nan_where_it_is_not_defined(x, groups):
    assert math.isnan(silhouette(np.array(x, float), np.array(groups)))


def test_grouping_by_client_and_by_class_differ():
    x = np.array([[0.0], [0.1], [9.0], [9.1]])
    found = Features(x, np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), ("a", "b"), ("x", "y"))
    assert found.silhouette("class") > 0.9
    assert found.silhouette("client") < 0
    with user_error("'colour'"):
        found.silhouette("colour")


@pytest.mark.parametrize("width", [1, 5])
def test_tsne_keeps_far_groups_apart_and_is_the_same_every_time(width):
    draw = np.random.default_rng(0)
    x = np.concatenate([draw.normal(size=(12, width)), 50 + draw.normal(size=(12, width))])
    found = tsne(x)
    assert found.shape == (24, 2)
    assert (found == tsne(x)).all()
    assert silhouette(found, np.repeat([0, 1], 12)) > 0.5


def test_what_has_no_features_says_so():
    with user_error("at least 4 samples"):
        tsne(np.zeros((3, 2)))
    with user_error("not finite"):
        tsne(np.full((9, 2), np.nan))
    run = load_trained(trained("fedavg"))
    numbers = dataclasses.replace(run.task.data, targets=fedloom.core.targets.Number(), classes=1)
    with user_error("do not have one class each"):
        features(run._replace(task=dataclasses.replace(run.task, data=numbers)))
