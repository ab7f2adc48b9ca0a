"""Clients side by side: the same to the bit for any number of workers, and nothing is left behind by an error."""

import _thread
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import RAGGED, assert_same, make_federation, make_task, method, model_task, play
from torch import nn

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.federation import Federation, Ragged
from fedloom.core.network import Network
from fedloom.core.task import Task
from fedloom.core.tree import leaves
from fedloom.engines import choose
from fedloom.engines.plan import Plan
from fedloom.engines.rounds import Rounds
from fedloom.engines.workers import proceed, side_by_side

SINGLE = torch.float32  # convolutions of float64 take another path
CASES = {
    "cnn4": ("gpfl", "cnn4", ((1, 16, 16),), {"dtype": SINGLE}),
    "pairs of batches": ("per-fedavg", "cnn_kt", ((3, 16, 16),), {"dtype": SINGLE}),
    "BatchNorm": ("fedrep", "resnet18_bn", ((2, 16, 16),), {"options": {"width": 2}, "batch_size": 8, "dtype": SINGLE}),
    "dropout": ("ditto", "mlp3", ((6,),), {"options": {"widths": (8, 7), "dropout": 0.3}, "momentum": 0.9}),
    "LSTM": ("fedavg-ft", "lstm_shakes", ((6,),), {"vocab": 9, "options": {"width": 5, "dropout": 0.3, "padding": 0}}),
}


def everything(run, records):
    """State and scores, as bytes."""
    scores = [found[view][split] for r in records for found in [r.scores] for view in found for split in found[view]]
    return [v.numpy().tobytes() for v in leaves((run.server, run.store.everyone()))] + [s.tobytes() for s in scores]


def side(workers):
    return Plan("per-client", scoring="per-client", workers=workers)


@pytest.fixture
def busy():
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_results_are_the_same_to_the_bit_for_any_number_of_workers(case, busy):
    name, model, shape, settings = case
    task = model_task(model, *shape, sizes=(5, 2, 9, 12, 7), **settings)
    one, *others = (everything(*play(method(name), task, side(w), rounds=2)) for w in (1, 2, 3))
    assert all(found == one for found in others)


@pytest.mark.parametrize("name", ["fedala", "page", "pfedhn"])  # a condition, epochs by client, the server's turns
def test_workers_give_what_the_reference_gives(name):
    task = make_task((7, 21, 12, 5), data={"server": 20}, norm=True, dropout=0.2)
    assert_same(method(name), task, side(3), 1e-9, rounds=2)


class Keeping(nn.Module):
    """Keeps something in itself on the way, and gives way to other threads before it uses it."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scaled = lambda x: x * self.first.bias  # of whichever copy

    def forward(self, x):
        self.kept = self.first(x)
        time.sleep(1e-4)
        return self.head(torch.tanh(self.scaled(self.kept)))


def test_models_may_keep_things_in_themselves():
    data = make_federation((20, 30, 25, 30))
    task = Task(data, Network(Keeping, "head", data.x[:2], data.dtype), lr=0.1)
    one, two = (everything(*play(FedAvg(), task, side(w), rounds=2)) for w in (1, 4))
    assert one == two
    assert_same(FedAvg(), task, Plan("stacked", "eager", chunk=4), 1e-9, rounds=1)


def test_results_are_in_order_whoever_ends_first():
    ends = [threading.Event() for _ in range(4)]

    def job(j):
        if j < 3:
            assert ends[j + 1].wait(10)  # the last ends first
        ends[j].set()
        return j, torch.get_num_threads(), torch.is_grad_enabled()

    assert side_by_side(job, [2, 0, 3, 1], 4) == [(j, 1, False) for j in range(4)]


class Broken(Exception):
    pass


STEPS = []


@dataclass(frozen=True)
class Breaking(FedAvg):
    name = "test-breaking"

    def step(self, task, work, batch, down, info):
        if int(info.id) == 3:
            raise Broken("client 3")
        STEPS.append(int(info.id))
        return super().step(task, work, batch, down, info)


def test_an_error_in_a_worker_surfaces_and_stops_the_others():
    task = make_task((3000, 3000, 10, 4000), batch_size=1)
    run = Rounds(Breaking(), task, 0, plan=side(3))
    threads = torch.get_num_threads()
    with pytest.raises(Broken, match="client 3"):
        run.advance()
    assert len(STEPS) < 3000  # clients 0 and 1 had 6000 before them
    assert not [t for t in threading.enumerate() if t.name.startswith("fedloom")]
    assert torch.get_num_threads() == threads
    assert run.t == 0


def test_an_interrupt_ends_all_workers_at_once():
    seen = []

    def job(j):
        if j == 0:
            _thread.interrupt_main()
        for _ in range(5000):
            proceed()
            time.sleep(0.001)
        seen.append(j)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(job, range(6), 2)
    assert not seen
    assert not [t for t in threading.enumerate() if t.name.startswith("fedloom")]


def test_workers_are_chosen_where_they_pay_and_the_plan_says_so(monkeypatch):
    task, seconds = make_task(RAGGED, rounds=1000), {}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(
        choose, "_measure_per_client", lambda *a: choose.Option(side(w := a[5] if a[5:] else 0), None, seconds[w])
    )
    for seconds[0], seconds[4], workers in ((1.0, 0.5, 4), (1.0, 0.95, 0), (1.0, 2.0, 0)):
        plan = Rounds(method("fedavg"), task, 0, plan="per-client").plan
        assert (plan.mode, plan.workers, plan.threads) == ("per-client", workers, 4)


def test_the_time_of_workers_is_that_of_the_one_with_most_steps():
    steps = np.array([3, 5, 3, 4, 3])  # 5 + 3 beside 4 + 3 + 3
    assert [choose._longest(steps, w) for w in (1, 2, 5, 9)] == [18, 10, 5, 5]
    task = make_task(RAGGED)
    cohort = Rounds(method("fedrep"), task, 0, plan=side(0))._cohort(np.arange(len(RAGGED)), 0)
    assert choose._measure_per_client(method("fedrep"), task, 0, cohort, 12, 2).seconds > 0


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_lie_channels_last_for_one_model_on_a_cpu(channels, lead):
    x = torch.randint(0, 256, (9, channels, 4, 6), dtype=torch.uint8)
    one = Ragged.of([np.arange(9)])
    data = Federation(x, torch.zeros(9, dtype=torch.int64), 1, {"train": one}, shift=(0.4,) * channels)
    rows = torch.randint(0, 9, lead)
    found = data.samples(rows)
    torch.testing.assert_close(found, data.prepare(x[rows]))
    image = found[0] if len(lead) > 1 else found
    assert image.stride() == (channels * 24, 1, channels * 6, channels)
