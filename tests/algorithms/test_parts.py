"""Parts that several methods use: losses that are compared, samples that are held out, Adam."""

import math
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_batch, make_task, tensor
from oracles import score, stack

from fedloom.algorithms.parts import adam
from fedloom.algorithms.parts.holdout import divided
from fedloom.algorithms.parts.measuring import smallest, tally, tally_each
from fedloom.core.algorithm import Draw
from fedloom.core.autodiff import vmap
from fedloom.core.targets import Classes
from fedloom.core.task import Task


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((3, 1, 2), 1),
        ((2, 1, 1), 1),
        ((1, 1, 1), 0),
        ((math.nan, 5, 4), 2),
        ((math.inf, 5), 1),
        ((math.nan, math.inf), 0),
        ((math.nan, math.nan), 0),
    ],
)
def test_the_smallest_loss_is_the_first_of_equals_and_never_that_of_a_model_that_diverged(losses, expected):
    assert int(smallest(tensor(losses))) == expected
    assert vmap(smallest)(tensor(losses).expand(2, -1)).tolist() == [expected] * 2


def test_a_tally_counts_samples_and_not_padding():
    """Of three rows the last is padding. Two models at once give what each gives alone."""
    task = make_task((3, 17, 8, 11))
    w, x, y = task.init(1), task.data.x[:3], task.data.y[:3]
    expected = score(w, (x[:2], y[:2]))
    batch = make_batch(x, y, mask=(1, 1, 0))
    assert tally(task, task.slot(w), batch).tolist() == pytest.approx(expected)
    both = stack(task.init(2), w)
    assert tally_each(task, task.slot(task.init(3)), both, batch)[1].tolist() == pytest.approx(expected)


def test_a_tally_of_sequences_counts_positions():
    """Logits 0 for four classes: a loss of ln 4 for each of the three positions that are there."""
    logits = torch.zeros(3, 2, 4, dtype=torch.float64)
    data = SimpleNamespace(unscored=(), targets=Classes())
    task = SimpleNamespace(predict=lambda *_: SimpleNamespace(logits=logits), data=data)
    task.score = lambda *args: Task.score(task, *args)
    task.losses = lambda *args: Task.losses(task, *args)
    batch = make_batch(None, torch.tensor([[0, -1], [2, 0], [0, 0]]), mask=(1, 1, 0))
    assert tally(task, None, batch).tolist() == pytest.approx([2, 3 * math.log(4), 3])


@pytest.mark.parametrize(
    ("share", "n", "train", "held_out"),
    [
        (0.2, 1, 1, 0),
        (0.2, 2, 1, 1),
        (0.2, 3, 2, 1),
        (0.2, 5, 4, 1),
        (0.2, 35, 28, 7),
        (0.9, 20, 2, 18),
        (0.9, 2, 1, 1),
    ],
)
def test_samples_are_held_out_by_the_stream_of_the_specification(share, n, train, held_out):
    """(1 - 0.9) * 20 is 2, whatever floating point makes of it; one sample is trained on."""
    for t in (0, 7):
        first, rest = (select(n, Draw(3, 11, t)) for select in divided(share, "fomo"))
        assert (len(first), len(rest)) == (train, held_out)
        expected = np.random.default_rng([3, zlib.crc32(b"fomo"), 11]).permutation(n)
        assert [*first, *rest] == expected.tolist()


def test_adam_is_that_of_pytorch():
    p = tensor([[1.0, -2.0], [0.5, 3.0]])
    reference = p.clone().requires_grad_()
    opt = torch.optim.Adam([reference], lr=0.01)
    state = adam.start(p)
    for k in range(5):
        g = torch.sin(p * (k + 1))
        p, state = adam.step(p, g, state, torch.tensor(k + 1), 0.01)
        reference.grad = torch.sin(reference.detach() * (k + 1))
        opt.step()
        torch.testing.assert_close(p, reference.detach(), rtol=1e-12, atol=0)
