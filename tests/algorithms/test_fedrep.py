"""FedRep: epochs of the body, and a second implementation. Models of a single layer are in test_fedper.py."""

import pytest
from helpers import RAGGED, client_state, make_task, method, run_rounds
from oracles import assert_near, average, full_batch_run, part


def test_fedrep_without_body_epochs_leaves_the_body():
    task = make_task(RAGGED)
    run, _ = run_rounds(method("fedrep", body_epochs=0), task)
    assert_near(run.server["phi"], task.body(task.init(run.key)))


@pytest.mark.parametrize("weights", ["samples", "clients"])
def test_fedrep_against_plain_pytorch(weights):
    run, plain = full_batch_run(method("fedrep", head_epochs=3, body_epochs=2, average=weights))
    models = [plain.initial] * len(plain.sizes)
    for _ in range(3):
        trained = []
        for i in plain.clients:
            model = plain.fit(models[i], plain.train[i], epochs=3, only="head.")
            trained.append(plain.fit(model, plain.train[i], epochs=2, only="first."))
        body = part(average(trained, plain.sizes if weights == "samples" else [1] * 4), "first.")
        models = [{**model, **body} for model in trained]
        run.advance(evaluate=False)
    assert_near(run.server["phi"], body)
    for i, model in enumerate(models):
        assert_near(client_state(run, "h", i), part(model, "head."))
