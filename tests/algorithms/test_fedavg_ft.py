"""FedAvg-FT: what is fine-tuned, FedAvg as a special case, and a second implementation."""

import numpy as np
from helpers import RAGGED, make_batch, make_task, method, run_rounds
from oracles import assert_equal, assert_near, assert_scores, batches, full_batch_run, is_near


def test_fedavg_ft_without_epochs_scores_as_fedavg():
    task = make_task(RAGGED)
    _, tuned = run_rounds(method("fedavg-ft", ft_epochs=0), task, evaluate=True)
    _, fedavg = run_rounds(method("fedavg"), task, evaluate=True)
    for a, b in zip(tuned, fedavg, strict=True):
        np.testing.assert_allclose(a.scores["pre"]["test"], b.scores["global"]["test"], rtol=1e-9)


def test_fedavg_ft_on_the_head_leaves_the_body():
    task = make_task(RAGGED)
    alg = method("fedavg-ft", ft_scope="head")
    work = {"w": task.slot(task.init(0))}
    batch = make_batch(*batches(task, 1, 0, epochs=1)[0])
    tuned = alg.fine_tune(task, work, batch, {}, None)["w"].params
    assert_near(task.body(tuned), task.body(work["w"].params))
    assert not is_near(task.head(tuned), task.head(work["w"].params))


def test_fedavg_ft_is_scored_after_fine_tuning_a_copy():
    run, plain = full_batch_run(method("fedavg-ft", ft_epochs=4))
    for _ in range(3):
        run.advance(evaluate=False)
    before = {k: v.clone() for k, v in run.server["w"].items()}
    scores, _ = run.evaluate()
    tuned = [plain.fit(before, plain.train[i], epochs=4) for i in plain.clients]
    assert_scores(scores["pre"]["test"], tuned, plain.test)
    assert_equal(run.server["w"], before)
