"""What a run promises whatever the method: keyed randomness, order, chunks, plans, what is evaluated."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import RAGGED, SingleRun, make_federation, make_task, method, methods, plan_id
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.core.keys import rng
from fedloom.core.task import Task
from fedloom.core.tree import leaves
from fedloom.engine.lru_cache import LRUCache
from fedloom.engine.planning.plan import Plan
from fedloom.engines import choose, rounds
from fedloom.nn.network import Network

aten = torch.ops.aten
EAGER = Plan("stacked", "eager", chunk=len(RAGGED))


def state_bytes(run):
    return [v.numpy().tobytes() for v in leaves((run.server, run.store.everyone()))]


def task_of(name, **settings):
    least = method(name).min_samples(make_task(RAGGED))
    return make_task([max(n, least) for n in RAGGED], data={"server": 20}, **settings)


@pytest.mark.parametrize(
    "plan", [Plan("per-client"), EAGER, Plan("stacked", "traced", chunk=4, shrink=0.3)], ids=plan_id
)
@pytest.mark.parametrize("name", methods())
def test_the_order_in_which_clients_are_given_changes_no_byte(name, plan):
    """The same cohort in three orders, straight to the executor: every client gets the same result."""
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


def test_a_cohort_is_worked_off_in_ascending_order_however_it_is_given():
    runs = []
    for cohort in ([5, 1, 8], [8, 5, 1], [1, 5, 8]):
        run = SingleRun(method("scaffold"), task_of("scaffold"), 0, plan=EAGER)
        for _ in range(2):
            run.advance(evaluate=False, cohort=np.array(cohort))
        runs.append(state_bytes(run))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("plan", [Plan("per-client"), EAGER, Plan("stacked", "traced", chunk=5)], ids=plan_id)
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(plan):
    runs = []
    for seed in (1, 1, 2):
        run = SingleRun(method("ditto"), task_of("ditto", dropout=0.3, participation=0.5), seed, plan=plan)
        for _ in range(3):
            run.advance(evaluate=False)
        runs.append(state_bytes(run))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_traced_step_gives_the_bytes_of_an_eager_one():
    """With one prefix size for all steps, so that the two stack the same rows."""
    runs = []
    for replay in ("eager", "traced"):
        run = SingleRun(
            method("fedrep"), make_task([20] * 6, norm=True, dropout=0.2), 0, plan=Plan("stacked", replay, chunk=6)
        )
        for _ in range(2):
            run.advance(evaluate=False)
        runs.append(state_bytes(run))
    assert runs[0] == runs[1]


def test_evaluation_changes_nothing():
    """FedAvg-FT trains copies for its evaluation; they are thrown away."""
    runs = []
    for evaluate in (True, False):
        run = SingleRun(method("fedavg-ft"), task_of("fedavg-ft", norm=True), 0, plan=EAGER)
        for _ in range(2):
            run.advance(evaluate=evaluate)
        runs.append(state_bytes(run))
    assert runs[0] == runs[1]


def test_clients_are_sampled_as_the_specification_says():
    task = make_task(RAGGED, participation=0.3)
    run = SingleRun(method("fedavg"), task, 4, plan=EAGER)
    expected = np.sort(rng("sample", 4, 2).choice(12, 3, replace=False))  # floor(0.3 * 12) = 3
    assert run.sample(2).tolist() == expected.tolist()
    for participation, m in ((0.01, 1), (0.25, 3), (1.0, 12), (5, 5)):
        run.task = make_task(RAGGED, participation=participation)
        assert len(set(run.sample(0).tolist())) == m


def test_a_batchnorm_batch_of_one_sample_is_skipped():
    """11 samples in batches of 10: the second batch has one sample, so with BatchNorm there is one step, not two."""
    from fedloom.core.algorithm import Phase
    from fedloom.engine.batching import batches_per_epoch

    n = np.array([1, 2, 10, 11, 12])
    phase = Phase(lambda *args: None)
    assert batches_per_epoch(make_task([5]), phase, n).tolist() == [1, 1, 1, 2, 2]
    assert batches_per_epoch(make_task([5], norm=True), phase, n).tolist() == [0, 1, 1, 1, 2]
    look = Phase(lambda *args: None, train=False)
    assert batches_per_epoch(make_task([5], norm=True), look, n).tolist() == [1, 1, 1, 2, 2]


class Sorting(nn.Module):
    """`unique` has no batched form."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.first(x) + torch.unique(x.detach()).sum() * 0)


def test_a_model_that_cannot_be_stacked_runs_per_client_and_says_so(caplog):
    data = make_federation(RAGGED)
    task = Task(data, Network(Sorting, "head", data.x[:2], data.dtype), lr=0.1)
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
        return choose.Option(plan, choose.make_executor(method("fedavg"), task, plan), *seconds)

    monkeypatch.setattr(choose, "_measure_per_client", lambda *a: option(Plan("per-client"), 1.0))
    for seconds, mode in ((2.0, "per-client"), (0.1, "stacked")):
        monkeypatch.setattr(choose, "_measure_stacked", lambda *a, s=seconds: option(a[-1], s, 5.0))
        plan = SingleRun(method("fedavg"), task, 0).plan
        assert plan.mode == mode
        assert "expected per round" in plan.record()["reason"]


def test_measuring_gives_times_for_every_method_and_leaves_no_trace():
    task = make_task(RAGGED, rounds=1000)
    run = SingleRun(method("fedrep"), task, 0, plan=EAGER)
    before = state_bytes(run)
    cohort = run.cohort(np.arange(len(RAGGED)), 0)
    for option in (
        choose._measure_per_client(method("fedrep"), task, cohort, 12),
        choose._measure_stacked(method("fedrep"), task, cohort, 12, EAGER),
        choose._measure_stacked(method("fedrep"), task, cohort, 12, Plan("stacked", "traced", chunk=12)),
    ):
        assert option.seconds > 0
    assert option.compiling > 0  # it is traced, so how long the programs are is known
    assert state_bytes(run) == before


def test_what_the_compiler_would_take():
    """Of 10 clients and fewer, in sizes of 10, 6, 3 and 1, the first two are compiled."""
    timed = [([10, 10, 6, 5, 2], 100), ([4, 1], 50), ([3], 7)]
    phases = [choose._Timed(1.0, np.array(active), [10], [(0.0, 0.0)], count) for active, count in timed]
    price = choose._compiler_price(Plan("stacked", "captured", chunk=10, shrink=0.9), phases)
    assert price == pytest.approx(choose.COMPILE * (2 * 100 + 50))


def test_chunks_shrink_with_the_memory_that_is_free(monkeypatch):
    task = make_task(RAGGED)
    cohort = SingleRun(method("ditto"), task, 0, plan=EAGER).cohort(np.arange(len(RAGGED)), 0)
    sizes = []
    for free in (1 << 30, 300_000, 1):
        monkeypatch.setattr(choose, "free_memory", lambda device, free=free: free)
        sizes.append(choose._chunk(method("ditto"), task, cohort))
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
def test_broken_samples_of_one_client_reach_no_other(broken):
    """Clients are stacked and padded, and padding must not read a neighbour's data."""
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


@pytest.mark.parametrize("name", [name for name in methods() if name != "page"])  # whose server judges uploads itself
def test_a_client_that_diverges_spoils_no_other_and_is_named(name, caplog):
    """The server is what it is without this client in the round, and the others' models are numbers."""
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
    assert named == (name != "local")  # which sends nothing


def test_where_all_diverge_the_server_stays_as_it_was():
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
def test_evaluation_in_blocks_changes_no_score_and_limits_what_is_read(clients, bytes_, most, monkeypatch):
    """pFedHN sends every client a model of its own: 92 numbers in float64, 736 bytes."""
    run = SingleRun(method("pfedhn"), make_task(RAGGED), 0, plan=Plan("per-client"))
    run.advance(evaluate=False)
    expected, _ = run.evaluate()
    monkeypatch.setattr(rounds, "EVAL_CLIENTS", clients)
    monkeypatch.setattr(rounds, "EVAL_BYTES", bytes_)
    seen, original = [], run._cohort
    monkeypatch.setattr(run, "_cohort", lambda ids, t: seen.append(len(ids)) or original(ids, t))
    found, _ = run.evaluate()
    assert max(seen) == most
    for split, values in expected["pre"].items():
        np.testing.assert_allclose(found["pre"][split], values, rtol=1e-12)


@pytest.mark.parametrize("plan", [Plan("per-client"), Plan("stacked", "traced", chunk=5)], ids=plan_id)
def test_models_are_scored_where_anybody_asks(plan):
    """By the executor, and with the same results as if all were."""
    alg, task = method("fedavg-ft"), task_of("fedavg-ft", norm=True, participation=0.5)
    few, everyone = (SingleRun(alg, task, 0, plan=plan, evaluated=ids) for ids in (np.array([8, 1, 4]), None))
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


def test_what_was_used_last_is_kept_as_far_as_it_fits():
    made = []

    def get(key):
        return kept.get(key, lambda: made.append(key) or [torch.full((1024,), key)])

    kept = LRUCache(3 * (8 << 10) + 3 * (1 << 10))
    for key in (1, 2, 3, 1, 4, 1, 2):
        assert get(key)[0][0] == key
    assert made == [1, 2, 3, 4, 2]  # 2 had to give way to 4


class Asking(TorchDispatchMode):
    """Notes operations that would make a program wait for a GPU: they ask for a value, or for a size made of values."""

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


def test_a_round_asks_the_device_for_nothing_on_the_way():
    """On a CPU, where copies that wait do not show; a GPU has a test of its own."""
    task = make_task(RAGGED, norm=True, dropout=0.2, participation=0.5, epochs=2)
    run = SingleRun(method("ditto"), task, 0, plan=Plan("stacked", "eager", chunk=4), evaluated=np.array([1, 4, 8]))
    with Asking() as asking:
        for t in range(3):
            run.advance(evaluate=t == 2)
    assert asking.found == set()
    with Asking() as asking:
        task.data.x[task.data.x > 0].sum().item()
    assert len(asking.found) == 2
