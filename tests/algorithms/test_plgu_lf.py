"""PLGU-LF: universal and personal layers, identities, scores of layers, and a second implementation."""

import numpy as np
import pytest
import torch
from helpers import EAGER, RAGGED, SingleRun, client_state, make_task, method, run_rounds
from oracles import PlainTraining, assert_near, average, batches, flat, gradient, is_near, part, plus

from fedloom.engine import batching


@pytest.mark.parametrize("d", [0, 1, 2, None])
def test_without_radius_the_global_model_is_fedavgs_whatever_D_is(d):
    """Clients count equally, which for equal sizes is FedAvg's average."""
    task = make_task([20] * 6, participation=0.5, epochs=2)
    run, _ = run_rounds(method("plgu-lf", rho=0.0, D=d), task)
    fedavg, _ = run_rounds(method("fedavg"), task)
    assert_near(run.server["w"], fedavg.server["w"], 1e-11)


def test_without_radius_and_personal_layers_both_models_of_a_client_are_the_same():
    task = make_task(RAGGED)
    alg = method("plgu-lf", rho=0.0, D=0)
    run = SingleRun(alg, task, 3, plan=EAGER)
    run.advance(evaluate=False)
    done = run.executor.train(run.cohort(np.arange(len(RAGGED)), run.t), ())
    assert_near(done.client_state["theta"], plus(done.up["delta"], run.server["w"]))


def test_with_all_layers_personal_it_is_local_training():
    task = make_task(RAGGED, participation=0.5)
    local, _ = run_rounds(method("local"), task)
    for d in (2, 7):  # clamped to the number of layers
        run, _ = run_rounds(method("plgu-lf", D=d), task)
        assert_near(client_state(run, "theta"), client_state(local, "theta"))


def test_by_default_a_small_model_keeps_one_layer_universal():
    run, one = (run_rounds(method("plgu-lf", **d), make_task(RAGGED))[0] for d in ({}, {"D": 1}))
    assert_near(run.server, one.server)


def test_perturb_sets_are_what_they_say():
    """Without personal or without universal layers there is nothing to perturb in them."""
    task = make_task(RAGGED)

    def server(**settings):
        return run_rounds(method("plgu-lf", **settings), task)[0].server

    assert_near(server(rho=0.5, D=0, perturb_set="per"), server(rho=0.0, D=0))
    assert_near(server(rho=0.5, D=2, perturb_set="uni"), server(rho=0.0, D=2))
    unperturbed = server(rho=0.0, D=1)
    for chosen in ("all", "per", "uni"):
        assert not is_near(server(rho=0.5, D=1, perturb_set=chosen), unperturbed, 1e-5)


def test_steps_instead_of_epochs():
    task = make_task([35] * 4, epochs=3)
    run = SingleRun(method("plgu-lf", count="steps"), task, 0, plan=EAGER)
    (phase,) = run.alg.phases(task)
    assert batching.build(task, phase, 0, np.arange(4), 0, np.ones(4, int)).steps.tolist() == [3] * 4


def test_layer_scores_are_reported():
    run = SingleRun(method("plgu-lf"), make_task(RAGGED), 0, plan=EAGER)
    first, second = run.advance(), run.advance()
    assert first.reports["xi"].shape == (len(RAGGED), 2)
    np.testing.assert_allclose(first.reports["xi"], 0.5)  # everybody starts from the same model
    np.testing.assert_allclose(second.reports["xi"].sum(1), 1)
    assert np.ptp(second.reports["xi"][:, 0]) > 1e-3


def layer_scores(a, b):
    """The distances of two models by layer, per parameter, as shares of their sum; equal shares if there is none."""
    distances = {layer: flat(part(plus(a, b, -1), layer)) for layer in ("first.", "head.")}
    means = {layer: d.norm() / d.numel() for layer, d in distances.items()}
    total = sum(means.values())
    return {layer: d / total if total > 1e-12 else torch.tensor(0.5) for layer, d in means.items()}


def test_plgu_lf_against_plain_pytorch():
    sizes, rho = (7, 25, 13, 1), 0.7
    task = make_task(sizes, epochs=2)
    run = SingleRun(method("plgu-lf", D=1, rho=rho), task, 3, plan=EAGER)
    w = PlainTraining(task, run.seed).initial
    thetas = [w] * len(sizes)
    for t in range(3):
        ends = []
        for i in range(len(sizes)):
            xi = layer_scores(thetas[i], w)
            personal = max(xi, key=lambda layer: (float(xi[layer]), layer == "first."))  # D = 1; of equals the first
            theta, end = w | part(thetas[i], personal), w
            for samples in batches(task, i, t, task.epochs):
                g = gradient(theta, samples)
                eps = {k: rho * xi[k.split(".")[0] + "."] * v / flat(g).norm() for k, v in g.items()}
                end = plus(end, gradient(plus(end, eps), samples), -task.lr)
                theta = plus(theta, g, -task.lr)
            thetas[i] = theta
            ends.append(end)
        w = average(ends, [1] * len(sizes))
        run.advance(evaluate=False)
    assert_near(run.server["w"], w, 1e-9)
    for i in range(len(sizes)):
        assert_near(client_state(run, "theta", i), thetas[i], 1e-9)
