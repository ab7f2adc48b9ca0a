"""Actors that end, short memory, checkpoints, clients that join, and what users make of runs, at Ray actors."""

import copy
import logging
import signal
import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest
import ray
import torch
from actors import PLAN, SIZES, algorithm, bits, everything, ordinary_run, sharded_run, task_for
from helpers import make_federation, make_task
from sentences import user_error

from fedloom.algorithms.ditto import Ditto
from fedloom.cluster import actors as cluster_actors
from fedloom.cluster import clients as cluster_clients
from fedloom.cluster.actors import RayActors
from fedloom.cluster.clients import RowsInMainMemory
from fedloom.cluster.shards import shard_of_clients, shards_of_actors, usual_number
from fedloom.core.autodiff import vmap_size
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.engine.plan import Plan
from fedloom.engine.planning import choose
from fedloom.engine.planning.choose import REFERENCE, make_executor
from fedloom.metrics.registry import find_metric
from fedloom.papers.catalog import runnable
from fedloom.studies import reproduce


def rounds(run, count=4, after=None):
    """The records of so many rounds; all of them are kept as the best so far, and `after(run)` is called after each."""
    records = []
    for _ in range(count):
        records.append(run.advance())
        run.simulation.keep_best("pre")
        if after is not None:
            after(run)
    return records


def undisturbed(alg, task, actors, **options):
    run = sharded_run(alg, task, actors(2), **options)
    return everything(run, rounds(run))


def state(run):
    return bits(run.store.everyone(), run.simulation.clients.best_store.everyone())


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "ctor" in r.getMessage()]


# -- shards


@pytest.mark.parametrize(("clients", "shards"), [(9, 3), (20, 8), (8, 8), (1000, 7)])
def test_shards_have_nearly_as_many_clients_and_samples_as_others(clients, shards):
    sizes = np.random.default_rng(0).integers(1, 100, clients + 5)
    found = shard_of_clients(sizes, clients, shards)
    counts = np.bincount(found[:clients], minlength=shards)
    samples = np.bincount(found[:clients], sizes[:clients], shards)
    assert np.ptp(counts) <= 1
    assert np.ptp(samples) <= 2 * sizes.max()


def test_the_number_of_shards_does_not_depend_on_few_actors():
    assert [usual_number(100, n) for n in (1, 2, 8, 9)] == [8, 8, 8, 9]
    assert [usual_number(5, n) for n in (1, 5)] == [5, 5]


@pytest.mark.parametrize("actors", [1, 2, 3, 8])
def test_every_shard_has_one_actor(actors):
    found = shards_of_actors(8, actors)
    assert len(found) == actors
    assert sorted(shard for mine in found for shard in mine) == list(range(8))


# -- actors that end


@pytest.mark.parametrize("call", ["ask", "keep_best", "read", "save"])
def test_an_actor_that_is_killed_is_replaced_and_nothing_else_changes(call, actors, caplog):
    """Killed while it is at work; `save` makes a checkpoint, from which the new actor then starts."""
    alg = algorithm("ditto")
    task = task_for(alg, norm=True)
    expected, two = undisturbed(alg, task, actors), actors(2)
    run = sharded_run(alg, task, two)

    def kill_once(run):
        two.kill_at = (call, 1) if run.t == 2 else None
        if call == "read":
            run.store.everyone()
        if call == "save" or run.t == 1:
            run.state()

    found = everything(run, rounds(run, after=kill_once))
    assert found == expected
    assert warnings(caplog) == [
        "Actor 1 of Ray has ended, and the run goes on from the last round with a new one in its place."
    ]


def test_a_new_actor_repeats_few_rounds_only(actors, monkeypatch):
    monkeypatch.setattr(cluster_clients, "MOST_ROUNDS", 2)
    alg = algorithm("scaffold")
    task = task_for(alg)
    expected, two = undisturbed(alg, task, actors), actors(2)
    run, lengths = sharded_run(alg, task, two), []

    def kill_late(run):
        lengths.append(sum(call.name == "ask" for call in run.clients._log))
        two.kill_at = ("ask", 0) if run.t == 3 else None

    assert everything(run, rounds(run, after=kill_late)) == expected
    assert max(lengths) == 2


@pytest.mark.parametrize("kind", ["turns", "bytes"])
def test_what_a_new_actor_repeats_is_bounded(kind, actors, local_actors, monkeypatch):
    """In bytes, too; where clients train in turns, there are many calls in a round."""
    alg = algorithm("fedavg" if kind == "bytes" else "pfedhn")
    task = task_for(alg)
    expected, two = undisturbed(alg, task, actors), local_actors(2)
    monkeypatch.setattr(cluster_clients, "MOST_BYTES" if kind == "bytes" else "MOST_ROUNDS", 1)
    run, lengths = sharded_run(alg, task, two), []

    def note(run):
        lengths.append(sum(call.name == "ask" for call in run.clients._log))
        if run.t == 3:
            two.ends = lambda name, *arguments: name == "ask"

    assert everything(run, rounds(run, after=note)) == expected
    assert max(lengths) <= (1 if kind == "bytes" else len(SIZES))
    assert run.clients._log_bytes == sum(call.size for call in run.clients._log) > 0


def test_an_actor_that_ray_ends_because_memory_is_short_is_replaced(actors, monkeypatch, caplog):
    alg = algorithm("ditto")
    task = task_for(alg)
    expected, get, left = undisturbed(alg, task, actors), ray.get, [True]
    run = sharded_run(alg, task, actors(2))

    def get_once_short(reference, **options):
        found = get(reference, **options)
        if left and run.t == 2:
            left.clear()
            raise ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")
        return found

    monkeypatch.setattr(ray, "get", get_once_short)
    assert everything(run, rounds(run)) == expected
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("function", ["put", "get"])
def test_what_goes_wrong_in_ray_is_said_in_one_sentence(function, actors, monkeypatch):
    def full(value):
        raise ray.exceptions.ObjectStoreFullError("There is no room. Remove something.\nAnd more.")

    one = actors(1)
    monkeypatch.setattr(ray, function, full)
    with user_error("Ray failed: There is no room;"):
        one.get(one.put(1))


def test_more_actors_than_a_machine_can_have(actors):
    with user_error("actors=1000 is more than Ray has CPUs for", "or fewer"):
        RayActors(1000, on_gpus=False)


class FakeRay:
    """Ray as it starts, with its signal handler."""

    @staticmethod
    def is_initialized():
        return False

    @staticmethod
    def init(**options):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        if FakeRay.fails:
            raise Exception("There is no room.")


@pytest.mark.parametrize("fails", [False, True])
def test_starting_ray_leaves_the_handlers_of_signals(fails, monkeypatch):
    """With that of Ray, a run would not save a checkpoint when it is asked to end."""
    monkeypatch.setattr(FakeRay, "fails", fails, raising=False)
    monkeypatch.setattr(cluster_actors, "require_ray", lambda: FakeRay)
    before = signal.signal(signal.SIGTERM, mine := lambda number, frame: None)
    try:
        if fails:
            with user_error("Ray could not be started: There is no room"):
                cluster_actors._Session()
        else:
            cluster_actors._Session()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_that_has_ended_leaves_nothing_in_rays_memory(actors):
    alg = algorithm("ditto")
    run = sharded_run(alg, task_for(alg), actors(2))
    rounds(run, 1)
    clients = weakref.ref(run.clients)
    del run
    actors(2)
    assert clients() is None


def test_all_runs_of_a_reproduction_have_the_same_actors(tmp_path, monkeypatch):
    depths = []
    monkeypatch.setattr(reproduce, "execute_group", lambda *args, **options: depths.append(cluster_actors._depth))
    monkeypatch.setattr(reproduce, "make_data", lambda config: None)
    monkeypatch.setattr(reproduce, "make_task", lambda config, data: None)
    selection, before = reproduce.select(runnable("GPFL-T1")), cluster_actors._depth
    selection = replace(selection, tasks=selection.tasks[:1], methods=selection.methods[:2])
    reproduce._train(selection, [0], {}, tmp_path, [])
    assert depths == [before + 1] * 2


def test_an_actor_that_ends_again_and_again_ends_the_run(actors):
    alg, two = algorithm("fedavg"), actors(2)
    run = sharded_run(alg, task_for(alg), two)

    def call(name, arguments):
        return {} if name == "ask" else type(two).call(two, name, arguments)

    two.call, two.replace = call, lambda i: None
    with pytest.raises(UserError, match="ended the processes of actors 0, 1 again and again"):
        run.advance()


# -- memory


@dataclass(frozen=True)
class Greedy(Ditto):
    """Ditto that needs a lot of memory."""

    name = "greedy"
    most: int = setting(2, "clients that fit memory together")

    def begin(self, task, down, state, info):
        if vmap_size() > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().begin(task, down, state, info)


def test_where_memory_is_short_all_actors_go_on_with_fewer_clients_at_once(actors, caplog):
    """The method is the user's own: actors do not know its module."""
    task = task_for(Greedy(), participation=1.0)
    plan = replace(PLAN, chunk=3)
    run = sharded_run(Greedy(), task, actors(2), plan=plan)
    found = everything(run, [run.advance(), run.advance()])
    assert run.plan.chunk == 2
    assert caplog.text.count("going on with 2") == 1
    other = sharded_run(algorithm("ditto"), task, actors(1), plan=replace(plan, chunk=2))
    again = [other.advance(), other.advance()]
    assert everything(other, again) == found


def test_short_memory_leaves_one_executor_for_training(local_actors):
    two = local_actors(2)
    run = sharded_run(Greedy(), task_for(Greedy(), participation=1.0), two, plan=replace(PLAN, chunk=3))
    run.advance()
    kept = [worker.executors[0] for worker in two.workers]
    run.advance()
    assert [worker.executors for worker in two.workers] == [[one] for one in kept]
    short = two.workers[0]._executor(replace(run.plan, chunk=1))  # as if memory were short at the other one
    assert two.workers[0].executors == [short]


def test_another_plan_in_between_leaves_the_executor_of_training(local_actors):
    one, alg = local_actors(1), algorithm("ditto")
    run = sharded_run(alg, task_for(alg), one)
    run.advance()
    kept = one.workers[0].executors[0]
    reference = make_executor(alg, run.task, REFERENCE)
    run.clients.ask(run.driver._evaluation_request(np.arange(3), None), reference)
    run.advance()
    assert one.workers[0].executors[0] is kept
    assert [executor.plan.mode for executor in one.workers[0].executors] == ["stacked", "per-client"]


@pytest.mark.parametrize("count", [1, 3])
def test_memory_is_planned_for_all_shards_at_once(count, local_actors, monkeypatch):
    """12 bytes, of which half may be taken, for 3 shards: 2 clients of one byte each."""
    alg = algorithm("fedavg")
    run = sharded_run(alg, task_for(alg, participation=1.0), local_actors(count))
    monkeypatch.setattr(choose, "available_memory", lambda device: 12)
    monkeypatch.setattr(choose, "dry_run", lambda alg, task, few, conv_algos: len(few))
    assert run.clients.make_plan(run.driver, "stacked-eager").chunk == 2


# -- mistakes in a method


@dataclass(frozen=True)
class Mistaken(Ditto):
    """Ditto with a mistake."""

    name = "mistaken"

    def begin(self, task, down, state, info):
        return super().begin(task, {"w": down["weights"]}, state, info)


def test_a_mistake_in_a_method_is_said_with_its_line(actors):
    run = sharded_run(Mistaken(), task_for(Mistaken()), actors(1))
    with user_error("begin of 'mistaken' asks for 'weights', which is not there (test_actors.py, line "):
        run.advance()


# -- checkpoints


@pytest.mark.parametrize("name", ["ditto", "fedavg", "fedphp"])
def test_a_state_looks_like_that_of_other_engines_and_any_number_of_actors_goes_on_from_it(name, actors):
    alg = algorithm(name)
    task = task_for(alg, norm=True)
    expected = undisturbed(alg, task, actors)
    first = sharded_run(alg, task, actors(2))
    before = rounds(first, 2)
    saved, then = first.state(), state(first)
    ordinary = ordinary_run(alg, task)
    rounds(ordinary, 2)
    same = ordinary.state().store
    assert saved.store.ids.tolist() == same.ids.tolist()
    assert saved.store.trained.tolist() == same.trained.tolist()
    torch.testing.assert_close(saved.store.rows, same.rows, rtol=1e-9, atol=1e-9)
    second = sharded_run(alg, task, actors(3))
    second.restore(saved)
    assert state(second) == then
    assert everything(second, before + rounds(second, 2)) == expected
    with pytest.raises(UserError, match="The actors of this run have ended, or serve another run"):
        first.advance()


def test_a_replaced_actor_knows_what_a_run_was_continued_with(actors):
    alg = algorithm("ditto")
    task = task_for(alg)
    first = sharded_run(alg, task, actors(2))
    rounds(first, 2)
    saved = copy.deepcopy(first.state())
    expected = everything(first, rounds(first, 2))
    one = actors(1)
    second = sharded_run(alg, task, one)
    second.restore(saved)
    one.kill_at = ("ask", 0)
    assert everything(second, rounds(second, 2)) == expected


# -- clients that join, metrics, models


@pytest.mark.parametrize("name", ["ditto", "fedper"])
def test_clients_that_join_after_training(name, actors):
    alg = algorithm(name)
    task = make_task((), federation=replace(make_federation(SIZES), held_out=4), norm=True, participation=1.0)
    expected = ordinary_run(alg, task, join_rounds=3)
    records, all_bits = [expected.advance() for _ in range(2)], set()
    for count in (1, 3):
        several = actors(count)
        run = sharded_run(alg, task, several, join_rounds=3)
        found = [run.advance()]
        several.kill_at = ("ask", 0) if count == 3 else None
        found.append(run.advance())
        all_bits.add(str(everything(run, found)))
        for a, b in zip(records, found, strict=True):
            for view in ("new", "joined"):
                np.testing.assert_allclose(a.unseen_scores[view], b.unseen_scores[view], rtol=1e-6)
    assert len(all_bits) == 1


def test_an_actor_that_ends_while_clients_join(local_actors, monkeypatch):
    """Nothing is saved between their rounds, because no store has what they keep."""
    alg = algorithm("ditto")
    task = make_task((), federation=replace(make_federation(SIZES), held_out=4), participation=1.0)
    expected, found = [], []
    for all_records, ends in ((expected, False), (found, True)):
        two = local_actors(2)
        run = sharded_run(alg, task, two, join_rounds=3)
        if ends:
            monkeypatch.setattr(cluster_clients, "MOST_BYTES", 1)
            two.ends = lambda name, *given: name == "ask" and given[1].join_round == 2
        all_records += [run.advance() for _ in range(2)]
        all_records.append(everything(run, all_records))
    assert found[-1] == expected[-1]


def test_the_positive_class_is_the_rare_one_of_all_clients(actors):
    """At actors, another class may be rarer."""
    data = make_federation((30,) * 6, classes=2)
    y = torch.zeros_like(data.y)
    for i in range(6):
        rows = torch.cat([rows[i] for rows in data.splits.values()])
        y[rows[: len(rows) * (4 if i % 3 == 0 else 1) // 5]] = 1
    task = make_task((), federation=replace(data, y=y), participation=1.0)
    metric, alg = find_metric("auprc", "classes"), algorithm("fedper")
    expected, run = ordinary_run(alg, task, metric=metric), sharded_run(alg, task, actors(3), metric=metric)
    a, b = expected.advance().scores, run.advance().scores
    for view in a:
        for split in a[view]:
            np.testing.assert_allclose(b[view][split], a[view][split], rtol=1e-9)


@pytest.mark.parametrize("name", ["ditto", "fedavg-ft", "pfedme"])
def test_models_and_predictions(name, actors):
    alg = algorithm(name)
    task = task_for(alg, norm=True)
    expected, run = ordinary_run(alg, task), sharded_run(alg, task, actors(2))
    rounds(expected, 1), rounds(run, 1)
    expected.advance(), run.advance()
    for best in (False, True):
        (ids, a), (same, b) = next(expected.group.models(0, best)), next(run.group.models(0, best))
        assert ids.tolist() == same.tolist()
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        (ids, a), (same, b) = next(expected.group.predictions(0, best)), next(run.group.predictions(0, best))
        np.testing.assert_allclose(a.p, b.p, rtol=1e-9)
    here = run.simulation.clients.at_home()
    assert bits(here.store.everyone(), here.best_store.everyone()) == state(run)


def test_rows_of_a_finished_run_stay_in_main_memory():
    """The device `meta` is another one, as a GPU is."""
    store = RowsInMainMemory(lambda ids: {"v": torch.ones(len(ids), 2)}, 5, torch.device("meta"))
    store.write(np.array([1, 3]), {"v": torch.zeros(2, 2)})
    assert store.read(np.arange(2))["v"].device.type == "meta"
    assert store.snapshot().rows["v"].tolist() == [[0, 0], [0, 0]]


def test_the_plan_is_made_at_an_actor(actors):
    alg = algorithm("fedavg")
    run = sharded_run(alg, task_for(alg, participation=1.0), actors(2))
    plan = run.clients.make_plan(run.driver, "auto")
    assert (plan.shards, plan.chunk <= 3, plan.device) == (3, True, "cpu")
    stacked = run.clients.make_plan(run.driver, "stacked")
    assert (stacked.mode, stacked.chunk) == ("stacked", 3)
    assert isinstance(stacked, Plan)
