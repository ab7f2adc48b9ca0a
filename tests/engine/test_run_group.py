"""Stacked runs give what each of them gives by itself: with other seeds for every method, with other numeric settings;
and runs are grouped where a method branches on a number."""

import logging
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from helpers import SingleRun, make_task, method, methods

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.settings import setting
from fedloom.core.tree import leaves, scale
from fedloom.engine.grouping import groups
from fedloom.engine.plan import Plan
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.engine.stacked_settings import StackedSettings, differing_settings

EAGER = Plan("stacked", "eager", chunk=4)
SHORT = {"dap-fl": {"ep_max": 2, "replay": 8}, "page": {"ep_max": 2, "replay": 8}, "fedrecon": {"query_epochs": 2}}


def task_for(alg, **settings):
    share = 2 / 3 if alg.partial else 1.0  # other seeds draw other clients
    return make_task((8, 14, 11), data={"server": 8}, participation=share, batch_size=8, dropout=0.2, **settings)


def assert_like_single_runs(runs, plan, rounds=2):
    """`runs` are (method, task, seed): server, clients, scores and traffic of the group are those of single runs."""
    group = RunGroup([Simulation(*run, join_rounds=2) for run in runs], plan)
    for _ in range(rounds):
        found = group.advance()
    for run, mine, done in zip(runs, group.runs, found, strict=True):
        single = SingleRun(*run, plan=plan, join_rounds=2)
        for _ in range(rounds):
            expected = single.advance()
        for a, b in zip(*(leaves((r.server, r.store.everyone())) for r in (mine, single)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert done.cohort.tolist() == expected.cohort.tolist()
        assert (done.bytes_down, done.bytes_up) == (expected.bytes_down, expected.bytes_up)
        assert done.scores.keys() == expected.scores.keys()
        for view, splits in expected.scores.items():
            for split, values in splits.items():
                np.testing.assert_allclose(done.scores[view][split], values, rtol=1e-9, atol=1e-9)
        for kind in ("reports", "unseen_scores"):
            for name, values in getattr(expected, kind).items():
                np.testing.assert_allclose(getattr(done, kind)[name], values, rtol=1e-9, atol=1e-9)
        assert done.server_report == pytest.approx(expected.server_report, rel=1e-9)
    return group


@pytest.mark.parametrize("name", methods())
def test_two_stacked_seeds_are_two_runs(name):
    alg = method(name, **SHORT.get(name, {}))
    task = task_for(alg)
    group = assert_like_single_runs([(alg, task, 3), (alg, task, 2**70)], EAGER)
    a, b = (leaves((run.server, run.store.everyone())) for run in group.runs)
    assert any(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["ditto", "fedala", "gpfl", "pfedhn", "page"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_two_seeds_and_learning_rates_in_one_cuda_graph_are_two_runs(name):
    alg = method(name, **SHORT.get(name, {}))
    runs = [(alg, task_for(alg, device="cuda", lr=lr), seed) for lr, seed in ((0.1, 3), (0.05, 4))]
    assert_like_single_runs(runs, Plan("stacked", "captured", chunk=4))


def with_other_numbers(alg):
    """The method with all its numeric settings changed a little."""
    numbers = {f.name: getattr(alg, f.name) for f in fields(alg)}
    return replace(alg, **{k: 0.9 * v or 0.1 for k, v in numbers.items() if isinstance(v, float)})


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("fedprox", Plan("stacked", "traced", "per-client", chunk=3)),
        ("fedala", EAGER),  # `s` selects samples on the host; `until` and `epochs` are evaluated inside a round
        ("pfedhn", EAGER),  # the server aggregates after each client
        ("pfedme", EAGER),
        ("fedphp", EAGER),
        ("page", EAGER),
    ],
)
def test_stacked_runs_may_differ_in_all_their_numeric_settings(name, plan):
    alg = method(name, **SHORT.get(name, {}))
    others = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01, "clip": 2.0}
    runs = [(alg, task_for(alg, clip=1.0), 3), (with_other_numbers(alg), task_for(alg, **others), 3)]
    group = assert_like_single_runs(runs, plan)
    of_method = {f.name for f in fields(alg) if isinstance(getattr(alg, f.name), float)}
    assert {name for _, name in differing_settings(group.runs)} == of_method | set(others)


def test_held_out_clients_join_every_run():
    def task(lr):
        data = make_task((9, 23, 12, 15)).data
        return replace(make_task((), federation=replace(data, held_out=1), batch_size=8), lr=lr)

    assert_like_single_runs([(method("pfedhn"), task(0.1), 3), (method("pfedhn"), task(0.05), 4)], EAGER)


def test_some_runs_of_a_group_may_advance_without_the_others():
    alg = method("ditto")
    runs = [(alg, task_for(alg, lr=lr), 5) for lr in (0.1, 0.05, 0.02)]
    group = RunGroup([Simulation(*run) for run in runs], EAGER)
    for some in ([0, 1, 2], [1], [0, 2]):
        group.advance(some=some)
    for run, mine in zip(runs, group.runs, strict=True):
        single = SingleRun(*run, plan=EAGER)
        for _ in range(2):
            single.advance(evaluate=False)
        for a, b in zip(leaves(mine.server), leaves(single.server), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_seconds_of_runs_add_up_to_those_that_passed(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("fedloom.engine.run_group.time.perf_counter", lambda: next(clock))
    alg = method("local")
    found = RunGroup([Simulation(alg, task_for(alg), seed) for seed in (1, 2)], EAGER).advance()
    assert [(done.train_seconds, done.eval_seconds) for done in found] == [(5, 5), (5, 5)]


@dataclass(frozen=True)
class Branching(FedAvg):
    """Branches on one of its numbers in Python, and not on the other."""

    gate: float = setting(0.5, "is compared")
    pull: float = setting(1.0, "multiplies")

    def finish(self, task, work, down, state, info):
        w = scale(work["w"].params, self.pull)
        return state, {"w": scale(w, 2.0) if self.gate > 0.6 else w}


def test_a_number_on_which_a_method_branches_has_one_value_in_a_group_and_is_named(caplog):
    grid = [(gate, pull) for gate in (0.5, 0.7) for pull in (1.0, 0.9)]
    task = task_for(Branching(), lr=0.05)
    runs = [Simulation(Branching(gate, pull), task, 3) for gate, pull in grid]
    with caplog.at_level(logging.INFO, logger="fedloom"):
        found = groups(runs)
    assert found == [[0, 1], [2, 3]]
    (line,) = [record.getMessage() for record in caplog.records if "one after another" in record.getMessage()]
    assert "differ in gate" in line
    for group in found:
        assert_like_single_runs([(runs[place].alg, task, 3) for place in group], EAGER, rounds=1)


@dataclass(frozen=True)
class Epochs(FedAvg):
    """The number of epochs depends on a number."""

    share: float = setting(1.0, "of two epochs")

    def phases(self, task):
        (phase,) = super().phases(task)
        return [replace(phase, epochs=round(2 * self.share))]


def test_a_number_on_which_the_phases_depend_has_one_value_in_a_group():
    task = task_for(Epochs())
    runs = [Simulation(Epochs(share), task, 3) for share in (1.0, 0.5)]
    assert groups(runs) == [[0], [1]]
    with pytest.raises(TypeError, match="'epochs' of a phase depends"):
        StackedSettings((Epochs(1.0), Epochs(0.5)), (task, task)).phases(task)


def test_the_plan_is_made_for_all_runs_and_says_so():
    alg = method("fedper")
    group = RunGroup([Simulation(alg, task_for(alg), seed) for seed in range(3)], "stacked-eager")
    plan = group.plan()
    assert {group.plan(number) for number in range(3)} == {plan}
    assert (plan.runs, plan.chunk) == (3, 6)
    assert "for 3 runs" in plan.reason


def test_runs_that_are_computed_client_by_client_have_executors_of_their_own():
    alg = method("ditto")
    runs = [(replace(alg, lam=lam), task_for(alg), 3) for lam in (0.1, 1.0)]
    group = assert_like_single_runs(runs, Plan("per-client", scoring="per-client"))
    assert [executor.alg.lam for executor in group.executors] == [0.1, 1.0]


@dataclass(frozen=True)
class Keeping(FedAvg):
    """Clients have private state if a number is not zero."""

    share: float = setting(0.0, "of the kept model")

    def init_client(self, task, key, key_i):
        return {"kept": task.init(key)} if self.share else {}

    def finish(self, task, work, down, state, info):
        return state, {"w": work["w"].params}


def test_only_runs_with_the_same_structure_of_client_state_are_stacked():
    runs = [Simulation(Keeping(share=share), task_for(Keeping()), 0) for share in (0.5, 0.0, 0.25)]
    assert groups(runs) == [[0, 2], [1]]
