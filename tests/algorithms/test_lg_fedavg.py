"""LG-FedAvg: shared heads and private bodies, pretraining, and a second implementation."""

import numpy as np
import pytest
from helpers import EAGER, RAGGED, assert_same, client_state, logreg_task, make_task, method, plan_id, run_rounds
from oracles import assert_near, assert_same_scores, assert_scores, average, full_batch_run, is_near, part

from fedloom.engine.plan import Plan
from fedloom.studies.build import check


@pytest.mark.parametrize("pretrain", [0, 2])
def test_lg_fedavg_against_plain_pytorch(pretrain):
    """With two rounds of FedAvg at first, everybody starts with the body they led to, also who was never there."""
    sizes = (3, 17, 8, 1)
    run, plain = full_batch_run(method("lg-fedavg", pretrain_rounds=pretrain), sizes, EAGER, momentum=0.0)
    w, bodies = plain.initial, [part(plain.initial, "first.")] * len(sizes)
    for t, cohort in enumerate([(0, 1), (0, 2), (1, 2), (0, 2, 3)]):
        ends = {i: plain.fit(w if t < pretrain else w | bodies[i], plain.train[i]) for i in cohort}
        for i in cohort:
            bodies[i] = part(ends[i], "first.")
        mean = average(list(ends.values()), [sizes[i] for i in cohort])
        if t < pretrain:
            w = mean
            bodies = [part(mean, "first.")] * len(sizes)
        w = w | part(mean, "head.")
        scores = run.advance(cohort=np.array(cohort)).scores
        assert_scores(scores["pre"]["test"], [w | bodies[i] for i in plain.clients], plain.test)
        assert_scores(scores["post"]["test"][list(cohort)], ends.values(), [plain.test[i] for i in cohort])
    assert_near(run.server["h"], part(w, "head."))
    for i in plain.clients:
        assert_near(client_state(run, "phi", i), bodies[i])


def test_lg_fedavg_shares_all_of_a_single_layer():
    task = logreg_task(RAGGED, dim=6, classes=4)
    check(method("lg-fedavg"), task)
    fedavg, _ = run_rounds(method("fedavg"), task)
    for pretrain in (0, 1):
        run, _ = run_rounds(method("lg-fedavg", pretrain_rounds=pretrain), task)
        assert_near(run.server["h"], fedavg.server["w"])


def test_lg_fedavg_that_only_pretrains_is_fedavg():
    task = make_task(RAGGED, participation=0.5)
    run, records = run_rounds(method("lg-fedavg", pretrain_rounds=3), task, evaluate=True)
    fedavg, expected = run_rounds(method("fedavg"), task, evaluate=True)
    assert_near({**run.server["phi"], **run.server["h"]}, fedavg.server["w"])
    assert_same_scores(records, expected, ["pre", "post"])


def test_bodies_stay_with_their_clients():
    task = make_task(RAGGED)
    run, _ = run_rounds(method("lg-fedavg"), task)
    assert run.server.keys() == {"h"}
    assert not is_near(client_state(run, "phi", 1), client_state(run, "phi", 2), 1e-5)


@pytest.mark.parametrize("plan", [Plan("stacked", "traced", chunk=5, shrink=0), EAGER], ids=plan_id)
def test_lg_fedavg_goes_from_pretraining_to_private_bodies_when_stacked(plan):
    task = make_task(RAGGED, participation=0.5)
    assert_same(method("lg-fedavg", pretrain_rounds=2), task, plan, 1e-9, rounds=5)


def test_after_pretraining_whole_models_are_sent_down_once_more_and_heads_come_up():
    """Numbers of the small net, in float64: body 6*8 + 8 = 56, head 8*4 + 4 = 36."""
    whole, head, m = (56 + 36) * 8, 36 * 8, len(RAGGED)
    _, records = run_rounds(method("lg-fedavg", pretrain_rounds=1), make_task(RAGGED), rounds=2)
    assert [(r.bytes_down, r.bytes_up) for r in records] == [(m * whole, m * whole), (m * whole, m * head)]
