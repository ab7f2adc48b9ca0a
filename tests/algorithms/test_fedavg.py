"""FedAvg: a second implementation, and the step of its optimiser by hand."""

import torch
from helpers import method
from oracles import assert_near, average, constant_gradient, formula_task, full_batch_run, numbers


def test_fedavg_against_plain_pytorch():
    run, plain = full_batch_run(method("fedavg"))
    w = plain.initial
    for _ in range(3):
        w = average([plain.fit(w, plain.train[i]) for i in plain.clients], plain.sizes)
        run.advance(evaluate=False)
    assert_near(run.server["w"], w)


def test_sgd_with_clipping_decay_and_momentum():
    """clip 3 to 1.5 (up to 1e-6 in the divisor); + 0.1 * 2 = 1.7; v = 0.5 * 0 + 1.7; w = 2 - 0.1 * 1.7 = 1.83
    then: 1.5 + 0.1 * 1.83 = 1.683; v = 0.5 * 1.7 + 1.683 = 2.533; w = 1.83 - 0.2533 = 1.5767"""
    task = formula_task(constant_gradient(3.0), lr=0.1, momentum=0.5, weight_decay=0.1, clip=1.5)
    slot = task.slot(numbers(p=2))
    for expected in (1.83, 1.5767):
        g, slot = task.grad(slot, None)
        slot = task.step(slot, g)
        torch.testing.assert_close(slot.params, numbers(p=expected), rtol=1e-5, atol=0)
