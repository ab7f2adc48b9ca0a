"""Per-FedAvg: a step by hand, pairs of batches, small clients, adaptation, and a second implementation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import EAGER, client_info, make_task, method, run_rounds, running_statistics
from oracles import (
    assert_equal,
    assert_finite,
    assert_near,
    assert_scores,
    average,
    formula_task,
    full_batch_run,
    gradient,
    numbers,
    plus,
)
from sentences import user_error

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.algorithm import Batch, Phase
from fedloom.engine import batching
from fedloom.studies.build import check


def test_per_fedavg_step():
    """F = (w - 1)^2 / 2 at 0 with a = b = 0.1: w' = 0.1, its gradient is -0.9, so w = 0.09. With a = 0.5: w' = 0.5 and
    w = 0.05."""
    task = formula_task(lambda w: {"p": w["p"] - 1}, lr=0.1)
    pair = SimpleNamespace(part=lambda j: None)
    for a, expected in ((None, 0.09), (0.5, 0.05)):
        work = method("per-fedavg", inner_lr=a).step(task, {"w": task.slot(numbers(p=0))}, pair, {}, client_info())
        assert_near(work["w"].params, numbers(p=expected))


def pairs(task, i, t, epochs=1, seed=3):
    """The samples of client i in round t, pair by pair, in the order that the engine draws."""
    phase = Phase(lambda *a: None, group=2, halve=True)
    table = batching.build(task, phase, seed, np.array([i]), t, np.array([epochs]))
    for batch in table.batches(task, 0):
        yield [(batch.x[j][batch.mask[j] > 0], batch.y[j][batch.mask[j] > 0]) for j in (0, 1)]


def test_per_fedavg_against_plain_pytorch():
    """45 samples in batches of 10 are two pairs and 5 that wait for another epoch; 7 are halves of 4 and 3; one alone
    is none."""
    alg, sizes = method("per-fedavg", inner_lr=0.2, allow_small=True), (45, 7, 1, 20)
    run, plain = full_batch_run(alg, sizes, EAGER, momentum=0.0, batch_size=10)
    w, task, seen = plain.initial, run.task, []
    for t in range(3):
        ends = []
        for i in plain.clients:
            v = w
            for first, second in pairs(task, i, t, task.epochs, run.seed):
                seen.append((i, len(first[1]), len(second[1])))
                ahead = plus(v, gradient(v, first), -0.2)
                v = plus(v, plus(gradient(ahead, second), v, task.weight_decay), -task.lr)
            ends.append(v)
        w = average(ends, sizes)
        run.advance(evaluate=False)
    assert seen[:7] == [(0, 10, 10)] * 4 + [(1, 4, 3)] * 2 + [(3, 10, 10)]
    assert_near(run.server["w"], w)


def test_per_fedavg_is_scored_after_one_plain_step():
    """On one batch, here of all samples, without weight decay and momentum; the copy is thrown away."""
    run, plain = full_batch_run(method("per-fedavg", inner_lr=0.4, allow_small=True), (5, 9, 4, 7), EAGER)
    for _ in range(3):
        scores = run.advance().scores
    w = {k: v.clone() for k, v in run.server["w"].items()}
    adapted = [plus(w, gradient(w, plain.train[i]), -0.4) for i in plain.clients]
    assert_scores(scores["pre"]["test"], adapted, plain.test)
    assert_scores(scores["global"]["test"], [w] * 4, plain.test)
    run.evaluate()
    assert_equal(run.server["w"], w)


def test_per_fedavg_trains_once_per_round_on_whole_pairs():
    """floor(n / 20) pairs of batches of 10 in each of 3 epochs."""
    task = make_task((20, 39, 40, 65, 19), epochs=3)
    (phase,) = method("per-fedavg").phases(task)
    table = batching.build(task, phase, 0, np.arange(5), 0, np.full(5, phase.epochs))
    assert table.steps.tolist() == [3, 3, 6, 9, 0]


def test_per_fedavg_without_an_inner_step_is_sgd_on_the_second_batches():
    task = make_task((40, 25, 60))
    run, records = run_rounds(method("per-fedavg", inner_lr=0.0), task, rounds=1, evaluate=True)

    class Second(FedAvg):
        def phases(self, task):
            return [Phase(self.second, task.epochs, group=2)]

        def second(self, task, work, batch, down, info):
            return super().step(task, work, batch.part(1), down, info)

    assert_near(run.server["w"], run_rounds(Second(), task, rounds=1)[0].server["w"])
    np.testing.assert_allclose(records[0].scores["pre"]["test"], records[0].scores["global"]["test"])


def test_per_fedavgs_adaptation_takes_another_batch_at_every_evaluation():
    run, _ = run_rounds(method("per-fedavg"), make_task((40, 25, 60)), rounds=1)
    first, again = run.evaluate()[0]["pre"]["test"], run.evaluate()[0]["pre"]["test"]
    run.t += 1
    later = run.evaluate()[0]["pre"]["test"]
    assert np.array_equal(first, again)
    assert not np.allclose(first[:, 1], later[:, 1])


def test_the_two_batches_of_a_pair_have_different_random_keys():
    key = torch.tensor(5)
    batch = Batch(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), key, key, key, key)
    assert len({int(batch.key), int(batch.part(0).key), int(batch.part(1).key)}) == 3


def test_per_fedavg_refuses_clients_with_less_than_two_batches_unless_they_may_be_halved():
    task = make_task((30, 19))
    with user_error("per-fedavg", "20 training samples", "one client has 19", "allow_small=true"):
        check(method("per-fedavg"), task)
    check(method("per-fedavg", allow_small=True), task)
    check(method("per-fedavg"), make_task((30, 20)))


@pytest.mark.parametrize("norm", [False, True])
def test_the_smallest_clients_take_part_in_per_fedavg_as_far_as_they_can(norm):
    """Two halves of one sample each are enough, but BatchNorm needs two in each."""
    task = make_task((1, 2, 3, 4, 20), norm=norm)
    alg = method("per-fedavg", allow_small=True)
    (phase,) = alg.phases(task)
    table = batching.build(task, phase, 0, np.arange(5), 0, np.ones(5, int))
    assert table.steps.tolist() == ([0, 0, 0, 1, 1] if norm else [0, 1, 1, 1, 1])
    run, records = run_rounds(alg, task, evaluate=True)
    assert_finite(run)
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()


def test_no_group_is_split_into_batches_without_samples():
    """4 samples over 3 batches would be 2, 2 and 0; batches of one sample are none under BatchNorm."""
    phase = Phase(lambda *a: None, group=3, halve=True)
    assert batching.batches_per_epoch(make_task((9,)), phase, np.array([3, 4, 5, 6])).tolist() == [1, 0, 1, 1]
    for halve in (False, True):
        phase = Phase(lambda *a: None, group=2, halve=halve)
        n = np.array([1, 3, 4])
        assert batching.batches_per_epoch(make_task((9,), batch_size=1), phase, n).tolist() == [0, 1, 2]
        assert batching.batches_per_epoch(make_task((9,), batch_size=1, norm=True), phase, n).tolist() == [0, 0, 0]


def test_both_batches_of_a_pair_count_for_the_running_statistics():
    """With a vanishing learning rate: after batches with means m1 and m2 it is 0.9 * 0.1 m1 + 0.1 m2."""
    task = make_task((20, 23), norm=True, lr=1e-14)
    run, _ = run_rounds(method("per-fedavg"), task, rounds=1)
    w = task.init(run.key)
    for i in range(2):
        (pair,) = pairs(task, i, 0)
        m1, m2 = (F.linear(x, w["first.weight"], w["first.bias"]).mean(0) for x, _ in pair)
        found = running_statistics(run, "w", i)["norm.running_mean"]
        torch.testing.assert_close(found, 0.09 * m1 + 0.1 * m2)
