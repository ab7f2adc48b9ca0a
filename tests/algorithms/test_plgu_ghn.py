"""PLGU-GHN: gradients at the perturbed point, identities with pFedHN, decay, and memory."""

import numpy as np
import pytest
import torch
from helpers import EAGER, RAGGED, SingleRun, make_task, method, run_rounds
from oracles import assert_near, flat, plus
from sentences import user_error

from fedloom.algorithms.parts import hypernetwork
from fedloom.core.federation import Federation
from fedloom.studies.build import check

SMALL = {"hidden": 1, "embedding": 3}


def test_a_hypernetwork_that_does_not_fit_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(Federation, "available_memory", lambda data: 2 << 20)
    task = make_task(RAGGED)
    with user_error("parameters", "GB", "hn_rank"):
        check(method("plgu-ghn"), task)
    check(method("plgu-ghn", hn_rank=1, hidden=0), task)


@pytest.mark.parametrize("rank", [None, 2])
def test_gradients_are_those_of_finite_differences_at_the_perturbed_point(rank):
    """g_phi is the derivative of sum_i <h(v_i; phi + eps), Delta_i>, g_{v_i} that of <h(v_i; phi + eps), Delta_i>,
    with eps = rho * g / ||g|| and g the derivative at phi itself; checked along random directions."""
    task = make_task((5, 9, 4))
    alg = method("plgu-ghn", rho=0.3, hn_rank=rank, **SMALL)
    server = SingleRun(alg, task, 0, plan=EAGER).server
    shapes = {k: v.shape for k, v in task.init(0).items()}
    draw = torch.Generator().manual_seed(1)
    delta = {k: torch.randn(3, *s, generator=draw, dtype=torch.float64) for k, s in shapes.items()}
    phi, v = server["phi"], server["v"]

    def value(phi, v, weights):
        made = hypernetwork.generate(phi, v, shapes)
        each = sum((made[k] * delta[k]).flatten(1).sum(1) for k in made)
        return float((each * weights).sum())

    def along(direction, weights, at):
        h = 1e-5
        return (value(plus(at, direction, h), v, weights) - value(plus(at, direction, -h), v, weights)) / (2 * h)

    everyone = torch.ones(3, dtype=torch.float64)
    plain = method("pfedhn", hn_rank=rank, **SMALL).gradient(task, {"phi": phi, "v": v}, delta)["phi"]
    perturbed = plus(phi, plain, 0.3 / flat(plain).norm())
    found = alg.gradient(task, {"phi": phi, "v": v}, delta)
    for _ in range(5):
        direction = {k: torch.randn(p.shape, generator=draw, dtype=torch.float64) for k, p in phi.items()}
        for at, g in ((phi, plain), (perturbed, found["phi"])):
            expected = along(direction, everyone, at)
            assert sum(float((g[k] * direction[k]).sum()) for k in g) == pytest.approx(expected, rel=1e-6)
    for i in range(3):
        one = torch.zeros(3, dtype=torch.float64)
        one[i] = 1
        for j in range(v.shape[1]):
            step = torch.zeros_like(v)
            step[i, j] = 1e-5
            expected = (value(perturbed, v + step, one) - value(perturbed, v - step, one)) / 2e-5
            assert float(found["v"][i, j]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_ghn_without_radius_is_pfedhn_that_updates_once_per_round():
    """With one client per round pFedHN has no other way."""
    for participation, settings in ((1 / 12, {}), (0.5, {"batch_update": True})):
        task = make_task(RAGGED, participation=participation)
        run, _ = run_rounds(method("plgu-ghn", rho=0.0), task, rounds=4)
        pfedhn, _ = run_rounds(method("pfedhn", **settings), task, rounds=4)
        assert_near(run.server, pfedhn.server)


def test_without_changes_of_the_clients_only_weight_decay_is_left():
    """Delta = 0: the first step is m = decay * x, x - lr * decay * x."""
    task = make_task((5, 9, 4))
    alg = method("plgu-ghn", **SMALL)
    run = SingleRun(alg, task, 0, plan=EAGER)
    cohort = run.cohort(np.arange(3), 0)
    unchanged = {"delta": {k: torch.zeros_like(v) for k, v in cohort.parts["w"].items()}}
    after = alg.aggregate(task, run.server, unchanged, cohort.info, 0, 0)
    assert_near(after["phi"], {k: v * (1 - 0.01 * 1e-3) for k, v in run.server["phi"].items()})
    assert_near(after["v"], run.server["v"] * (1 - 0.01 * 1e-3))
