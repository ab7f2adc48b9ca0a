"""Ditto: a step by hand, FedAvg and local training as special cases, and a second implementation."""

from helpers import RAGGED, client_info, client_state, make_task, method, run_rounds
from oracles import assert_near, average, constant_gradient, formula_task, full_batch_run, numbers, proximal


def test_ditto_personal_step():
    """2 + 0.5 * (0 - 1) = 1.5; 0 - 0.1 * 1.5 = -0.15"""
    alg, task = method("ditto", lam=0.5), formula_task(constant_gradient(2.0), lr=0.1)
    down, info = {"w": numbers(p=1)}, client_info()
    work = alg.personal_step(task, alg.begin(task, down, {"v": numbers(p=0)}, info), None, down, info)
    assert_near(work["v"].params, numbers(p=-0.15))
    assert_near(work["w"].params, numbers(p=1))


def test_ditto_keeps_fedavg_as_its_global_model_and_sees_its_batches():
    task = make_task(RAGGED, participation=0.5, epochs=2)
    run, _ = run_rounds(method("ditto"), task)
    fedavg, _ = run_rounds(method("fedavg"), task)
    assert_near(run.server["w"], fedavg.server["w"])


def test_ditto_without_its_proximal_term_is_local():
    task = make_task(RAGGED, participation=0.5)
    run, _ = run_rounds(method("ditto", lam=0.0), task)
    local, _ = run_rounds(method("local"), task)
    assert_near(client_state(run, "v"), client_state(local, "theta"))


def test_ditto_against_plain_pytorch():
    run, plain = full_batch_run(method("ditto", lam=0.4, personal_epochs=3))
    w, v = plain.initial, [plain.initial] * len(plain.sizes)
    for _ in range(3):
        v = [plain.fit(v[i], plain.train[i], epochs=3, penalty=proximal(0.4, w)) for i in plain.clients]
        w = average([plain.fit(w, plain.train[i]) for i in plain.clients], plain.sizes)
        run.advance(evaluate=False)
    assert_near(run.server["w"], w)
    for i in plain.clients:
        assert_near(client_state(run, "v", i), v[i])
