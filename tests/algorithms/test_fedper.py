"""FedPer: who starts from which head and body, models of a single layer, and a second implementation."""

import pytest
from helpers import RAGGED, client_state, logreg_task, make_task, method, run_rounds
from oracles import assert_near, average, full_batch_run, is_near, part

from fedloom.core.errors import UserError
from fedloom.studies.build import check


def test_a_late_first_participation_starts_from_the_initial_head_and_the_newest_body():
    task = make_task(RAGGED)
    run, _ = run_rounds(method("fedper"), task, cohorts=[(1, 4)] * 3)
    assert_near(client_state(run, "h", 0), task.head(task.init(run.key)))
    assert not is_near(run.server["phi"], task.body(task.init(run.key)))


def test_a_model_of_a_single_layer_has_no_body_to_share():
    task = logreg_task(RAGGED, dim=6, classes=4)
    for name in ("fedper", "fedrep"):
        with pytest.raises(UserError, match="allow_degenerate=true"):
            check(method(name), task)
    degenerate = method("fedper", allow_degenerate=True)
    check(degenerate, task)
    run, _ = run_rounds(degenerate, task)
    local, _ = run_rounds(method("local"), task)
    assert_near(client_state(run, "h"), client_state(local, "theta"))


def test_fedper_against_plain_pytorch():
    run, plain = full_batch_run(method("fedper"))
    models = [plain.initial] * len(plain.sizes)
    for _ in range(3):
        trained = [plain.fit(models[i], plain.train[i]) for i in plain.clients]
        body = part(average(trained, plain.sizes), "first.")
        models = [{**model, **body} for model in trained]
        run.advance(evaluate=False)
    assert_near(run.server["phi"], body)
    for i, model in enumerate(models):
        assert_near(client_state(run, "h", i), part(model, "head."))
