"""FedOpt: the server's steps are those of the paper, for every method whose server averages models."""

import numpy as np
import pytest
import torch
from helpers import RAGGED, assert_same, make_federation, make_task, method, methods, run_rounds
from sentences import user_error

import fedloom
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.server_optimizer import STATE, ServerOptimizer
from fedloom.core.tree import leaves
from fedloom.engine.plan import Plan

AVERAGING = [name for name in methods() if ALGORITHMS[name].averages and not ALGORITHMS[name].server_step]
KINDS = ("momentum", "adam", "yogi", "adagrad")


def reference(kind, x, deltas, lr, b1, b2, tau):
    """Algorithm 2 of the paper for one coordinate."""
    m, v = 0.0, tau**2
    for d in deltas:
        if kind == "momentum":
            m = b1 * m + d
            x = x + lr * m
            continue
        m = b1 * m + (1 - b1) * d
        if kind == "adagrad":
            v = v + d**2
        elif kind == "yogi":
            v = v - (1 - b2) * d**2 * np.sign(v - d**2)
        else:
            v = b2 * v + (1 - b2) * d**2
        x = x + lr * m / (np.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_the_paper(kind):
    optimizer = ServerOptimizer(kind, 0.3, (0.8, 0.95), 0.01)
    server = {"w": {"a": torch.tensor([1.0, -2.0], dtype=torch.float64)}}
    state, deltas = optimizer.init(server), [(0.5, -0.1), (0.02, 0.0), (-0.3, 0.4)]
    for d in deltas:
        new = {"w": {"a": server["w"]["a"] + torch.tensor(d, dtype=torch.float64)}}
        server, state = optimizer.step(server, new, state)
    expected = [reference(kind, x, [d[j] for d in deltas], 0.3, 0.8, 0.95, 0.01) for j, x in enumerate((1.0, -2.0))]
    np.testing.assert_allclose(server["w"]["a"], expected, rtol=1e-12)


def task_for(name, **settings):
    alg = method(name)
    least = alg.min_samples(make_task(RAGGED))
    data = make_federation([max(n, least) for n in RAGGED], server=20)
    return alg, make_task((), federation=data, lr=0.05, participation=0.6, **settings)


@pytest.mark.parametrize("name", AVERAGING)
def test_stacked_equals_reference(name):
    alg, task = task_for(name, server_optimizer=ServerOptimizer("yogi", 0.02))
    assert_same(alg, task, Plan("stacked", "eager", chunk=4), 1e-8)  # test_parity has traced steps


@pytest.mark.parametrize("name", AVERAGING)
def test_one_step_without_momentum_is_the_average(name):
    """m = Delta and eta = 1: x + Delta is what the method made, up to rounding; and clients receive no more."""
    alg, plain = task_for(name)
    _, task = task_for(name, server_optimizer=ServerOptimizer("momentum", 1.0, (0.0, 0.99)))
    (one, expected), (other, found) = (run_rounds(alg, t, evaluate=True) for t in (plain, task))
    assert STATE in other.server
    assert [r.bytes_down for r in found] == [r.bytes_down for r in expected]
    for key, values in one.server.items():
        for a, b in zip(leaves(values), leaves(other.server[key]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_seeds_are_stacked_and_clients_join(tmp_path):
    settings = {"clients": 6, "rounds": 3, "server_optimizer": "adam", "holdout_clients": 1, "plan": "stacked"}
    found = fedloom.compare(["fedrep"], seeds=2, out=tmp_path / "both", **settings)
    alone = fedloom.run("fedrep", seed=1, **settings)
    both = found.run("fedrep", 1)
    assert both.last()["pre_acc_mean"] == pytest.approx(alone.last()["pre_acc_mean"], abs=1e-6)
    assert "new_acc_mean" in both.last()


def test_a_run_is_given_more_rounds_byte_for_byte(tmp_path):
    settings = {"clients": 4, "server_optimizer": "adam", "plan": "per-client"}
    fedloom.run("fedavg", rounds=2, out=tmp_path / "a", **settings)
    fedloom.run("fedavg", rounds=4, out=tmp_path / "a", resume=True, **settings)
    fedloom.run("fedavg", rounds=4, out=tmp_path / "b", **settings)
    for name in ("rounds.parquet", "final/server.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("scaffold", {"server_optimizer": "adam"}, ("scaffold", "cannot step by adam", "control variates")),
        ("feddyn", {"server_optimizer": "momentum"}, ("dual vectors", "server_optimizer=none")),
        ("fedproto", {"server_optimizer": "adam"}, ("prototypes",)),
        ("hypcluster", {"server_optimizer": "adam"}, ("every cluster",)),
        ("fedfomo", {"server_optimizer": "adam"}, ("does not average",)),
        ("fedavg", {"server_lr": 0.1}, ("server_lr=0.1", "server_optimizer=momentum")),
    ],
)
def test_what_does_not_fit_is_refused(name, settings, words):
    with user_error(*words):
        fedloom.run(name, clients=5, rounds=2, **settings)
