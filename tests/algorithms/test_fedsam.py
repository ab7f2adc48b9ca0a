"""FedSAM: a step by hand, identities, running statistics, and a second implementation."""

import torch
import torch.nn.functional as F
from helpers import EAGER, RAGGED, client_info, make_task, method, run_rounds, running_statistics
from oracles import (
    UniformFedAvg,
    assert_near,
    average,
    client_samples,
    flat,
    formula_task,
    full_batch_run,
    gradient,
    is_near,
    numbers,
    plus,
)

SIZES = (3, 17, 8, 1)


def test_fedsam_step():
    """F = p^2/2 + q^2 has gradient (p, 2q), at (3, 2) it is (3, 4) with norm 5. With rho = 1 eps = (0.6, 0.8), the
    gradient at (3.6, 2.8) is (3.6, 5.6), and a step of 0.1 from (3, 2) leads to (2.64, 1.44)."""
    task = formula_task(lambda w: {"p": w["p"], "q": 2 * w["q"]}, lr=0.1)
    work = method("fedsam", rho=1.0).step(task, {"w": task.slot(numbers(p=3, q=2))}, None, {}, client_info())
    assert_near(work["w"].params, numbers(p=2.64, q=1.44))


def test_fedsam_against_plain_pytorch():
    """Weight decay counts in the step and not in the perturbation; clients count equally."""
    run, plain = full_batch_run(method("fedsam", rho=0.4), SIZES, EAGER, momentum=0.0)
    w, lr, decay = plain.initial, run.task.lr, run.task.weight_decay
    for _ in range(3):
        ends = []
        for samples in plain.train:
            v = w
            for _ in range(run.task.epochs):
                g = gradient(v, samples)
                perturbed = gradient(plus(v, g, 0.4 / flat(g).norm()), samples)
                v = plus(v, plus(perturbed, v, decay), -lr)
            ends.append(v)
        w = average(ends, [1] * len(SIZES))
        run.advance(evaluate=False)
    assert_near(run.server["w"], w)


def test_fedsam_without_radius_is_fedavg_with_equal_weights():
    task = make_task(RAGGED, participation=0.5, epochs=2, momentum=0.5, weight_decay=0.01)
    fedavg, _ = run_rounds(UniformFedAvg(), task)
    assert_near(run_rounds(method("fedsam", rho=0.0), task)[0].server["w"], fedavg.server["w"])
    assert not is_near(run_rounds(method("fedsam"), task)[0].server, fedavg.server, 1e-5)
    equal = make_task([20] * 6)
    fedavg, _ = run_rounds(method("fedavg"), equal)
    assert_near(run_rounds(method("fedsam", rho=0.0), equal)[0].server["w"], fedavg.server["w"])


def test_fedsams_running_statistics_are_those_of_the_first_pass():
    """With a vanishing learning rate the batch mean m at w stays, and 3 rounds of 2 epochs with one batch are 6 steps:
    the running mean is (1 - 0.9^6) m. Had the perturbed pass counted too, there would be 12 and another mean."""
    task = make_task((8, 9), norm=True, lr=1e-14, epochs=2)
    run, _ = run_rounds(method("fedsam", rho=0.5), task)
    w = task.init(run.key)
    for i, (x, _) in enumerate(client_samples(task, "train")):
        m = F.linear(x, w["first.weight"], w["first.bias"]).mean(0)
        torch.testing.assert_close(running_statistics(run, "w", i)["norm.running_mean"], (1 - 0.9**6) * m)
