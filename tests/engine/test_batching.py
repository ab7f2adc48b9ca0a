"""Which samples are visited when, and with which keys."""

import itertools

import numpy as np
import pytest
import torch
from helpers import RAGGED, make_task

from fedloom.core.algorithm import Phase
from fedloom.engine import batching

PHASE = Phase(lambda *args: None)
EVERYONE = np.arange(len(RAGGED))


def build(task, ids=EVERYONE, t=0, epochs=2, phase=PHASE, seed=0, first_epoch=0):
    return batching.build(task, phase, seed, ids, t, np.full(len(ids), epochs), first_epoch)


def visits(schedule, task, client):
    return [batch.x[:, 0].tolist() for batch in schedule.batches(task, client)]


def test_an_epoch_is_a_permutation_cut_into_batches_whose_last_may_be_short():
    task = make_task(RAGGED)
    schedule = build(task)
    for i, n in enumerate(RAGGED):
        batches = visits(schedule, task, i)
        per_epoch = -(-n // 10)
        assert len(batches) == 2 * per_epoch
        mine = sorted(task.data.x[task.data.splits["train"][i], 0].tolist())
        for epoch in (batches[:per_epoch], batches[per_epoch:]):
            assert [len(b) for b in epoch] == [10] * (n // 10) + ([n % 10] if n % 10 else [])
            assert sorted(itertools.chain(*epoch)) == mine


def test_orders_differ_between_epochs_rounds_and_seeds_but_not_between_phases_or_cohorts():
    task = make_task(RAGGED)
    first = visits(build(task), task, 1)
    per_epoch = len(first) // 2
    assert first[:per_epoch] != first[per_epoch:]
    assert visits(build(task, t=1), task, 1) != first
    assert visits(build(task, seed=1), task, 1) != first
    assert visits(build(task, phase=Phase(lambda *args: 1)), task, 1) == first
    assert visits(build(task, ids=np.array([4, 1])), task, 1) == first
    assert visits(build(task, epochs=1, first_epoch=1), task, 1) == first[per_epoch:]


def test_no_two_steps_share_a_noise_key():
    task = make_task(RAGGED)
    keys = [int(b.key) for t in range(2) for i in EVERYONE for b in build(task, t=t).batches(task, i)]
    assert len(set(keys)) == len(keys)


def test_a_window_contains_the_batches_of_all_clients_padded():
    task = make_task(RAGGED)
    schedule = build(task)
    window = schedule.window(task, EVERYONE, 0, int(schedule.steps.max()))
    for i in EVERYONE:
        for k, batch in enumerate(schedule.batches(task, i)):
            n = len(batch.y)
            assert torch.equal(task.data.y[window.rows[k, i, :n]], batch.y)
            assert window.mask[k, i].tolist() == [1.0] * n + [0.0] * (10 - n)
            assert (int(window.key[k, i]), int(window.epoch[k, i])) == (int(batch.key), int(batch.epoch))
        beyond = window.mask[int(schedule.steps[i]) :, i]
        assert not beyond.any()


@pytest.mark.parametrize("phase", [PHASE, Phase(lambda *args: None, group=2, halve=True)])
def test_a_window_is_the_same_from_arrays_and_from_tensors(phase):
    """It is computed by NumPy on the host, or by tensor operations on a GPU."""
    task = make_task(RAGGED)
    schedule = build(task, phase=phase, first_epoch=1)
    last = int(schedule.steps.max())
    found = schedule.window(task, EVERYONE, 3, last, lambda name, f, *args: f(*args))
    for mine, other in zip(found, schedule.window(task, EVERYONE, 3, last), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


def test_a_fixed_number_of_steps_runs_on_into_further_epochs():
    task = make_task((23, 4))
    schedule = build(task, ids=np.arange(2), phase=Phase(lambda *args: None, steps=5))
    assert schedule.steps.tolist() == [5, 5]
    assert [len(b) for b in visits(schedule, task, 0)] == [10, 10, 3, 10, 10]
    assert [len(b) for b in visits(schedule, task, 1)] == [4] * 5


def test_groups_are_whole_or_halved():
    """45 samples in pairs of 10: two pairs, 5 samples dropped. 7 samples: one pair of 4 and 3."""
    task = make_task((45, 7))
    schedule = build(task, ids=np.arange(2), epochs=1, phase=Phase(lambda *args: None, group=2, halve=True))
    large, small = (list(schedule.batches(task, i)) for i in range(2))
    assert [tuple(b.y.shape) for b in large] == [(2, 10), (2, 10)]
    assert len(small) == 1
    assert small[0].mask.sum(1).tolist() == [4.0, 3.0]
    strict = build(task, ids=np.arange(2), epochs=1, phase=Phase(lambda *args: None, group=2))
    assert strict.steps.tolist() == [2, 0]


def test_without_shuffling_samples_come_in_their_order():
    task = make_task((23,))
    schedule = build(task, ids=np.arange(1), epochs=1, phase=Phase(lambda *args: None, shuffle=False))
    assert list(itertools.chain(*visits(schedule, task, 0))) == task.data.x[task.data.splits["train"][0], 0].tolist()
