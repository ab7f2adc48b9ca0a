"""Every method on text: one class for a whole sequence of tokens, and one for every position of it. A round is the same
stacked as client by client, or the method refuses the task in one sentence."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import assert_same, method, methods
from sentences import user_error
from torch import nn

from fedloom.core.errors import UserError
from fedloom.core.federation import Federation, Ragged
from fedloom.core.task import Task
from fedloom.engine.plan import Plan
from fedloom.nn.network import Network
from fedloom.studies.build import check

WORDS, LENGTH, TOPICS = 7, 5, 3
SIZES = (22, 9, 14)


class TokenNet(nn.Module):
    """Logits at every position, or of the mean over positions."""

    def __init__(self, outputs, per_position):
        super().__init__()
        self.words = nn.Embedding(WORDS, 6, padding_idx=0)
        self.head = nn.Linear(6, outputs)
        self.per_position = per_position

    def forward(self, x):
        found = torch.tanh(self.words(x))
        return self.head(found if self.per_position else found.mean(1))


def token_task(per_position):
    """Three clients and a server; sequences of 1 to 5 tokens, padded with 0, their labels with -1."""
    draw = np.random.default_rng(0)
    held_out, server = 2 * len(SIZES), 8
    total = sum(SIZES) + held_out + server
    padding = np.arange(LENGTH) >= draw.integers(1, LENGTH + 1, (total, 1))
    x = np.where(padding, 0, draw.integers(1, WORDS, (total, LENGTH)))
    if per_position:
        y = np.where(padding, -1, draw.integers(0, WORDS, (total, LENGTH)))
    else:
        y = draw.integers(0, TOPICS, total)
    lists = [np.arange(a, b) for a, b in pairwise(np.cumsum([0, *SIZES]))]
    rest = np.arange(sum(SIZES), sum(SIZES) + held_out).reshape(2, -1, 1)
    classes = WORDS if per_position else TOPICS
    data = Federation(
        torch.from_numpy(x),
        torch.from_numpy(y),
        classes,
        {"train": Ragged.of(lists), "val": Ragged.of(list(rest[0])), "test": Ragged.of(list(rest[1]))},
        server=torch.arange(total - server, total),
        dtype=torch.float64,
        vocab=WORDS,
        unscored=(2, 3) if per_position else (),
    )
    network = Network(lambda: TokenNet(classes, per_position), "head", data.x[:2], torch.float64)
    return Task(data, network, lr=0.1, batch_size=5, rounds=2)


@pytest.mark.parametrize("per_position", [True, False], ids=["next-token", "text"])
@pytest.mark.parametrize("name", methods())
def test_every_method_gives_the_same_on_text_stacked_as_client_by_client_or_refuses(name, per_position):
    alg, task = method(name), token_task(per_position)
    try:
        check(alg, task)
    except UserError as error:
        with user_error(name):
            raise error
        return
    run = assert_same(alg, task, Plan("stacked", "eager", chunk=2), 1e-9, rounds=1)
    assert run.t == 1
