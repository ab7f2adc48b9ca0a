"""SCAFFOLD: rounds by hand, control variates of clients and server, and a second implementation."""

import numpy as np
import torch
from helpers import EAGER, SingleRun, client_info, client_state, make_task, method, run_rounds
from oracles import (
    assert_near,
    average,
    constant_gradient,
    formula_task,
    full_batch_run,
    linear,
    numbers,
    plus,
    stack,
)


def test_scaffold_round_with_one_step():
    """y = 1 - 0.1 (2 - 0.5 + 1) = 0.75; c_i+ = 0.5 - 1 + (1 - 0.75) / 0.1 = 2; Delta c = 1.5;
    with N = m = 1: w = 1 + (0.75 - 1) = 0.75, c = 1 + 1.5 = 2.5"""
    alg, task, info = method("scaffold"), formula_task(constant_gradient(2.0), lr=0.1), client_info()
    down, state = {"w": numbers(p=1), "c": numbers(p=1)}, {"c": numbers(p=0.5)}
    work = alg.step(task, alg.begin(task, down, state, info), None, down, info)
    assert_near(work["w"].params, numbers(p=0.75))
    state, up = alg.finish(task, work, down, state, info)
    assert_near(state["c"], numbers(p=2))
    assert_near(up["dc"], numbers(p=1.5))
    server = alg.aggregate(task, down, stack(up), stack(info), 0, 0)
    assert_near(server, {"w": numbers(p=0.75), "c": numbers(p=2.5)})


def test_scaffold_keeps_its_control_variate_without_a_step():
    alg, task, info = method("scaffold"), formula_task(constant_gradient(2.0), lr=0.1), client_info()
    down, state = {"w": numbers(p=1), "c": numbers(p=1)}, {"c": numbers(p=0.5)}
    state, up = alg.finish(task, alg.begin(task, down, state, info), down, state, info)
    assert_near(state["c"], numbers(p=0.5))
    assert_near(up["dc"], numbers(p=0))


def test_scaffold_starts_as_fedavg_with_equal_weights():
    """All control variates are zero in the first round."""
    task = make_task((12, 12, 12))
    run, _ = run_rounds(method("scaffold"), task, rounds=1)
    fedavg, _ = run_rounds(method("fedavg"), task, rounds=1)
    assert_near(run.server["w"], fedavg.server["w"])


def test_scaffold_keeps_a_control_variate_where_batchnorm_allows_no_step():
    run, _ = run_rounds(method("scaffold"), make_task((1, 20, 20), norm=True))
    assert all((v == 0).all() for v in client_state(run, "c", 0).values())
    assert any((v != 0).any() for v in client_state(run, "c", 1).values())


def test_scaffolds_server_variate_counts_clients_that_are_not_sampled():
    """c = c + (1/N) sum over the cohort of Delta c_i, with N = 4 also when two take part."""
    run = SingleRun(method("scaffold"), make_task((12, 20, 7, 15)), 0, plan=EAGER)
    run.advance(evaluate=False, cohort=np.array([1, 3]))
    variates = client_state(run, "c")
    for name, c in run.server["c"].items():
        torch.testing.assert_close(c, (variates[name][1] + variates[name][3]) / 4)


def test_scaffold_against_plain_pytorch():
    run, plain = full_batch_run(method("scaffold", eta_g=0.8), momentum=0.0)
    w, n = plain.initial, len(plain.sizes)
    c = {k: torch.zeros_like(v) for k, v in w.items()}
    variates = [c] * n
    for _ in range(3):
        changes, variate_changes = [], []
        for i in plain.clients:
            y = plain.fit(w, plain.train[i], penalty=linear(plus(c, variates[i], -1)))
            steps = run.task.epochs * run.task.lr  # their number times the learning rate
            new = {k: variates[i][k] - c[k] + (w[k] - y[k]) / steps for k in w}
            changes.append(plus(y, w, -1))
            variate_changes.append(plus(new, variates[i], -1))
            variates[i] = new
        w = plus(w, average(changes, [1] * n), 0.8)
        c = plus(c, average(variate_changes, [1] * n))
        run.advance(evaluate=False)
    assert_near(run.server["w"], w)
    assert_near(run.server["c"], c)
    for i in plain.clients:
        assert_near(client_state(run, "c", i), variates[i])
