"""When memory is too small for all clients at once, fewer are stacked, and the results are the same."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import RAGGED, SingleRun, assert_same, make_task, method

from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.engine.executors import scoring, stacked, stacked_scoring
from fedloom.engine.executors.stacked_scoring import EVAL_ROWS
from fedloom.engine.graph.stacked_step import StackedStep
from fedloom.engine.plan import Plan
from fedloom.engine.planning import choose

FULL = torch.OutOfMemoryError("out of memory")


def limit_memory_to(clients, monkeypatch):
    """Steps of more clients run out of memory."""
    real = StackedStep.__call__

    def limited(self, *flat):
        if len(flat[0]) > clients:
            try:
                raise FULL
            except RuntimeError as error:
                raise RuntimeError("an error of a capture hides the cause") from error
        return real(self, *flat)

    monkeypatch.setattr(StackedStep, "__call__", limited)


@pytest.mark.parametrize("name", ["ditto", "page"])
def test_fewer_clients_at_once_and_the_same_results(name, monkeypatch, caplog):
    limit_memory_to(4, monkeypatch)
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
    """One client has more samples than fit memory, so fewer clients are not enough: fewer samples are scored at once,
    by the clients' models as well as by one for all."""
    real = Federation.prepare

    def limited(self, x):
        if x.shape[:-1].numel() > 100:
            raise FULL
        return real(self, x)

    monkeypatch.setattr(Federation, "prepare", limited)
    monkeypatch.setattr(scoring, "EVAL_BATCH", {"cpu": 50})  # of the run that it is compared with
    monkeypatch.setattr(stacked, "MIN_EVAL_ROWS", 32)
    monkeypatch.setattr(stacked_scoring, "EVAL_ROWS", {"cpu": 4096})
    with caplog.at_level(logging.WARNING, "fedloom"):
        assert_same(method(name), make_task((300, 5, 7)), Plan("stacked", "traced", chunk=3, shrink=0), 1e-9, rounds=2)
    said = [r.getMessage() for r in caplog.records]
    assert said[:2] == [
        "Out of memory with 3 clients at once: going on with 2.",
        "Out of memory with 2 clients at once: going on with 1.",
    ]
    rows = {"ditto": (512, 256, 128, 64), "fedavg": (512, 256)}[name]  # one model for all scores a quarter as many
    assert said[2:] == [f"Out of memory with one client: going on with {n} samples scored at once." for n in rows]


def test_the_plan_has_the_numbers_that_fitted_memory(monkeypatch):
    task = make_task((20, 20, 20))
    run = SingleRun(method("fedavg"), task, 0, plan=Plan("stacked", "eager", chunk=3, runs=2, reason="so"))
    before = run.plan
    limit_memory_to(2, monkeypatch)
    run.executor.train(run.first_cohort(), ())
    assert run.plan == replace(before, chunk=2, rows=EVAL_ROWS["cpu"] // 2)


def test_memory_may_be_short_for_held_out_clients_only(monkeypatch):
    """Two clients train and three join: the latter are more than fit memory."""
    data = replace(make_task((20, 20, 20, 20, 20)).data, held_out=3)
    run = SingleRun(method("fedavg"), make_task((), federation=data), 0, plan=Plan("stacked", "eager", chunk=3))
    before, expected = run.plan, run.advance().unseen_scores
    limit_memory_to(2, monkeypatch)
    run = SingleRun(method("fedavg"), make_task((), federation=data), 0, plan=Plan("stacked", "eager", chunk=3))
    run.advance(evaluate=False)
    assert run.plan == before
    found = run.group.evaluate()[0].unseen_scores
    assert run.plan == replace(before, chunk=2, rows=EVAL_ROWS["cpu"] // 2)
    for view, scores in expected.items():
        np.testing.assert_allclose(found[view], scores, rtol=1e-9)


def test_the_plan_is_made_for_as_many_clients_as_fit_memory(monkeypatch, caplog):
    limit_memory_to(4, monkeypatch)
    monkeypatch.setattr(choose, "MARGIN", np.inf)  # stacking wins, however slow it is
    with caplog.at_level(logging.WARNING, "fedloom"):
        run = SingleRun(method("fedavg"), make_task(RAGGED), 0)
    assert run.plan.mode == "stacked"
    assert run.plan.chunk == 3
    assert "Out of memory with 12 clients at once: trying 6." in caplog.text


def test_one_client_that_does_not_fit_memory_is_an_error_of_the_user(monkeypatch):
    limit_memory_to(0, monkeypatch)
    run = SingleRun(method("fedavg"), make_task(RAGGED), 0, plan=Plan("stacked", "eager", chunk=12))
    with pytest.raises(UserError, match=r"^The model of one client does not fit the memory of cpu \(.* GB free"):
        run.advance()


def test_other_errors_are_raised_as_they_are(monkeypatch):
    def broken(self, *flat):
        raise RuntimeError("something else")

    monkeypatch.setattr(StackedStep, "__call__", broken)
    run = SingleRun(method("fedavg"), make_task(RAGGED), 0, plan=Plan("stacked", "eager", chunk=12))
    with pytest.raises(RuntimeError, match="something else"):
        run.advance()
