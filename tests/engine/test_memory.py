"""When memory is not enough for all clients at once, fewer are stacked, and the results are the same."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import RAGGED, SingleRun, assert_same, make_task, method

from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.engine.graph.stacked_step import StackedStep
from fedloom.engine.planning.plan import Plan
from fedloom.engines import choose, cohort, stacked

FULL = torch.OutOfMemoryError("out of memory")


def room_for(clients, monkeypatch):
    """Steps of more clients find no memory."""
    real = StackedStep.__call__

    def limited(self, *flat):
        if len(flat[0]) > clients:
            try:
                raise FULL
            except RuntimeError as error:
                raise RuntimeError("a capture that broke off says something else") from error
        return real(self, *flat)

    monkeypatch.setattr(StackedStep, "__call__", limited)


@pytest.mark.parametrize("name", ["ditto", "page"])
def test_fewer_clients_at_once_and_the_same_results(name, monkeypatch, caplog):
    room_for(4, monkeypatch)
    task = make_task(RAGGED, data={"server": 20})
    with caplog.at_level(logging.WARNING, "fedloom"):
        assert_same(method(name), task, Plan("stacked", "traced", chunk=12, shrink=0), 1e-9, rounds=2)
    said = [r.getMessage() for r in caplog.records]
    assert said == [
        "Out of memory with 12 clients at once: going on with 6.",
        "Out of memory with 6 clients at once: going on with 3.",
    ]


@pytest.mark.parametrize("name", ["ditto", "fedavg"])
def test_fewer_samples_are_scored_at_once(name, monkeypatch, caplog):
    """One client has more samples than memory has room for, so fewer clients are not enough: of all models at once
    fewer samples are scored, whether they are the clients' or one for all."""
    real = Federation.prepare

    def limited(self, x):
        if x.shape[:-1].numel() > 100:
            raise FULL
        return real(self, x)

    monkeypatch.setattr(Federation, "prepare", limited)
    monkeypatch.setattr(cohort, "EVAL_BATCH", {"cpu": 50})  # of the run that it is compared with
    monkeypatch.setattr(stacked, "LEAST_ROWS", 32)
    with caplog.at_level(logging.WARNING, "fedloom"):
        assert_same(method(name), make_task((300, 5, 7)), Plan("stacked", "traced", chunk=3, shrink=0), 1e-9, rounds=2)
    said = [r.getMessage() for r in caplog.records]
    assert said[:2] == [
        "Out of memory with 3 clients at once: going on with 2.",
        "Out of memory with 2 clients at once: going on with 1.",
    ]
    rows = {"ditto": (512, 256, 128, 64), "fedavg": (512, 256)}[name]  # one model alone gets a quarter of it
    assert said[2:] == [f"Out of memory with one client: going on with {n} samples scored at once." for n in rows]


def test_the_plan_says_what_is_carried_out(monkeypatch):
    """Also where memory was short for clients that are held out, whom a copy of the executor serves."""
    task = make_task((20, 20, 20))
    run = SingleRun(method("fedavg"), task, 0, plan=Plan("stacked", "eager", chunk=3, runs=2, reason="so"))
    before = run.plan
    room_for(2, monkeypatch)
    run.executor.serving(task).train(run.first_cohort(), ())
    assert run.plan == replace(before, chunk=2, rows=2048)


def test_the_plan_has_room(monkeypatch, caplog):
    room_for(4, monkeypatch)
    monkeypatch.setattr(choose, "MARGIN", np.inf)  # whatever it costs
    with caplog.at_level(logging.WARNING, "fedloom"):
        run = SingleRun(method("fedavg"), make_task(RAGGED), 0)
    assert run.plan.mode == "stacked"
    assert run.plan.chunk == 3
    assert "Out of memory with 12 clients at once: trying 6." in caplog.text


def test_one_client_that_does_not_fit_is_said(monkeypatch):
    room_for(0, monkeypatch)
    run = SingleRun(method("fedavg"), make_task(RAGGED), 0, plan=Plan("stacked", "eager", chunk=12))
    with pytest.raises(UserError, match=r"^The model of one client does not fit the memory of cpu \(.* GB free"):
        run.advance()


def test_other_errors_stay_what_they_are(monkeypatch):
    def broken(self, *flat):
        raise RuntimeError("something else")

    monkeypatch.setattr(StackedStep, "__call__", broken)
    run = SingleRun(method("fedavg"), make_task(RAGGED), 0, plan=Plan("stacked", "eager", chunk=12))
    with pytest.raises(RuntimeError, match="something else"):
        run.advance()
