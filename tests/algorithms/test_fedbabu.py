"""FedBABU: the body is trained under a frozen random head, and the head is fine-tuned for evaluation only."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import RAGGED, SingleRun, SmallNet, make_task, method
from sentences import user_error
from torch import nn

from fedloom.core.task import Task
from fedloom.core.tree import leaves
from fedloom.nn.network import Network
from fedloom.studies.build import check

SIZES = (12, 30, 5)


def fedbabu_run(rounds=2, task=None, **settings):
    run = SingleRun(method("fedbabu", **settings), task or make_task(SIZES), 3, "reference")
    return run, [run.advance() for _ in range(rounds)]


def test_the_head_is_neither_trained_nor_sent():
    run, _ = fedbabu_run()
    initial = run.task.init(run.key)
    for name, value in run.task.head(initial).items():
        assert torch.equal(run.server["h"][name], value)
        assert torch.equal(run.constants["h"][name], value)
    for name, value in run.task.body(initial).items():
        assert not torch.equal(run.server["phi"][name], value)
    outcome = run.executor.train(run.cohort(np.arange(3), 2), ())
    assert set(outcome.up) == {"phi"}
    assert set(outcome.up["phi"]) == set(run.task.network.body)
    assert outcome.client_state == {}


def test_traffic_is_that_of_the_body():
    run, records = fedbabu_run()
    size = sum(v.numel() * v.element_size() for v in leaves(run.server["phi"]))
    assert [(r.bytes_down, r.bytes_up) for r in records] == [(3 * size, 3 * size)] * 2


def test_the_body_is_that_of_plain_pytorch_with_a_frozen_head():
    """Batches of all samples, so that an epoch is one step of gradient descent and their order does not matter."""
    task = make_task(SIZES, batch_size=max(SIZES), epochs=2, momentum=0.5, weight_decay=0.01)
    run, _ = fedbabu_run(task=task)
    start, train = task.init(run.key), task.data.splits["train"]
    body = task.body(start)
    for _ in range(2):
        trained = []
        for i, n in enumerate(SIZES):
            net = SmallNet(task.data.x.shape[1], 8, task.classes).double()
            net.load_state_dict({**start, **body})
            net.head.requires_grad_(False)
            sgd = torch.optim.SGD(net.first.parameters(), task.lr, momentum=0.5, weight_decay=0.01)
            rows = train[i]
            for _ in range(2):
                sgd.zero_grad()
                F.cross_entropy(net(task.data.x[rows]), task.data.y[rows]).backward()
                sgd.step()
            trained.append((n, copy.deepcopy(net.state_dict())))
        body = {k: sum(n * w[k] for n, w in trained) / sum(SIZES) for k in body}
    torch.testing.assert_close(run.server["phi"], body, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("finetune", ["head", "full"])
def test_fine_tuning_is_that_of_plain_pytorch_and_is_forgotten(finetune):
    task = make_task(SIZES, batch_size=max(SIZES))
    run, records = fedbabu_run(1, task=task, finetune=finetune, finetune_epochs=3)
    for i in range(len(SIZES)):
        net = SmallNet(task.data.x.shape[1], 8, task.classes).double()
        net.load_state_dict({**run.server["phi"], **run.server["h"]})
        tuned = net.head if finetune == "head" else net
        sgd = torch.optim.SGD(tuned.parameters(), task.lr)
        rows, test = task.data.splits["train"][i], task.data.splits["test"][i]
        for _ in range(3):
            net.zero_grad()
            F.cross_entropy(net(task.data.x[rows]), task.data.y[rows]).backward()
            sgd.step()
        loss = F.cross_entropy(net(task.data.x[test]), task.data.y[test], reduction="sum")
        assert records[0].scores["pre"]["test"][i, 1] == pytest.approx(loss.item(), rel=1e-9)
    again, _ = fedbabu_run(1, task=task, finetune_epochs=0)
    torch.testing.assert_close(again.server, run.server, rtol=0, atol=0)


def test_without_fine_tuning_the_personal_model_is_the_global_one():
    _, records = fedbabu_run(finetune_epochs=0)
    for done in records:
        np.testing.assert_allclose(done.scores["pre"]["test"], done.scores["global"]["test"], rtol=1e-9)


def test_a_model_without_a_body_is_refused():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            return self.head(x)

    data = make_task(RAGGED).data
    with user_error("fedbabu", "single layer"):
        check(method("fedbabu"), Task(data, Network(One, "head", data.x[:2]), lr=0.1))
