"""Runs at Ray actors give what a run in one process gives, and the same bytes for any number of actors."""

import numpy as np
import pytest
import torch
from actors import algorithm, everything, ordinary_run, sharded_run, task_for
from helpers import methods

from fedloom.core.tree import tree_flatten

ROUNDS, TOLERANCE = 3, 1e-9  # as in tests/engine/test_parity.py


def assert_close(found, expected):
    """State of server and clients, and scores of all views."""
    for a, b in ((expected.server, found.server), (expected.store.everyone(), found.store.everyone())):
        (flat_a, spec_a), (flat_b, spec_b) = tree_flatten(a), tree_flatten(b)
        assert spec_a == spec_b
        for x, y in zip(flat_a, flat_b, strict=True):
            torch.testing.assert_close(y, x, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", methods())
def test_every_method_gives_the_same_at_one_two_and_three_actors(name, actors):
    """With BatchNorm, dropout, and some of the clients in a round where the method allows it."""
    alg = algorithm(name)
    task = task_for(alg, norm=True, dropout=0.2)
    expected = ordinary_run(alg, task)
    records = [expected.advance() for _ in range(ROUNDS)]
    same = None
    for count in (1, 2, 3):
        run = sharded_run(alg, task, actors(count))
        rounds = [run.advance() for _ in range(ROUNDS)]
        same = same or everything(run, rounds)
        assert everything(run, rounds) == same, f"{count} actors"
        assert_close(run, expected)
        for a, b in zip(records, rounds, strict=True):
            assert (a.bytes_up, a.bytes_down, a.cohort.tolist()) == (b.bytes_up, b.bytes_down, b.cohort.tolist())
            for view in a.scores:
                for split in a.scores[view]:
                    np.testing.assert_allclose(b.scores[view][split], a.scores[view][split], rtol=1e-6, atol=1e-6)
