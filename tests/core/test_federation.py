"""Whose samples are whose, counted and joined without a loop over clients."""

import numpy as np
import pytest
import torch
from helpers import RAGGED, make_federation, token_task

from fedloom.core import federation
from fedloom.core.federation import Ragged


@pytest.mark.parametrize("kept", [True, False], ids=["table", "each time"])
@pytest.mark.parametrize("data", [make_federation(RAGGED), token_task().data], ids=["classes", "positions"])
def test_labels_are_counted_per_client_and_class(data, kept, monkeypatch):
    monkeypatch.setattr(federation, "MAX_CACHED_COUNTS", federation.MAX_CACHED_COUNTS if kept else 0)
    ids = np.array([2, 0, 2])
    found = data.counts(ids)
    for row, i in zip(found, ids, strict=True):
        labels = data.y[data.splits["train"][int(i)]].flatten()
        assert row.tolist() == torch.bincount(labels[labels >= 0], minlength=data.classes).tolist()


def test_lists_are_joined_in_the_order_of_the_clients():
    lists = Ragged.of([np.array([7, 3]), np.zeros(0), np.array([1]), np.array([4, 4, 9])])
    assert lists.joined(np.array([3, 1, 0])).tolist() == [4, 4, 9, 7, 3]
    assert lists.joined(np.array([1])).tolist() == lists.joined(np.zeros(0, np.int64)).tolist() == []


def test_pixels_are_normalised_by_channel():
    x = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)[:, :, None, None]
    data = federation.Federation(x, torch.zeros(2), 1, {}, mean=(0.5, 0.2), std=(0.5, 0.4), dtype=torch.float64)
    expected = torch.tensor([[-1, 2], [-0.6, 0.5]], dtype=torch.float64)[:, :, None, None]
    torch.testing.assert_close(data.prepare(x), expected)
    assert data.to(torch.device("cpu"), torch.float32).prepare(x).dtype == torch.float32
