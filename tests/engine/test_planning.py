"""What is expected of a plan, and which plans are measured."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import EAGER, RAGGED, SingleRun, make_task, method

from fedloom.engine import batching
from fedloom.engine.plan import Plan
from fedloom.engine.planning import choose, measure
from fedloom.engine.planning.measure import Option, Workload, comparable, measure_per_client, measure_stacked

ONE = Plan("per-client")
TRACED = Plan("stacked", "traced", chunk=12)


def option(plan, seconds, **more):
    return Option(plan, SimpleNamespace(), seconds, **more)


def workload(name, **settings):
    task = make_task([max(n, 8) for n in RAGGED], data={"server": 20}, rounds=1000, **settings)
    run = SingleRun(method(name), task, 0, plan=EAGER)
    return Workload(run.alg, run.task, run.task, run.first_cohort(), eval_clients=len(RAGGED))


def test_what_clients_do_beside_their_steps_is_expected_in_every_round():
    task = make_task(RAGGED, rounds=10)
    assert option(ONE, 0.5, once=1.0).total(task) == 6.0
    assert option(ONE, 0.5, once=1.0, rest=0.25).total(task) == 8.5


def test_plans_are_compared_by_steps_alone_unless_the_rest_is_known_of_all():
    known, unknown = option(ONE, 1.0, rest=2.0), option(EAGER, 2.0)
    assert [o.round_seconds for o in comparable([known, known])] == [3.0, 3.0]
    assert [o.round_seconds for o in comparable([known, unknown])] == [1.0, 2.0]


def test_the_rest_of_a_round_is_timed_where_steps_are_short(monkeypatch):
    load = workload("fedrep")
    assert measure_per_client(load, ONE).rest is not None
    assert measure_stacked(load, EAGER).rest is not None
    assert measure_stacked(load, TRACED).rest is None  # as with eager steps
    monkeypatch.setattr(measure, "SHORT_ROUND", 0.0)
    assert measure_per_client(load, ONE).rest is None
    assert measure_stacked(load, EAGER).rest is None


def test_the_sample_of_clients_has_the_smallest_and_the_largest():
    load = workload("fedavg")
    sizes = load.task.data.splits["train"].sizes[load.cohort.ids]
    found = sizes[measure._sample(load, 3)]
    assert (found[0], found[-1]) == (sizes.min(), sizes.max())
    assert len(measure._sample(load, 100)) == len(load.cohort)


@pytest.mark.parametrize("name", ["page", "fedala"])
def test_the_epochs_that_clients_choose_are_expected(name, monkeypatch):
    """PAGE's clients choose how often they pass over their samples. FedALA's learn no weights in their first round, but
    in later ones."""
    real, asked = batching.for_cohort, []

    def for_cohort(task, phase, cohort, epochs):
        if not isinstance(phase.epochs, int):
            asked.append(epochs)
        return real(task, phase, cohort, epochs)

    monkeypatch.setattr(batching, "for_cohort", for_cohort)
    measure_stacked(workload(name), EAGER)
    epochs = np.concatenate(asked)
    assert epochs.min() >= 1
    assert len(set(epochs.tolist())) > 1 if name == "page" else epochs.max() == 1


def test_threads_are_timed_while_all_of_them_compute():
    """The barrier lets nobody through who is alone."""
    together, seen = threading.Barrier(3, timeout=30), set()

    def step():
        if threading.current_thread() is not threading.main_thread() and threading.get_ident() not in seen:
            together.wait()
            seen.add(threading.get_ident())

    assert measure._seconds_in_threads(step, 3) > 0
    assert len(seen) == 3


@pytest.mark.parametrize(("one", "asked"), [(2.9, 3), (3.1, 1)])
def test_threads_and_traces_for_one_client_after_another_are_tried_unless_stacking_is_far_ahead(
    one, asked, monkeypatch
):
    """Stacked rounds take 1 s. Two threads, or traced steps, cannot make one client after another three times as
    fast."""
    measured = []

    def per_client(load, plan):
        measured.append(plan)
        return option(plan, one)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(choose, "measure_per_client", per_client)
    monkeypatch.setattr(choose, "measure_stacked", lambda load, plan: option(plan, 1.0))
    plan = SingleRun(method("fedavg"), make_task(RAGGED, rounds=1000), 0).plan
    assert plan.mode == "stacked"
    assert len(measured) == asked


def test_traced_steps_leave_the_rest_of_a_round_as_it_is(monkeypatch):
    """Steps of 1 s and 0.5 s, and 10 s beside either: one client after another, with 9 s in all, is faster."""
    monkeypatch.setattr(choose, "measure_per_client", lambda load, plan: option(plan, 8.0, rest=1.0))

    def stacked(load, plan):
        return option(plan, 1.0, rest=10.0) if plan.replay == "eager" else option(plan, 0.5)

    monkeypatch.setattr(choose, "measure_stacked", stacked)
    load = workload("fedavg")
    chosen = choose.choose_executor(load.alg, load.task, load.task, load.cohort, len(load.cohort))
    assert isinstance(chosen, SimpleNamespace)
    assert chosen.plan.mode == "per-client"
    assert "stacked (traced) 10.5 s" in chosen.plan.reason
