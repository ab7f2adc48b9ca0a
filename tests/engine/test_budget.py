"""What clients compute is counted as a reader of the papers would count it, and alike by every executor."""

import numpy as np
import pytest
from helpers import make_task, methods

from fedloom.core.algorithm import ALGORITHMS
from fedloom.engine.budget import expected_computation
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation

SIZES = (7, 23, 40, 12)  # 1, 3, 4 and 2 batches of 10
STEPS, SAMPLES = 2.5, 20.5  # in an epoch, on average
WEIGHTS = {"first": 6 * 8 + 8, "head": 8 * 4 + 4}  # of SmallNet
HEAD, BODY = (WEIGHTS[name] / sum(WEIGHTS.values()) for name in ("head", "first"))
CHOOSES = {"page", "dap-fl", "fedala", "partialfed"}  # how long clients train depends on what they compute


def simulation(name, **settings):
    settings = {"data": {"server": 12}, **settings}
    return Simulation(ALGORITHMS[name](), make_task(SIZES, **settings), seed=0)


def expected(name, **settings):
    run = simulation(name, **settings)
    return expected_computation(run.alg, run.task, run.first_cohort())


@pytest.mark.parametrize(
    ("name", "epochs", "samples"),
    [
        ("fedavg", 1, 1),
        ("local", 1, 1),
        ("fedprox", 1, 1),
        ("scaffold", 1, 1),
        ("gpfl", 1, 1),
        ("moon", 1, 1),  # two further models predict, but nothing is differentiated
        ("ditto", 2, 2),  # personal and global model
        ("fml", 2, 2),
        ("fedsam", 2, 2),  # sharpness-aware minimization counts twice
        ("plgu-lf", 2, 2),
        ("fedrep", 2, HEAD + BODY),  # an epoch of the head, one of the body
        ("fedbabu", 1, BODY),  # the head never trains
        ("plgu-grep", 5 + 3, 5 * HEAD + 3 * BODY),  # five epochs of the head; three gradients in an epoch of the body
        ("pfedme", 5, 5),  # five steps on every batch
        ("mapper", 4, 4),  # three candidate models at once, then one
    ],
)
def test_gradients_and_samples_of_a_round(name, epochs, samples):
    found = expected(name)
    assert found.gradients == pytest.approx(epochs * STEPS)
    assert found.samples == pytest.approx(samples * SAMPLES)
    assert found.exact


def test_pairs_of_batches_are_counted_once():
    """Per-FedAvg takes two gradients in a step, each of one of two batches of 10: a client with 40 samples makes two
    steps, the one with 23 makes one, and the others have too few samples."""
    found = expected("per-fedavg")
    assert found.gradients == 2 * (1 + 2) / 4
    assert found.samples == (20 + 40) / 4


def test_more_epochs_and_larger_batches():
    assert expected("fedavg", epochs=3).samples == 3 * SAMPLES
    assert expected("fedavg", epochs=3).gradients == 3 * STEPS
    assert expected("fedavg", batch_size=100)[:2] == (1, SAMPLES)


@pytest.mark.parametrize("name", methods())
def test_what_is_expected_is_what_executors_count(name):
    """In every round, for every method that does not choose its epochs; for the others, executors agree."""
    foreseen = expected(name)
    assert foreseen.exact == (name not in CHOOSES)
    counts = []
    for plan in (REFERENCE, "stacked-eager"):
        group = RunGroup([simulation(name)], plan)
        rounds = [done for _ in range(2) for done in group.advance(evaluate=False)]
        counts.append([(done.gradients, done.samples) for done in rounds])
        assert {done.participation for done in rounds} == {1.0}
    np.testing.assert_allclose(counts[0], counts[1], rtol=1e-12)
    if foreseen.exact:
        np.testing.assert_allclose(counts[0], [foreseen[:2]] * 2, rtol=1e-12)


def test_only_clients_that_take_part_are_counted():
    run = simulation("fedavg", participation=0.5)
    done = RunGroup([run], REFERENCE).advance(evaluate=False, cohort=np.array([0, 2]))[0]
    assert (done.participation, done.gradients, done.samples) == (0.5, (1 + 4) / 2, (7 + 40) / 2)
