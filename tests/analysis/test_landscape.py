"""The loss around a model: a known quadratic is reproduced, and directions are normalised filter by filter."""

import math

import numpy as np
import pytest
import torch
from sentences import user_error

import fedloom
from fedloom.analysis.landscape import (
    landscape,
    loss_on_plane,
    loss_surface,
    mean_increase,
    moved,
    networks,
    random_direction,
    random_plane,
    sharpness,
)
from fedloom.analysis.trained import load_model, load_trained, some_rows
from fedloom.core.algorithm import Slot
from fedloom.nn.network import Network

SHORT = {"rounds": 2, "clients": 3, "device": "cpu", "plan": "per-client"}


class Net(torch.nn.Module):
    """A convolution, a normalisation, a recurrent layer, a head."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 3, 2)
        self.norm = torch.nn.BatchNorm2d(3)
        self.lstm = torch.nn.LSTM(4, 5, batch_first=True)
        self.head = torch.nn.Linear(5, 2)

    def forward(self, x):
        y = self.norm(self.conv(x))  # (b, 3, 2, 2)
        return self.head(self.lstm(y.flatten(2))[0][:, -1])


@pytest.fixture(scope="module")
def network():
    return Network(Net, "head", torch.zeros(2, 1, 3, 3, dtype=torch.float64))


@pytest.fixture(scope="module")
def model(network):
    return {"w": Slot(network.init(0), network.buffers, {}), "p": torch.ones(2, 2)}


@pytest.fixture(scope="module")
def fedavg():
    return load_trained(fedloom.run("fedavg", **SHORT))


# -- directions


def test_every_filter_of_a_direction_has_the_norm_of_the_models_filter(network, model):
    direction = random_direction(model, 0, 0, network)
    (params,), (found,) = networks(model, network), direction
    assert found.keys() == params.keys()
    for name, w in params.items():
        if w.dim() == 1:
            assert not found[name].any(), name  # biases, and the normalisation's
        else:
            for filter_, of_model in zip(found[name], w, strict=True):
                assert float(filter_.norm()) == pytest.approx(float(of_model.norm()), rel=1e-6), name
    assert [tuple(w.shape) for w in params.values() if w.dim() > 2] == [(3, 1, 2, 2)]


def test_a_filter_of_zeros_stays(network):
    zeros = Slot({name: torch.zeros_like(w) for name, w in network.init(0).items()}, network.buffers, {})
    assert not any(v.any() for v in random_direction(zeros, 0, 0, network)[0].values())


def test_directions_are_gaussian_and_follow_from_seed_and_number(network, model):
    one, two = random_plane(model, 0, network)
    again, other_seed = random_plane(model, 0, network)[0], random_direction(model, 1, 0, network)
    flat = [torch.cat([v.flatten() for v in d[0].values() if v.dim() > 1]) for d in (one, two, again, other_seed)]
    assert torch.equal(flat[0], flat[2])
    for other in (flat[1], flat[3]):
        assert abs(torch.nn.functional.cosine_similarity(flat[0], other, dim=0)) < 0.3
    wide = {"head.weight": torch.ones(1, 40_000, dtype=torch.float64)}  # known to the network by name
    values = random_direction(wide, 0, 0, network)[0]["head.weight"].flatten()
    assert values.mean() == pytest.approx(0, abs=0.02)  # a filter of norm 200 has values of variance 1
    assert (values**4).mean() == pytest.approx(3, abs=0.15)


def test_only_parameters_of_the_network_are_moved(network, model):
    plane = random_plane(model, 0, network)
    at = moved(model, plane, 0.5, -2.0, network)
    assert torch.equal(at["p"], model["p"])
    assert at["w"].buffers is model["w"].buffers
    for name, w in model["w"].params.items():
        expected = w + 0.5 * plane[0][0][name] - 2.0 * plane[1][0][name]
        torch.testing.assert_close(at["w"].params[name], expected)


def test_a_second_head_is_moved_too():
    run = load_trained(fedloom.run("fedrod", **SHORT))
    found = load_model(run, 1)
    assert [set(params) for params in networks(found.tree, run.task.network)][-1] == set(run.task.network.head)
    at = moved(found.tree, random_plane(found.tree, 0, run.task.network), 1.0, 0.0, run.task.network)
    assert not torch.equal(at["hP"]["head.weight"], found.tree["hP"]["head.weight"])


# -- the loss


def test_the_landscape_of_a_known_quadratic_is_reproduced(network):
    """f(w) = (w - c)' H (w - c) / 2 on a plane w0 + a d + b e is a quadratic in a and b; its mean over a circle of
    radius r exceeds its value in the middle by r^2 (d' H d + e' H e) / 4."""
    draw = np.random.default_rng(0)
    params = {"head.weight": torch.from_numpy(draw.normal(size=(2, 5)))}
    root, c = torch.from_numpy(draw.normal(size=(10, 10))), torch.from_numpy(draw.normal(size=10))
    H = root @ root.T

    def f(tree):
        gap = tree["head.weight"].flatten() - c
        return float(gap @ H @ gap / 2)

    plane = random_plane(params, 3, network)
    d, e = (direction[0]["head.weight"].flatten() for direction in plane)

    def at(a, b):
        return f(moved(params, plane, a, b, network))

    steps, gap = np.linspace(-1, 1, 21), params["head.weight"].flatten() - c
    a, b = np.meshgrid(steps, steps)
    expected = f(params) + a * float(gap @ H @ d) + b * float(gap @ H @ e)
    expected += a**2 * float(d @ H @ d) / 2 + b**2 * float(e @ H @ e) / 2 + a * b * float(d @ H @ e)
    np.testing.assert_allclose(loss_surface(at, steps), expected, rtol=1e-10)
    assert mean_increase(at) == pytest.approx(0.25 * float(d @ H @ d + e @ H @ e) / 4, rel=1e-10)


def test_the_landscape_of_linear_regression_is_its_quadratic():
    """A trained linear model, with the squared error: the second difference of the loss along a direction is the mean
    of the squared outputs of that direction, in the unit in which errors are measured."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(90, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + 0.1 * draw.normal(size=90)).astype(np.float32)
    rows = [
        {"a": a, "b": b, "c": c, "client": i % 3, "label": t} for i, ((a, b, c), t) in enumerate(zip(x, y, strict=True))
    ]
    import pandas

    result = fedloom.run("fedavg", pandas.DataFrame(rows), model="logreg", target="number", dtype="float64", **SHORT)
    run = load_trained(result)
    model = load_model(run)
    at, plane = loss_on_plane(run, model, 0), random_plane(model.tree, 0, run.task.network)
    direction = model.tree._replace(params=plane[0][0])
    outputs = model.predict(direction, run.task.data.samples(model.train)).flatten()
    second = at(1.0, 0.0) - 2 * at(0.0, 0.0) + at(-1.0, 0.0)
    unit = run.task.losses(torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert second == pytest.approx(2 * float(unit) * float((outputs**2).mean()), rel=1e-6)


def test_the_centre_is_the_loss_of_the_model_on_its_training_samples(fedavg):
    run, data = fedavg, fedavg.task.data
    for client, rows in ((None, torch.cat([data.splits["train"][i] for i in range(3)])), (1, data.splits["train"][1])):
        found = landscape(run, client, size=3)
        model = load_model(run, client)
        with torch.no_grad():
            logits = model.predict(model.tree, data.samples(rows))
        expected = torch.nn.functional.cross_entropy(logits, data.y[rows])
        assert found.centre == pytest.approx(float(expected), rel=1e-5)
        assert found.losses.shape == (3, 3)
        assert found.losses[1, 1] == found.centre
        assert found.model == ("global model" if client is None else "client 1")


def test_sharpness_is_that_of_the_landscape_and_a_mean_over_planes(fedavg):
    assert sharpness(fedavg, 0) == landscape(fedavg, 0, size=3).sharpness
    planes = [landscape(fedavg, 0, size=3, seed=seed).sharpness for seed in (0, 1)]
    assert planes[0] != planes[1]
    assert sharpness(fedavg, 0, planes=2) == pytest.approx(np.mean(planes))


def test_a_sharper_model_is_sharper(fedavg):
    """With all weights of the last layer 10 times as large, so that a wrong output costs 10 times as much, the same
    relative step increases the loss more."""
    model = load_model(fedavg)
    large = model.tree._replace(
        params={name: w * (10 if name.startswith("head") else 1) for name, w in model.tree.params.items()}
    )
    values = [mean_increase(loss_on_plane(fedavg, model._replace(tree=tree), 0)) for tree in (model.tree, large)]
    assert values[1] > 2 * values[0] > 0


def test_fewer_samples_are_drawn_once():
    rows = torch.arange(100, 200)
    found = some_rows(rows, 10)
    assert torch.equal(found, some_rows(rows, 10))
    assert len(set(found.tolist())) == 10
    assert set(found.tolist()) <= set(rows.tolist())
    assert torch.equal(some_rows(rows, 100), rows)
    with user_error("samples must be at least 1, not 0"):
        some_rows(rows, 0)


def test_mistakes_are_told(fedavg):
    with user_error("no client '7'", "0 to 2"):
        landscape(fedavg, 7)
    with user_error("planes must be at least 1, not 0"):
        sharpness(fedavg, planes=0)
    with user_error("size must be at least 3"):
        landscape(fedavg, size=1)
    with user_error("when cannot be 'bets'", "did you mean 'best'?"):
        landscape(fedavg, when="bets")
    with user_error("fedrep has no global model", "name a client"):
        landscape(fedloom.run("fedrep", **SHORT))
    assert math.isfinite(sharpness(fedavg))
