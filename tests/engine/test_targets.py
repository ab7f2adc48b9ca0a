"""Labels and numbers as targets: every method that can predict them gives the same on every executor."""

import pytest
import torch
from helpers import (
    PER_CLIENT,
    RAGGED,
    SingleRun,
    assert_same,
    make_federation,
    make_task,
    method,
    methods,
    with_targets,
)

from fedloom.core.algorithm import ALGORITHMS
from fedloom.engine.plan import Plan

PAIRS = [(name, kind) for name in methods() for kind in ("labels", "number") if kind in ALGORITHMS[name].targets]


def task_for(name, kind, **settings):
    """A task with such targets that the method can run."""
    alg = method(name)
    least = alg.min_samples(make_task(RAGGED))
    data = with_targets(make_federation([max(n, least) for n in RAGGED], server=20), kind)
    return alg, make_task((), federation=data, lr=0.05, **settings)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_stacked_equals_reference(name, kind):
    alg, task = task_for(name, kind, class_weights=kind == "labels", epochs=2)
    assert_same(alg, task, Plan("stacked", "eager", chunk=7), 1e-9, rounds=2)  # test_parity has traced steps


def test_methods_that_need_classes():
    """Prototypes, embeddings and frequencies are of classes; agents see accuracies, which numbers have not."""
    assert {name for name in methods() if "labels" not in ALGORITHMS[name].targets} == {"fedproto", "fedrod", "gpfl"}
    without = {name for name in methods() if "number" not in ALGORITHMS[name].targets}
    assert without == {"fedproto", "fedrod", "gpfl", "page", "dap-fl"}


@pytest.mark.parametrize("plan", [PER_CLIENT, Plan("stacked", "traced", chunk=7)])
def test_scores_of_numbers_have_squared_errors_in_their_unit(plan):
    """With targets of standard deviation 2, the squared error is 4 times the loss."""
    alg, task = task_for("fedavg", "number")
    run = SingleRun(alg, task, 3, plan=plan)
    scores = run.advance(evaluate=True).scores["pre"]["test"]
    torch.testing.assert_close(torch.tensor(scores[:, 0]), 4 * torch.tensor(scores[:, 1]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_captured_graphs_equal_the_reference_on_a_gpu(name, kind):
    alg, task = task_for(name, kind, device="cuda", class_weights=kind == "labels", norm=True)
    assert_same(alg, task, Plan("stacked", "captured", chunk=7), 1e-9)
