"""What holds for the rounds of any method: keyed randomness, independence of order, execution plans, evaluation."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    EAGER,
    PER_CLIENT,
    RAGGED,
    SingleRun,
    make_federation,
    make_task,
    method,
    methods,
    plan_id,
    state_bytes,
)
from oracles import assert_near
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.core.algorithm import Phase
from fedloom.core.keys import rng
from fedloom.core.task import Task
from fedloom.core.tree import leaves
from fedloom.engine import driver
from fedloom.engine.batching import batches_per_epoch
from fedloom.engine.lru_cache import KEY_BYTES, LRUCache
from fedloom.engine.plan import Plan
from fedloom.engine.planning import choose, measure
from fedloom.engine.planning.measure import Option, Workload, measure_per_client, measure_stacked
from fedloom.nn.network import Network

aten = torch.ops.aten


def workload(run, cohort):
    return Workload(run.alg, run.task, run.task, cohort, eval_clients=len(RAGGED))


def task_of(name, **settings):
    least = method(name).min_samples(make_task(RAGGED))
    return make_task([max(n, least) for n in RAGGED], data={"server": 20}, **settings)


TRACED = Plan("stacked", "traced", chunk=4, shrink=0.3)
PLANS = [(name, plan) for name in methods() for plan in (PER_CLIENT, EAGER)]
PLANS += [(name, TRACED) for name in ("ditto", "fedala", "gpfl", "page", "pfedhn", "plgu-lf", "scaffold")]


@pytest.mark.parametrize(("name", "plan"), PLANS, ids=lambda value: value if isinstance(value, str) else plan_id(value))
def test_results_do_not_depend_on_the_order_of_clients(name, plan):
    """An executor is given the same cohort in three orders: results are the same to the bit. Traced steps are the same
    for all methods, so a few stand for them."""
    alg, task = method(name), task_of(name)
    run = SingleRun(alg, task, 0, plan=plan)
    run.advance(evaluate=False)
    ids = np.arange(len(RAGGED))
    expected = None
    for order in (ids, ids[::-1].copy(), np.random.default_rng(0).permutation(ids)):
        done = run.executor.train(run.cohort(order, 1), ("test",))
        back = np.argsort(order)
        found = [v[back].numpy().tobytes() for v in leaves(done)]
        assert expected is None or found == expected
        expected = found


def test_a_cohort_trains_in_ascending_order_however_it_is_given():
    runs = []
    for cohort in ([5, 1, 8], [8, 5, 1], [1, 5, 8]):
        run = SingleRun(method("scaffold"), task_of("scaffold"), 0, plan=EAGER)
        for _ in range(2):
            run.advance(evaluate=False, cohort=np.array(cohort))
        runs.append(state_bytes(run))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("plan", [Plan("per-client"), EAGER, Plan("stacked", "traced", chunk=5)], ids=plan_id)
def test_the_same_seed_gives_the_same_bits_and_another_does_not(plan):
    runs = []
    for seed in (1, 1, 2):
        run = SingleRun(method("ditto"), task_of("ditto", dropout=0.3, participation=0.5), seed, plan=plan)
        for _ in range(3):
            run.advance(evaluate=False)
        runs.append(state_bytes(run))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_traced_step_gives_what_an_eager_one_gives():
    """Up to rounding: tracing may leave out operations with zeros."""
    runs = []
    for replay in ("eager", "traced"):
        run = SingleRun(
            method("fedrep"), make_task([20] * 6, norm=True, dropout=0.2), 0, plan=Plan("stacked", replay, chunk=6)
        )
        for _ in range(2):
            run.advance(evaluate=False)
        runs.append((run.server, run.store.everyone()))
    assert_near(*runs)


def test_evaluation_does_not_change_the_state_of_a_run():
    """FedAvg-FT trains copies for its evaluation, which are discarded."""
    runs = []
    for evaluate in (True, False):
        run = SingleRun(method("fedavg-ft"), task_of("fedavg-ft", norm=True), 0, plan=EAGER)
        for _ in range(2):
            run.advance(evaluate=evaluate)
        runs.append(state_bytes(run))
    assert runs[0] == runs[1]


def test_clients_are_sampled_as_specified():
    task = make_task(RAGGED, participation=0.3)
    run = SingleRun(method("fedavg"), task, 4, plan=EAGER)
    expected = np.sort(rng("sample", 4, 2).choice(12, 3, replace=False))  # floor(0.3 * 12) = 3
    assert run.sample(2).tolist() == expected.tolist()
    for participation, m in ((0.01, 1), (0.25, 3), (1.0, 12), (5, 5)):
        run = SingleRun(method("fedavg"), make_task(RAGGED, participation=participation), 4, plan=EAGER)
        assert len(set(run.sample(0).tolist())) == m


def test_a_batchnorm_batch_of_one_sample_is_skipped():
    """11 samples in batches of 10: the second batch has one sample, so with BatchNorm there is one step, not two."""
    n = np.array([1, 2, 10, 11, 12])
    phase = Phase(lambda *args: None)
    assert batches_per_epoch(make_task([5]), phase, n).tolist() == [1, 1, 1, 2, 2]
    assert batches_per_epoch(make_task([5], norm=True), phase, n).tolist() == [0, 1, 1, 1, 2]
    evaluates = Phase(lambda *args: None, train=False)
    assert batches_per_epoch(make_task([5], norm=True), evaluates, n).tolist() == [1, 1, 1, 2, 2]


class Sorting(nn.Module):
    """`unique` has no vmap rule."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.first(x) + torch.unique(x.detach()).sum() * 0)


def test_a_model_that_cannot_be_stacked_runs_per_client_and_says_so(caplog):
    data = make_federation(RAGGED)
    task = Task(data, Network(Sorting, "head", data.x[:2], data.dtype), lr=0.1, rounds=10**6)
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        run = SingleRun(method("fedavg"), task, 0)
    assert run.plan.mode == "per-client"
    assert "cannot be stacked" in caplog.text
    run.advance()
    with pytest.raises(Exception, match="unique"):
        SingleRun(method("fedavg"), task, 0, plan="stacked")


def test_the_plan_is_chosen_by_measuring_and_recorded(monkeypatch):
    task = make_task(RAGGED, rounds=1000)

    def option(plan, *seconds):
        return Option(plan, choose.make_executor(method("fedavg"), task, plan), *seconds)

    monkeypatch.setattr(choose, "measure_per_client", lambda load, plan: option(Plan("per-client"), 1.0))
    for seconds, mode in ((2.0, "per-client"), (0.1, "stacked")):
        monkeypatch.setattr(choose, "measure_stacked", lambda load, plan, s=seconds: option(plan, s, 5.0))
        plan = SingleRun(method("fedavg"), task, 0).plan
        assert plan.mode == mode
        assert "expected per round" in plan.record()["reason"]


def test_measuring_gives_times_for_every_plan_and_does_not_change_the_state_of_a_run():
    task = make_task(RAGGED, rounds=1000)
    run = SingleRun(method("fedrep"), task, 0, plan=EAGER)
    before = state_bytes(run)
    load = workload(run, run.cohort(np.arange(len(RAGGED)), 0))
    for option in (
        measure_per_client(load, Plan("per-client")),
        measure_stacked(load, EAGER),
        measure_stacked(load, Plan("stacked", "traced", chunk=12)),
    ):
        assert option.seconds > 0
    assert option.compiling > 0  # it is traced, so the number of operations is known
    assert state_bytes(run) == before


def test_the_expected_time_of_the_compiler_counts_operations_of_large_prefixes():
    """Of 10 clients and fewer, in sizes of 10, 6, 3 and 1, the first two are compiled."""
    timed = [([10, 10, 6, 5, 2], 100), ([4, 1], 50), ([3], 7)]
    phases = [measure._TimedPhase(1.0, np.array(active), [10], [(0.0, 0.0)], count) for active, count in timed]
    seconds = measure._compiler_seconds(Plan("stacked", "captured", chunk=10, shrink=0.9), phases)
    assert seconds == pytest.approx(measure.COMPILE_SECONDS * (2 * 100 + 50))


def test_chunks_shrink_with_the_memory_that_is_free(monkeypatch):
    run = SingleRun(method("ditto"), make_task(RAGGED), 0, plan=EAGER)
    load = workload(run, run.cohort(np.arange(len(RAGGED)), 0))
    sizes = []
    for free in (1 << 30, 300_000, 1):
        monkeypatch.setattr(choose, "available_memory", lambda device, free=free: free)
        sizes.append(choose._chunk(load, shards=1)[0])
    assert sizes[0] == len(RAGGED)
    assert 1 < sizes[1] < len(RAGGED)
    assert sizes[2] == 1


def test_prefix_sizes_cover_the_active_clients_and_are_few():
    plan = Plan("stacked", "traced", chunk=100)
    sizes = {plan.prefix(active) for active in range(1, 101)}
    assert all(active <= plan.prefix(active) <= 100 for active in range(1, 101))
    assert len(sizes) <= 10
    assert {1, 100} <= sizes
    assert Plan("stacked", "eager", chunk=100).prefix(37) == 37


@pytest.mark.parametrize("broken", [0, 1, 11])
def test_non_finite_samples_of_one_client_affect_no_other(broken):
    """Clients are stacked and padded, and padding must not read another client's samples."""
    task = make_task(RAGGED)
    for split in ("train", "test"):
        task.data.x[task.data.splits[split][broken]] = torch.nan
    others = np.arange(len(RAGGED)) != broken
    local = SingleRun(method("local"), task, 0, plan=EAGER)
    scores = [
        *local.advance().scores.values(),
        *SingleRun(method("fedavg"), task, 0, plan=EAGER).evaluate()[0].values(),
    ]
    for value in leaves(local.store.everyone()):
        assert torch.isfinite(value[others]).all()
        assert value[broken].isnan().any()
    for view in scores:
        for found in view.values():
            assert np.isfinite(found[others]).all()
        assert np.isnan(view["test"][broken]).any()


@pytest.mark.parametrize("name", [name for name in methods() if name != "page"])  # its server handles such uploads
def test_a_client_that_diverges_affects_no_other_and_is_named(name, caplog):
    """The server state is the same as without this client in the round, and the models of all others are finite."""
    alg, sizes = method(name), [max(n, 20) for n in RAGGED]
    whole = make_task(sizes, data={"server": 20})
    task = make_task(sizes, data={"server": 20})
    broken, others = 4, np.delete(np.arange(len(sizes)), 4)
    task.data.x[task.data.splits["train"][broken]] = torch.nan
    if alg.partial:
        run, without = (SingleRun(alg, t, 0, plan=EAGER) for t in (task, whole))
        run.advance(evaluate=False)
        without.advance(evaluate=False, cohort=others)
        for found, expected in zip(leaves(run.server), leaves(without.server), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    caplog.clear()
    run = SingleRun(alg, task, 0, plan=EAGER)
    with caplog.at_level("WARNING"):
        done = [run.advance() for _ in range(2)][-1]
    for view in done.scores.values():
        assert np.isfinite(view["test"][others]).all()
    named = ["Client 4 diverged in round 1" in record.message for record in caplog.records].count(True)
    assert named == 1


def test_the_server_does_not_change_in_a_round_in_which_all_clients_diverge():
    task = make_task(RAGGED, norm=True)
    run = SingleRun(method("fedavg"), task, 0, plan=EAGER)
    before = run.server["w"]
    task.data.x[:] = torch.nan
    run.advance(evaluate=False)
    assert all(torch.equal(run.server["w"][name], value) for name, value in before.items())
    assert all(torch.isfinite(value).all() for value in leaves(run.stats))


@pytest.mark.parametrize(
    ("clients", "bytes_", "most"), [(4096, 1 << 30, 12), (5, 1 << 30, 4), (4096, 3000, 4), (4096, 1, 1)]
)
def test_evaluation_in_blocks_changes_no_score_and_limits_the_clients_of_a_request(clients, bytes_, most, monkeypatch):
    """pFedHN sends every client a model of its own: 92 numbers in float64, 736 bytes."""
    run = SingleRun(method("pfedhn"), make_task(RAGGED), 0, plan=Plan("per-client"))
    run.advance(evaluate=False)
    expected, _ = run.evaluate()
    monkeypatch.setattr(driver, "MAX_EVAL_CLIENTS", clients)
    monkeypatch.setattr(driver, "MAX_EVAL_BYTES", bytes_)
    asked, cohort = [], run.clients.cohort
    monkeypatch.setattr(run.clients, "cohort", lambda request: asked.append(len(request.ids)) or cohort(request))
    found, _ = run.evaluate()
    assert max(asked) == most
    assert sum(asked) == len(RAGGED)
    for split, values in expected["pre"].items():
        np.testing.assert_allclose(found["pre"][split], values, rtol=1e-12)


@pytest.mark.parametrize("plan", [Plan("per-client"), Plan("stacked", "traced", chunk=5)], ids=plan_id)
def test_only_clients_that_are_evaluated_are_scored(plan):
    """With the same scores as if all clients were."""
    alg, task = method("fedavg-ft"), task_of("fedavg-ft", norm=True, participation=0.5)
    few, everyone = (SingleRun(alg, task, 0, plan=plan, eval_client_ids=ids) for ids in (np.array([8, 1, 4]), None))
    for _ in range(4):
        found, expected = few.advance(), everyone.advance()
        for view, splits in expected.scores.items():
            for split, scores in splits.items():
                np.testing.assert_allclose(found.scores[view][split], scores[[1, 4, 8]], rtol=1e-9)
    for asked in ([1, 4], [], range(6)):
        cohort = everyone.cohort(np.arange(6), 4)
        all_ = everyone.executor.train(cohort, ("val", "test")).scores
        some = everyone.executor.train(replace(cohort, scored=np.isin(np.arange(6), asked)), ("val", "test")).scores
        for split, scores in some.items():
            assert np.flatnonzero(~scores.isnan().any(1)).tolist() == list(asked)
            torch.testing.assert_close(scores[list(asked)], all_[split][list(asked)], rtol=1e-9, atol=0)


def test_the_cache_drops_the_least_recently_used_entries_when_it_is_full():
    made = []

    def get(key):
        return cache.get(key, lambda: made.append(key) or [torch.full((1024,), key)])

    cache = LRUCache(3 * (8 << 10) + 3 * KEY_BYTES)
    for key in (1, 2, 3, 1, 4, 1, 2):
        assert get(key)[0][0] == key
    assert made == [1, 2, 3, 4, 2]  # 2 was dropped for 4


class Synchronizing(TorchDispatchMode):
    """Notes operations that would wait for a GPU: they need a value on the host, or a size that depends on values."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        masks = func.overloadpacket in (aten.index, aten.index_put) and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        sizes = func.overloadpacket is aten.repeat_interleave and kwargs.get("output_size") is None
        values = func.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal)
        if masks or sizes or values:
            self.found.add(str(func))
        return func(*args, **kwargs)


def test_the_operations_of_a_round_do_not_synchronize_with_the_device():
    """On a CPU, where copies to the host do not show; test_gpu.py has a test for those."""
    task = make_task(RAGGED, norm=True, dropout=0.2, participation=0.5, epochs=2)
    plan = Plan("stacked", "eager", chunk=4)
    run = SingleRun(method("ditto"), task, 0, plan=plan, eval_client_ids=np.array([1, 4, 8]))
    with Synchronizing() as noted:
        for t in range(3):
            run.advance(evaluate=t == 2)
    assert noted.found == set()
    with Synchronizing() as noted:
        task.data.x[task.data.x > 0].sum().item()
    assert len(noted.found) == 2
