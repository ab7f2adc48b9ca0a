"""pFedMe: steps by hand, personal and global model, learning rates that diverge, and a second implementation."""

import logging

import numpy as np
import pytest
import torch.nn.functional as F
from helpers import (
    EAGER,
    RAGGED,
    SingleRun,
    client_info,
    client_state,
    make_task,
    method,
    run_rounds,
    running_statistics,
)
from oracles import (
    assert_near,
    assert_scores,
    average,
    client_samples,
    formula_task,
    full_batch_run,
    gradient,
    is_near,
    net_of,
    numbers,
    plus,
)
from sentences import user_error

from fedloom.core.tree import take
from fedloom.studies.build import check

SIZES = (3, 17, 8, 1)


@pytest.mark.parametrize(
    ("steps", "inner", "theta", "w"),
    [
        (1, 1, 0.1, 0.05),  # theta = 0 - 0.1 (-1 + 0), w = 0 - 0.5 (0 - 0.1)
        (1, 2, 0.18, 0.09),  # theta = 0.1 - 0.1 (-0.9 + 0.1)
        (2, 1, 0.185, 0.1175),  # theta goes on: 0.1 - 0.1 (-0.9 + 0.1 - 0.05); w = 0.05 + 0.5 (0.185 - 0.05)
    ],
)
def test_pfedme_steps(steps, inner, theta, w):
    """F = (theta - 1)^2 / 2, lambda = 1, eta_p = 0.1, eta = 0.5."""
    alg = method("pfedme", lam=1.0, inner_steps=inner, personal_lr=0.1, mu=0.0)
    task = formula_task(lambda p: {"p": p["p"] - 1}, lr=0.5)
    down, info = {"w": numbers(p=0)}, client_info()
    work = alg.enter(task, alg.begin(task, down, {"theta": numbers(p=7)}, info), down, info)
    for _ in range(steps):
        work = alg.step(task, work, None, down, info)
    assert_near(work["theta"].params, numbers(p=theta))
    assert_near(work["w"], numbers(p=w))


def test_pfedme_against_plain_pytorch():
    """theta starts from w^t in every round and is kept for its owner alone; client 3 is sampled late."""
    lam, eta_p, mu, eta_g, cohorts = 1.5, 0.2, 0.05, 0.6, [(0, 1), (0, 2), (1, 2, 3)]
    alg = method("pfedme", lam=lam, inner_steps=3, personal_lr=eta_p, mu=mu, eta_g=eta_g)
    run, plain = full_batch_run(alg, SIZES, EAGER, momentum=0.0)
    w, thetas, decay = plain.initial, [plain.initial] * len(SIZES), run.task.weight_decay
    for t, cohort in enumerate(cohorts):
        ends = []
        for i in cohort:
            theta = v = w
            for _ in range(run.task.epochs):
                for _ in range(3):
                    g = plus(gradient(theta, plain.train[i]), plus(theta, v, -1), lam)
                    theta = plus(theta, plus(g, theta, mu + decay), -eta_p)
                v = plus(v, plus(v, theta, -1), -run.task.lr * lam)
            thetas[i] = theta
            ends.append(v)
        mean = average(ends, [SIZES[i] for i in cohort])
        w = {k: (1 - eta_g) * w[k] + eta_g * mean[k] for k in w}
        scores = run.advance(cohort=np.array(cohort)).scores
        trained = {i for c in cohorts[: t + 1] for i in c}
        personal = [thetas[i] if i in trained else w for i in plain.clients]
        assert_scores(scores["pre"]["test"], personal, plain.test)
        assert_scores(scores["post"]["test"], personal, plain.test)
        assert_scores(scores["global"]["test"], [w] * len(SIZES), plain.test)
    assert_near(run.server["w"], w)
    for i in plain.clients:
        assert_near(client_state(run, "theta", i), thetas[i])


def test_pfedmes_personal_model_is_neither_the_global_one_nor_the_initial_one():
    """Elsewhere it is an alias that is overwritten before evaluation, or weights that never change."""
    task = make_task(RAGGED)
    run, records = run_rounds(method("pfedme"), task, evaluate=True)
    scores = records[-1].scores
    np.testing.assert_allclose(scores["pre"]["test"], scores["post"]["test"])
    assert not np.isclose(scores["pre"]["test"][:, 1], scores["global"]["test"][:, 1], rtol=1e-4).any()
    initial = task.init(run.key)
    for i in range(len(RAGGED)):
        assert not is_near(client_state(run, "theta", i), initial, 1e-5)
        assert not is_near(client_state(run, "theta", i), run.server["w"], 1e-5)


def test_where_lr_times_lambda_is_one_pfedme_sends_the_personal_model():
    task = make_task((12, 30, 5), lr=0.1)
    run = SingleRun(method("pfedme", lam=10.0), task, 3, plan=EAGER)
    done = run.executor.train(run.cohort(np.arange(3), 0), ())
    assert_near(done.up["w"], done.client_state["theta"])


def test_pfedmes_global_model_uses_the_running_statistics_of_the_personal_one():
    task = make_task((8, 20), norm=True)
    run, records = run_rounds(method("pfedme"), task, evaluate=True)
    stats = running_statistics(run)
    assert stats.keys() == {"theta"}
    for i in range(2):
        net = net_of({**run.server["w"], **take(stats["theta"], i)}, norm=True).eval()
        x, y = client_samples(task, "test")[i]
        loss = F.cross_entropy(net(x), y, reduction="sum").detach()
        assert records[-1].scores["global"]["test"][i, 1] == pytest.approx(float(loss))


@pytest.mark.parametrize(
    ("lr", "personal_lr", "words"),
    [(0.2, 0.01, ("lr times lam", "0.2 * 15 = 3", "set lr below 0.13")), (0.01, 0.2, ("set personal_lr below 0.13",))],
)
def test_pfedme_refuses_rates_that_diverge(lr, personal_lr, words):
    with user_error("pfedme", *words):
        check(method("pfedme", personal_lr=personal_lr), make_task(RAGGED, lr=lr))


def test_pfedme_warns_of_a_rate_that_oversteps(caplog):
    with caplog.at_level(logging.WARNING, "fedloom"):
        check(method("pfedme"), make_task(RAGGED, lr=0.05))
        assert not caplog.records
        check(method("pfedme"), make_task(RAGGED, lr=0.1))
    assert [r.getMessage() for r in caplog.records] == [
        "pfedme oversteps with lr * lam = 1.5; values below 1 are usual."
    ]
