"""Clients in parallel threads: results are the same to the bit for any number of threads, and an error stops all of
them."""

import _thread
import signal
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import (
    RAGGED,
    SingleRun,
    assert_same,
    make_federation,
    make_task,
    method,
    model_task,
    run_and_evaluate,
    state_bytes,
)
from oracles import assert_near
from torch import nn

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.federation import Federation, Ragged
from fedloom.core.task import Task
from fedloom.engine.plan import Plan
from fedloom.engine.planning import choose
from fedloom.engine.planning.measure import Option, Workload, _steps_of_busiest, measure_per_client
from fedloom.engine.worker_threads import raise_if_stopped, run_in_threads
from fedloom.nn.network import Network

SIZES = (5, 2, 9, 12, 7)
SINGLE = torch.float32  # convolutions of float64 take another path
TOKENS = {"vocab": 9, "options": {"width": 5, "dropout": 0.3, "padding": 0}}
CASES = {
    "conditional valve": ("gpfl", lambda: model_task("cnn4", (1, 16, 16), sizes=SIZES, dtype=SINGLE)),
    "pairs of batches": ("per-fedavg", lambda: model_task("cnn_kt", (3, 16, 16), sizes=SIZES, dtype=SINGLE)),
    "batchnorm": ("fedrep", lambda: make_task(SIZES, norm=True, dropout=0.3, momentum=0.9, batch_size=3, clip=1.0)),
    "lstm": (  # not traced: test_a_step_that_cannot_be_traced_runs_eagerly
        "fedavg-ft",
        lambda: model_task("lstm_shakes", (6,), sizes=SIZES, dtype=SINGLE, **TOKENS),
    ),
}


def everything(run, records):
    """State and scores, as bytes."""
    scores = [found[view][split] for r in records for found in [r.scores] for view in found for split in found[view]]
    return state_bytes(run) + [s.tobytes() for s in scores]


def parallel(workers, replay="eager"):
    return Plan("per-client", replay, scoring="per-client", workers=workers)


@pytest.fixture
def frequent_switches():
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("name", "make"), CASES.values(), ids=CASES.keys())
def test_results_are_the_same_to_the_bit_for_any_number_of_workers(name, make, frequent_switches):
    """Eager and traced, which agree up to rounding."""
    task, states = make(), []
    for replay, workers in (("eager", (1, 2, 3)), ("traced", (1, 3) if name != "fedavg-ft" else ())):
        done = [run_and_evaluate(method(name), task, parallel(count, replay), rounds=2) for count in workers]
        for run, records in done:
            assert everything(run, records) == everything(*done[0])
            states.append((run.server, run.store.everyone()))
    assert_near(states[-1], states[0], 1e-5)


@pytest.mark.parametrize("name", ["fedala", "page", "pfedhn"])  # a stopping condition, epochs per client, turns
def test_workers_give_what_the_reference_gives(name):
    task = make_task((7, 21, 12, 5), data={"server": 20}, norm=True, dropout=0.2)
    assert_same(method(name), task, parallel(3, "traced"), 1e-9, rounds=2)


class Stateful(nn.Module):
    """Sets an attribute of itself in its forward pass, and lets other threads run before it is read."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scaled = lambda x: x * self.first.bias  # a closure over the module, which a copy of it would share

    def forward(self, x):
        self.kept = self.first(x)
        time.sleep(1e-4)
        return self.head(torch.tanh(self.scaled(self.kept)))


def test_modules_may_set_attributes_of_themselves():
    data = make_federation((20, 30, 25, 30))
    task = Task(data, Network(Stateful, "head", data.x[:2], data.dtype), lr=0.1)
    one, two = (everything(*run_and_evaluate(FedAvg(), task, parallel(w), rounds=2)) for w in (1, 4))
    assert one == two
    assert_same(FedAvg(), task, Plan("stacked", "eager", chunk=4), 1e-9, rounds=1)


def test_results_are_in_order_whichever_thread_ends_first():
    ends = [threading.Event() for _ in range(4)]

    def job(j):
        if j < 3:
            assert ends[j + 1].wait(10)  # the last ends first
        ends[j].set()
        return j, torch.get_num_threads(), torch.is_grad_enabled()

    assert run_in_threads(job, [2, 0, 3, 1], 4) == [(j, 1, False) for j in range(4)]


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
    run = SingleRun(Breaking(), task, 0, plan=parallel(3))
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
            raise_if_stopped()
            time.sleep(0.001)
        seen.append(j)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_threads(job, range(6), 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not seen
    assert not [t for t in threading.enumerate() if t.name.startswith("fedloom")]


def test_workers_are_chosen_where_they_pay_and_the_plan_says_so(monkeypatch):
    task, seconds = make_task(RAGGED, rounds=1000), {}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def measured(load, plan):
        return Option(plan, choose.make_executor(load.alg, load.task, plan), seconds[plan.workers, plan.replay])

    monkeypatch.setattr(choose, "measure_per_client", measured)
    keys = ((0, "eager"), (4, "eager"), (0, "traced"), (4, "traced"))
    for times, expected in (
        ((1.0, 0.5, 9.0, 0.51), (4, "eager")),
        ((1.0, 0.5, 9.0, 0.40), (4, "traced")),
        ((1.0, 0.95, 1.01, 0.1), (0, "eager")),
        ((1.0, 2.0, 0.7, 0.1), (0, "traced")),
    ):
        seconds.update(zip(keys, times, strict=True))
        plan = SingleRun(method("fedavg"), task, 0, plan="per-client").plan
        assert (plan.mode, plan.workers, plan.replay, plan.threads) == ("per-client", *expected, 4)


def test_a_step_that_cannot_be_traced_runs_eagerly(monkeypatch):
    task = model_task("lstm_shakes", (6,), dtype=SINGLE, **TOKENS)  # by oneDNN's kernel
    monkeypatch.setattr(choose, "TRACE_PAYS", 0)
    run = SingleRun(method("fedavg"), task, 0, plan="per-client")
    assert run.plan.replay == "eager"
    run.advance()


def test_the_expected_time_of_workers_is_that_of_the_one_with_most_steps():
    steps = np.array([3, 5, 3, 4, 3])  # two workers have 5 + 3 and 4 + 3 + 3
    assert [_steps_of_busiest(steps, w) for w in (1, 2, 5, 9)] == [18, 10, 5, 5]
    run = SingleRun(method("fedrep"), make_task(RAGGED), 0, plan=parallel(0))
    cohort = run.cohort(np.arange(len(RAGGED)), 0)
    load = Workload(run.alg, run.task, run.task, cohort, eval_clients=len(RAGGED))
    assert measure_per_client(load, parallel(2)).seconds > 0


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_channels_last_for_single_models_on_a_cpu(channels, lead):
    x = torch.randint(0, 256, (9, channels, 4, 6), dtype=torch.uint8)
    one = Ragged.of([np.arange(9)])
    data = Federation(x, torch.zeros(9, dtype=torch.int64), 1, {"train": one}, mean=(0.4,) * channels)
    rows = torch.randint(0, 9, lead)
    found = data.samples(rows)
    torch.testing.assert_close(found, data.prepare(x[rows]))
    image = found[0] if len(lead) > 1 else found
    assert image.stride() == (channels * 24, 1, channels * 6, channels)
