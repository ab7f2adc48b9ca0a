"""FedProx: a step by hand, FedAvg as a special case, and a second implementation."""

from helpers import RAGGED, client_info, make_task, method, run_rounds
from oracles import assert_near, average, constant_gradient, formula_task, full_batch_run, numbers, proximal


def test_fedprox_step():
    """grad + mu (w - w^t) = 1 + 0.1 * (1 - 0.5) = 1.05; 1 - 1 * 1.05 = -0.05"""
    alg, task = method("fedprox", mu=0.1), formula_task(constant_gradient(1.0), lr=1.0)
    work = alg.step(task, {"w": task.slot(numbers(p=1))}, None, {"w": numbers(p=0.5)}, client_info())
    assert_near(work["w"].params, numbers(p=-0.05))


def test_fedprox_without_its_term_is_fedavg():
    task = make_task(RAGGED, participation=0.5)
    run, _ = run_rounds(method("fedprox", mu=0.0), task)
    fedavg, _ = run_rounds(method("fedavg"), task)
    assert_near(run.server, fedavg.server)


def test_fedprox_against_plain_pytorch():
    run, plain = full_batch_run(method("fedprox", mu=0.7))
    w = plain.initial
    for _ in range(3):
        trained = [plain.fit(w, plain.train[i], penalty=proximal(0.7, w)) for i in plain.clients]
        w = average(trained, plain.sizes)
        run.advance(evaluate=False)
    assert_near(run.server["w"], w)
