"""FedDyn: rounds by hand, where it ends, dual vectors, and a second implementation."""

import numpy as np
import pytest
import torch
from helpers import EAGER, RAGGED, client_info, client_state, make_task, method, run_rounds
from oracles import (
    assert_near,
    average,
    constant_gradient,
    formula_task,
    full_batch_run,
    linear,
    numbers,
    plus,
    proximal,
    stack,
)

from fedloom.core.tree import uniform_mean

INFO = client_info()


def test_feddyn_round():
    """theta = 1 - 0.1 (2 - 0.2) = 0.82; lam = 0.2 - 0.1 (0.82 - 1) = 0.218; h = 0 - 0.1 (0.82 - 1) = 0.018;
    w = 0.82 - 0.018 / 0.1 = 0.64"""
    alg, task = method("feddyn", alpha=0.1), formula_task(constant_gradient(2.0), lr=0.1)
    server, state = {"w": numbers(p=1), "h": numbers(p=0)}, {"lam": numbers(p=0.2)}
    down, _ = alg.download(task, server, None, 0, 0)
    assert down.keys() == {"w"}  # h stays at the server
    work = alg.step(task, alg.begin(task, down, state, INFO), None, down, INFO)
    assert_near(work["w"].params, numbers(p=0.82))
    state, up = alg.finish(task, work, down, state, INFO)
    assert_near(state["lam"], numbers(p=0.218))
    server = alg.aggregate(task, server, stack(up), stack(INFO), 0, 0)
    assert_near(server["h"], numbers(p=0.018))
    assert_near(server["w"], numbers(p=0.64))


def test_feddyns_penalty_is_a_squared_norm():
    """From theta = 0.82 (above) on: 2 - 0.2 + 0.1 (0.82 - 1) = 1.782, theta = 0.82 - 0.1782 = 0.6418, and lam =
    0.2 - 0.1 (0.6418 - 1) = 0.23582. The gradient of a norm that is not squared would have -0.1 for -0.018."""
    alg, task = method("feddyn", alpha=0.1), formula_task(constant_gradient(2.0), lr=0.1)
    down, state = {"w": numbers(p=1)}, {"lam": numbers(p=0.2)}
    work = alg.begin(task, down, state, INFO)
    for _ in range(2):
        work = alg.step(task, work, None, down, INFO)
    assert_near(work["w"].params, numbers(p=0.6418))
    assert_near(alg.finish(task, work, down, state, INFO)[0]["lam"], numbers(p=0.23582))


def test_feddyn_finds_the_minimum_of_all_clients_where_fedavg_does_not():
    """F_1 = p^2 / 2 and F_2 = 4 (p - 1)^2 / 2: the mean is least at 4/5, where the gradients are 0.8 and -0.8, which
    the dual vectors end at. Clients that train to the end alone reach 0 and 1, and FedAvg their mean 0.5."""
    curves, ends = ((1.0, 0.0), (4.0, 1.0)), {}
    for name in ("feddyn", "fedavg"):
        alg = method(name, **({"alpha": 1.0} if name == "feddyn" else {}))
        server, states = {"w": numbers(p=0), "h": numbers(p=0)}, [{"lam": numbers(p=0)} for _ in curves]
        for _ in range(60):
            ups = []
            for i, (k, c) in enumerate(curves):
                task = formula_task(lambda w, k=k, c=c: {"p": k * (w["p"] - c)}, lr=0.1, clients=2)
                down = {"w": server["w"]}
                work = alg.begin(task, down, states[i], INFO)
                for _ in range(150):
                    work = alg.step(task, work, None, down, INFO)
                states[i], up = alg.finish(task, work, down, states[i], INFO)
                ups.append(up)
            server = alg.aggregate(task, server, stack(*ups), INFO._replace(n=torch.ones(2)), 0, 0)
        ends[name] = server["w"]
        if name == "feddyn":
            assert_near(states[0]["lam"], numbers(p=0.8), 1e-6)
            assert_near(states[1]["lam"], numbers(p=-0.8), 1e-6)
    assert_near(ends["feddyn"], numbers(p=0.8), 1e-6)
    assert_near(ends["fedavg"], numbers(p=0.5), 1e-6)


@pytest.mark.parametrize("adaptive", [False, True])
def test_feddyn_against_plain_pytorch(adaptive):
    """The loss as printed, by autograd; some clients do not take part, the last one is sampled late."""
    sizes, alpha = (3, 17, 8, 1), 0.3
    run, plain = full_batch_run(method("feddyn", alpha=alpha, adaptive=adaptive), sizes, EAGER, momentum=0.0)
    w = plain.initial
    h = {k: torch.zeros_like(v) for k, v in w.items()}
    lam = [h] * len(sizes)
    for cohort in ((0, 1), (0, 2), (1, 2, 3)):
        ends = []
        for i in cohort:
            a = alpha * np.mean(sizes) / sizes[i] if adaptive else alpha
            near, dual = proximal(a, w), linear(lam[i])
            end = plain.fit(w, plain.train[i], penalty=lambda p, near=near, dual=dual: near(p) - dual(p))
            lam[i] = plus(lam[i], plus(end, w, -1), -a)
            ends.append(end)
        for end in ends:
            h = plus(h, plus(end, w, -1), -alpha / len(sizes))
        w = plus(average(ends, [1] * len(ends)), h, -1 / alpha)
        run.advance(evaluate=False, cohort=np.array(cohort))
    assert_near(run.server["w"], w)
    assert_near(run.server["h"], h)
    for i in plain.clients:
        assert_near(client_state(run, "lam", i), lam[i])


def test_feddyn_keeps_a_dual_vector_where_batchnorm_allows_no_step():
    run, _ = run_rounds(method("feddyn"), make_task((1, 20, 20), norm=True))
    assert all((v == 0).all() for v in client_state(run, "lam", 0).values())
    assert any((v != 0).any() for v in client_state(run, "lam", 1).values())


def test_feddyns_server_keeps_the_mean_of_the_dual_vectors():
    """h = mean over all clients of lam_i, as long as a_i = a."""
    run, _ = run_rounds(method("feddyn"), make_task(RAGGED, participation=0.5))
    assert_near(run.server["h"], uniform_mean(client_state(run, "lam")))
