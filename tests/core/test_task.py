"""Scores of sequences: what counts, and what does not."""

import math

import pytest
import torch
from helpers import make_federation

from fedloom.core.algorithm import Batch, Output
from fedloom.core.federation import Federation, Ragged
from fedloom.core.task import Task
from fedloom.nn.network import Network


def score(logits, y, mask, unscored=()):
    logits, y = torch.tensor(logits, dtype=torch.float64), torch.tensor(y)
    rows = Ragged.of([[0]])
    data = Federation(
        torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), logits.shape[-1],
        {"train": rows, "val": rows, "test": rows}, dtype=torch.float64, unscored=unscored,
    )  # fmt: skip
    network = Network(lambda: torch.nn.Sequential(torch.nn.Linear(2, logits.shape[-1])), "0", data.x, torch.float64)
    return Task(data, network).score(logits, y, torch.tensor(mask, dtype=torch.float64)).tolist()


HALVES = [math.log(2), math.log(1), math.log(1)]  # softmax: 1/2, 1/4, 1/4; the guess is class 0


@pytest.mark.parametrize(
    ("unscored", "expected"),
    [
        # positions 0 right (log 2), 1 and 2 wrong (log 4 each), padding
        ((), [1, 5 * math.log(2), 3]),
        ((2,), [1, 3 * math.log(2), 2]),  # without the last target
        ((0,), [0, 4 * math.log(2), 2]),  # without the right one: the other two are wrong
        ((1, 2), [1, math.log(2), 1]),
        ((0, 1, 2), [0, 0, 0]),
    ],
    ids=str,
)
def test_unscored_targets_count_neither_in_accuracy_nor_in_loss(unscored, expected):
    found = score([[HALVES] * 4, [HALVES] * 4], [[0, 1, 2, -1], [0, 0, 0, 0]], [1, 0], unscored)
    assert found[0] == pytest.approx(expected, rel=1e-12)
    assert found[1] == [0, 0, 0]  # masked


def test_unscored_targets_of_whole_samples_do_not_count_either():
    found = score([HALVES] * 3, [0, 1, 2], [1, 1, 1], (1,))
    assert found == [
        pytest.approx([1, math.log(2), 1]),
        [0, 0, 0],
        pytest.approx([0, 2 * math.log(2), 1]),
    ]


def test_unscored_targets_are_learnt():
    plain = make_federation((4,))
    data = Federation(plain.x, plain.y, 4, plain.splits, dtype=torch.float64, unscored=(0, 1))
    task = Task(data, Network(lambda: torch.nn.Sequential(torch.nn.Linear(6, 4)), "0", data.x, torch.float64))
    none = torch.zeros(0)
    batch = Batch(data.x[:1], torch.tensor([[0, 1, 2, -1]]), torch.ones(1), none, none, none, none)
    out = Output(torch.zeros(1, 4, 4, dtype=torch.float64), none, {})
    assert task.loss(out, batch).item() == pytest.approx(math.log(4))  # of three positions, not of one
    out.logits[0, :2, 3] = 50.0  # far from the targets of the first two: 50 each, the third has log 4
    assert task.loss(out, batch).item() == pytest.approx((50 + 50 + math.log(4)) / 3)


def test_the_fingerprint_of_data_tells_what_is_scored():
    plain = make_federation((4,))
    other = Federation(plain.x, plain.y, 4, plain.splits, dtype=torch.float64, unscored=(1,))
    assert plain.fingerprint() != other.fingerprint()
