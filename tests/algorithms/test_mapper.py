"""MAPPER: candidates of the mixture, their steps, identities, and a second implementation."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EAGER,
    RAGGED,
    client_info,
    client_state,
    make_batch,
    make_task,
    method,
    run_rounds,
    running_statistics,
    tensor,
)
from oracles import (
    EVERY_SETTING,
    assert_equal,
    assert_near,
    assert_same_scores,
    assert_scores,
    average,
    constant_gradient,
    formula_task,
    full_batch_run,
    measure,
    net_of,
    numbers,
)
from sentences import user_error

from fedloom.config.resolve import configure
from fedloom.core.tree import take
from fedloom.studies.build import check

SIZES = (3, 17, 8, 11)
INFO = client_info(first=False)


@pytest.mark.parametrize("settings", [{}, EVERY_SETTING], ids=["defaults", "every setting"])
def test_mapper_with_candidate_zero_is_fedavg(settings):
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    run, records = run_rounds(method("mapper", lambdas=(0.0,)), task, evaluate=True)
    fedavg, expected = run_rounds(method("fedavg"), task, evaluate=True)
    assert_near(run.server["w"], fedavg.server["w"])
    assert_near(running_statistics(run), running_statistics(fedavg))
    assert_same_scores(records, expected)


def test_mapper_with_candidate_one_is_local_and_leaves_the_global_model():
    task = make_task(RAGGED, participation=0.5, epochs=2)
    run, _ = run_rounds(method("mapper", lambdas=(1.0,)), task)
    local, _ = run_rounds(method("local"), task)
    assert_near(client_state(run, "theta"), client_state(local, "theta"))
    assert_near(run.server["w"], task.init(run.key))


def test_mappers_steps_by_hand():
    """lambda = 0.25, a gradient of 2 at the mixture, eta = 0.1: theta = 0 - 0.1 * 0.25 * 2 = -0.05 and
    w = 1 - 0.1 * 0.75 * 2 = 0.85. The model is 0.25 * -0.05 + 0.75 * 0.85 = 0.625."""
    alg, task = method("mapper", lambdas=(0.25,)), formula_task(constant_gradient(2.0), lr=0.1)
    down, state = {"w": numbers(p=1)}, {"theta": numbers(p=0), "lam": tensor(0.0)}
    work = alg.start_candidates(task, alg.begin(task, down, state, INFO), down, INFO)
    work = alg.keep_best(task, alg.personal_step(task, work, None, down, INFO), down, INFO)
    assert_near(work["theta"], numbers(p=-0.05))
    work = alg.global_step(task, work, None, down, INFO)
    assert_near(work["w"].params, numbers(p=0.85))
    assert_near(alg.model(task, work, down, INFO).params, numbers(p=0.625))


def test_mapper_keeps_the_first_of_equally_good_candidates():
    alg, task = method("mapper"), formula_task(constant_gradient(0.0), lr=0.1)
    work = {"w": None, "tried": task.slot({"p": tensor([7, 8, 9])}), "lam": tensor([0.25, 0.5, 0.75])}
    for losses, lam, theta in (((2, 1, 1), 0.5, 8), ((3, 3, 3), 0.25, 7), ((math.nan, 5, 4), 0.75, 9)):
        seen = torch.stack([tensor([0, loss, 10]) for loss in losses])
        kept = alg.keep_best(task, {**work, "seen": seen}, None, INFO)
        assert (float(kept["lam"]), float(kept["theta"]["p"])) == (lam, theta)


def test_mapper_measures_each_mixture_with_its_running_statistics():
    """With BatchNorm in evaluation mode; a client's statistics are where its candidates' begin."""
    task, alg = make_task(SIZES, norm=True), method("mapper", lambdas=(0.2, 0.7))
    down, state = {"w": task.init(1)}, {"theta": task.init(2), "lam": tensor(0.5)}
    x, y = task.data.x[:6], task.data.y[:6]
    work = alg.begin(task, down, state, INFO)
    kept = {k: v + 0.5 for k, v in work["w"].buffers.items()}
    work = alg.start_candidates(task, {**work, "w": work["w"]._replace(buffers=kept)}, down, INFO)
    moved = work["tried"]._replace(
        params={k: v * tensor([1, 3]).view(-1, *[1] * (v.dim() - 1)) for k, v in work["tried"].params.items()}
    )
    seen = alg.measure(task, {**work, "tried": moved}, make_batch(x, y), down, INFO)["seen"]
    for j, (lam, factor) in enumerate(((0.2, 1), (0.7, 3))):
        mixture = {k: lam * factor * v + (1 - lam) * down["w"][k] for k, v in state["theta"].items()}
        net = net_of({**mixture, **kept}, norm=True).eval()
        assert float(seen[j, 1]) == pytest.approx(float(F.cross_entropy(net(x), y, reduction="sum").detach()))


def blend(lam, theta, w):
    """lam * theta + (1 - lam) * w"""
    return {k: lam * theta[k] + (1 - lam) * w[k] for k in w}


def plain_round(plain, i, w, theta, lambdas):
    """A round of client i: the best (theta, lambda) after training each candidate, then w trained under it."""
    samples, found = plain.train[i], []
    for lam in lambdas:
        tried = plain.fit(theta, samples, loss_at=lambda theta, lam=lam: blend(lam, theta, w))
        found.append((measure(blend(lam, tried, w), samples)[1], lam, tried))
    _, lam, theta = min(found, key=lambda candidate: candidate[0])
    return theta, lam, plain.fit(w, samples, loss_at=lambda w: blend(lam, theta, w))


@pytest.mark.parametrize("lambdas", [(0.25, 0.5, 0.75), (0.9, 0.1)])
def test_mapper_against_plain_pytorch(lambdas):
    run, plain = full_batch_run(method("mapper", lambdas=lambdas))
    w, thetas = plain.initial, [plain.initial] * len(SIZES)
    picked = set()
    for _ in range(3):
        found = [plain_round(plain, i, w, thetas[i], lambdas) for i in plain.clients]
        thetas, lams, locals_ = ([f[part] for f in found] for part in range(3))
        w = average(locals_, plain.sizes)
        done = run.advance()
        assert done.reports["lambda"].tolist() == pytest.approx(lams)
        assert_near(run.server["w"], w)
        for i in plain.clients:
            assert_near(client_state(run, "theta", i), thetas[i])
        after = [blend(lams[i], thetas[i], locals_[i]) for i in plain.clients]
        assert_scores(done.scores["post"]["test"], after, plain.test)
        assert_scores(done.scores["pre"]["test"], [blend(lams[i], thetas[i], w) for i in plain.clients], plain.test)
        assert_scores(done.scores["global"]["test"], [w] * len(SIZES), plain.test)
        picked |= set(lams)
    assert picked <= set(lambdas)


def test_mappers_candidates_all_start_from_the_stored_model():
    """At first three equal copies, each with its momentum; the round's end keeps one."""
    task = make_task(SIZES, momentum=0.9)
    alg = method("mapper")
    down, state = {"w": task.init(1)}, {"theta": task.init(2), "lam": tensor(0.5)}
    work = alg.start_candidates(task, alg.begin(task, down, state, INFO), down, INFO)
    assert work["lam"].tolist() == [0.25, 0.5, 0.75]
    for j in range(3):
        assert_equal(take(work["tried"].params, j), state["theta"])
        assert all((v == 0).all() for v in take(work["tried"].moments["first"], j).values())
    assert set(alg.keep_best(task, work, down, INFO)) == {"w", "theta", "lam"}


def test_a_client_that_never_trained_is_served_by_the_global_model_and_starts_from_the_initial_one():
    run, plain = full_batch_run(method("mapper"), plan=EAGER)
    for _ in range(2):
        scores = run.advance(cohort=np.array([1, 3])).scores
    np.testing.assert_allclose(scores["pre"]["test"][[0, 2]], scores["global"]["test"][[0, 2]])
    assert not np.allclose(scores["pre"]["test"][[1, 3]], scores["global"]["test"][[1, 3]])
    assert client_state(run, "lam")[[0, 2]].tolist() == [0, 0]
    w = {k: v.clone() for k, v in run.server["w"].items()}
    run.advance(evaluate=False, cohort=np.array([2]))
    theta, lam, w_i = plain_round(plain, 2, w, plain.initial, (0.25, 0.5, 0.75))
    assert_near(client_state(run, "theta", 2), theta)
    assert float(client_state(run, "lam")[2]) == lam
    assert_near(run.server["w"], w_i)


def test_mappers_candidates_are_checked():
    with user_error("lambdas must be at most 1", "1.5"):
        configure("mapper", values={"lambdas": "0.5/1.5"})
    with user_error("lambdas must be at least 0"):
        configure("mapper", values={"lambdas": (-0.1, 0.5)})
    with user_error("at least one candidate", "lambdas=0.5"):
        check(method("mapper", lambdas=()), make_task(SIZES))
    assert configure("mapper", values={"lambdas": "0.1/0.9"}).algorithm.lambdas == (0.1, 0.9)
