"""PLGU-GRep: the body's steps, identities with FedRep, models of a single layer, and a second implementation."""

import numpy as np
from helpers import EAGER, RAGGED, SingleRun, client_state, logreg_task, make_task, method, run_rounds
from oracles import PlainTraining, assert_near, average, batches, flat, gradient, part, plus
from sentences import user_error

from fedloom.algorithms.fedrep import FedRep
from fedloom.core.algorithm import Phase
from fedloom.studies.build import check


def test_grep_without_radius_is_fedrep_that_steps_twice_per_batch():
    task = make_task(RAGGED, participation=0.5)
    settings = {"head_epochs": 2, "average": "clients"}

    class Twice(FedRep):
        def phases(self, task):
            return [Phase(self.head_step, 2), Phase(self.two_steps, 1)]

        def two_steps(self, task, work, batch, down, info):
            return self.body_step(task, self.body_step(task, work, batch, down, info), batch, down, info)

    run, _ = run_rounds(method("plgu-grep", rho=0.0, **settings), task)
    fedrep, _ = run_rounds(Twice(**settings), task)
    assert_near(run.server["phi"], fedrep.server["phi"])
    assert_near(client_state(run, "h"), client_state(fedrep, "h"))


def test_grep_keeps_the_body_that_it_uploads():
    task = make_task(RAGGED)
    run = SingleRun(method("plgu-grep"), task, 0, plan=EAGER)
    done = run.executor.train(run.cohort(np.arange(len(RAGGED)), 0), ())
    assert_near(done.client_state["phi"], done.up["phi"])


def test_grep_scores_are_of_the_body_only_and_reported():
    run = SingleRun(method("plgu-grep"), make_task(RAGGED), 0, plan=EAGER)
    assert run.advance().reports["xi"].shape == (len(RAGGED), 1)  # SmallNet: one layer, and the head


def test_grep_of_a_single_layer_must_be_allowed_and_is_local_training():
    task = logreg_task(RAGGED, dim=6, classes=4, rounds=2)
    with user_error("single layer", "allow_degenerate"):
        check(method("plgu-grep"), task)
    run, _ = run_rounds(method("plgu-grep", allow_degenerate=True, head_epochs=1), task)
    local, _ = run_rounds(method("local"), task)
    assert_near(client_state(run, "h"), client_state(local, "theta"))


def test_plgu_grep_against_plain_pytorch():
    """The body is one layer, so its score is 1 whatever the distance."""
    sizes, rho = (7, 25, 13, 1), 0.7
    task = make_task(sizes)
    run = SingleRun(method("plgu-grep", head_epochs=2, rho=rho), task, 3, plan=EAGER)
    w = PlainTraining(task, run.seed).initial
    heads = [part(w, "head.")] * len(sizes)
    for t in range(3):
        ends = []
        for i in range(len(sizes)):
            v = w | heads[i]
            for samples in batches(task, i, t, 2):
                v = plus(v, part(gradient(v, samples), "head."), -task.lr)
            for samples in batches(task, i, t, 1):
                v = plus(v, part(gradient(v, samples), "first."), -task.lr)
                g = part(gradient(v, samples), "first.")
                perturbed = plus(v, g, rho / flat(g).norm())
                v = plus(v, part(gradient(perturbed, samples), "first."), -task.lr)
            heads[i] = part(v, "head.")
            ends.append(v)
        w = average(ends, [1] * len(sizes))
        run.advance(evaluate=False)
    assert_near(run.server["phi"], part(w, "first."), 1e-9)
    for i in range(len(sizes)):
        assert_near(client_state(run, "h", i), heads[i], 1e-9)
