"""Options against harmful updates: norm clipping, coordinate-wise median and trimmed mean, screening of directions."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import EAGER, SingleRun, make_task, method, methods
from oracles import assert_near

import fedloom
from fedloom.config.resolve import configure
from fedloom.core.errors import UserError
from fedloom.core.task import Task
from fedloom.core.tree import leaves, tree_map, trimmed_mean
from fedloom.engine.clients import LocalClients
from fedloom.engine.screening import Directions, Screening, scaled_updates, update_norms, update_vectors
from fedloom.studies.build import make_task as build_task

UPLOADING = [name for name in methods() if name != "local"]
AVERAGING = [name for name in methods() if method(name).averages]


def small_task(name, **settings):
    """Six clients whose classes overlap; a method that needs samples at the server has some."""
    data = {"server": 10} if method(name).needs_server_data else {}
    return make_task((12, 12, 14, 12, 16, 12), data=data, **settings)


@contextmanager
def altered(change):
    """Within this context, uploads are altered: `change(clients, ids, up)` returns them."""
    original = LocalClients.training_replies

    def training_replies(self, request, cohort, outcome, executor):
        up = change(self, request, outcome.up)
        return original(self, request, cohort, outcome._replace(up=up), executor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalClients, "training_replies", training_replies)
        yield


def scaling(bad, factor):
    """Updates of some clients, times a factor."""

    def change(clients, request, up):
        factors = torch.where(torch.from_numpy(np.isin(request.ids, bad)), factor, 1.0)
        shared = {**clients.initial.constants, **request.shared}
        return scaled_updates(clients.alg, clients.task, up, shared, request.parts, factors.double())

    return change


def run(name, task, rounds=1, **options):
    made = SingleRun(method(name), task, 0, plan=EAGER, **options)
    for _ in range(rounds):
        made.advance(evaluate=False)
    return made


@contextmanager
def recorded_uploads(name):
    """The uploads that reach the server's step, and who sent them."""
    seen, original = [], type(method(name)).aggregate

    def aggregate(self, task, server, up, info, t, key):
        seen.append((up, info.id.tolist()))
        return original(self, task, server, up, info, t, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method(name)), "aggregate", aggregate)
        yield seen


# -- median and trimmed mean ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("trim", [0.1, 0.2, 0.34, 0.5])
def test_a_trimmed_mean_leaves_out_as_many_of_either_end(rows, trim):
    x = torch.randn(rows, 4, 3, dtype=torch.float64)
    cut = min(int(trim * rows + 1e-9), (rows - 1) // 2)
    expected = np.sort(x.numpy(), 0)[cut : rows - cut].mean(0)
    assert_near(trimmed_mean({"a": x}, torch.ones(rows), trim)["a"], torch.from_numpy(expected))


@pytest.mark.parametrize("rows", [3, 4])
def test_half_is_the_median_of_those_who_count(rows):
    x = torch.randn(9, 5, dtype=torch.float64)
    counts = torch.zeros(9)
    counts[:rows] = torch.tensor([7, 1, 3, 2])[:rows]
    assert_near(trimmed_mean(x, counts, 0.5), torch.from_numpy(np.median(x[:rows].numpy(), 0)))


def test_without_trimming_an_average_is_the_mean():
    task, x, n = make_task((4, 4)), torch.randn(3, 2, dtype=torch.float64), torch.tensor([1, 2, 5])
    assert_near(task.average(x, n), (x * n[:, None]).sum(0) / 8)
    assert_near(task.average(x), x.mean(0))
    assert_near(replace(task, trim=0.5).average(x, n), x.median(0).values)


@pytest.mark.parametrize("name", UPLOADING)
def test_a_method_says_whether_its_server_averages(name, monkeypatch):
    calls, original = [], Task.average

    def average(self, stacked, weights=None):
        calls.append(1)
        return original(self, stacked, weights)

    task = small_task(name)
    made = SingleRun(method(name), task, 0, plan=EAGER)
    monkeypatch.setattr(Task, "average", average)
    made.advance(evaluate=False)
    assert bool(calls) == method(name).averages


@pytest.mark.parametrize("trim", [0.5, 0.34])
@pytest.mark.parametrize("name", AVERAGING)
def test_a_minority_cannot_move_the_server_where_the_others_agree(name, trim):
    """Of six clients, four upload the same; what two others send, within what honest ones may, does not matter."""

    def change(noise):
        def upload(clients, request, up):
            same = tree_map(lambda v: v[:1].repeat(len(v), *[1] * (v.dim() - 1)), up)
            bad = torch.tensor([False, True, False, False, True, False])

            def other(v):
                mask = bad.view(-1, *[1] * (v.dim() - 1))
                return (
                    torch.where(mask, v + noise * torch.arange(len(v)).view_as(mask), v) if v.is_floating_point() else v
                )

            return tree_map(other, same)

        return upload

    servers = []
    for noise in (0.0, -3.0):
        with altered(change(noise)):
            servers.append(run(name, small_task(name, trim=trim), screening=False).server)
    assert_near(servers[1], servers[0], 1e-9)


def test_local_has_no_server_that_could_aggregate_so_comparisons_can_have_a_median():
    found = fedloom.compare(["fedavg"], seeds=1, rounds=1, clients=4, aggregation="median")
    assert {"local", "fedavg"} <= {row["method"] for row in found.rows()}


@pytest.mark.parametrize("name", sorted(set(methods()) - {*AVERAGING, "local"}))
def test_a_method_whose_server_does_not_average_refuses(name):
    values = {"aggregation": "median", "server_share": 0.1, "clients": 4}
    with pytest.raises(UserError, match=f"^The server of {name} does not average uploads, so aggregation cannot be"):
        build_task(configure(name, values=values))


def test_a_share_to_trim_needs_the_trimmed_mean():
    with pytest.raises(UserError, match=r"^trim=0.3 belongs to aggregation=trimmed_mean, but aggregation is median"):
        build_task(configure("fedavg", values={"aggregation": "median", "trim": 0.3}))


@pytest.mark.parametrize(
    ("settings", "trim"),
    [({}, 0), ({"aggregation": "median"}, 0.5), ({"aggregation": "trimmed_mean"}, 0.2),
     ({"aggregation": "trimmed_mean", "trim": 0.1}, 0.1)],
)  # fmt: skip
def test_settings_decide_how_the_server_averages(settings, trim):
    assert build_task(configure("fedavg", values={**settings, "clients": 4})).trim == trim


# -- norm clipping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UPLOADING)
def test_an_update_is_clipped_to_the_usual_size(name):
    task = small_task(name)
    with recorded_uploads(name) as free:
        run(name, task, screening=False)
    with altered(scaling([2], 7.0)), recorded_uploads(name) as clipped:
        made = run(name, task, clip_updates=1.5)
    assert not made.driver.left_out
    sizes = []
    fresh = SingleRun(method(name), task, 0, plan=EAGER).driver
    for uploads in (free, clipped):
        found = {}
        for up, ids in uploads[: len(uploads) if not method(name).turns else 1]:
            request = fresh._request("train", np.array(ids), 0, fresh.server)
            norms = update_norms(fresh.alg, fresh.task, up, fresh._shared(request), request.parts, {})
            found |= dict(zip(ids, norms[:, 1].tolist(), strict=True))
        sizes.append(found)
    honest, seen = sizes
    if method(name).turns:  # afterwards the server has moved otherwise
        assert seen == pytest.approx(honest)
        return
    attacked = {**honest, 2: 7 * honest[2]}
    usual = sorted(attacked.values())[(len(attacked) - 1) // 2]
    assert seen == pytest.approx({i: min(size, 1.5 * usual) for i, size in attacked.items()}, rel=1e-6)


def test_clipping_that_nobody_meets_changes_no_bit():
    task = small_task("fedrep")
    for found, expected in zip(
        leaves(run("fedrep", task, 3, clip_updates=50.0).server), leaves(run("fedrep", task, 3).server), strict=True
    ):
        assert torch.equal(found, expected)


def test_clipping_does_not_need_screening():
    screen = Screening(False, leave_out=False, clip=2)
    factors = screen.factors(np.ones(5), np.array([1.0, 1, 1, 4, 1e9]), np.ones(5))
    assert factors == pytest.approx([1, 1, 1, 0.5, 2e-9])
    assert Screening(False, leave_out=False, clip=2).factors(np.ones(4), np.zeros(4), np.ones(4)).tolist() == [1] * 4


def test_scaled_updates_leave_whole_numbers_alone():
    alg, task = method("fedavg"), make_task((4, 4))
    sent = {"w": {"a": torch.tensor([3.0, 4.0])}}
    up = {
        "w": {"a": torch.tensor([[3.0, 5.0], [5.0, 8.0]])},
        "extra": torch.tensor([[2.0], [4.0]]),
        "j": torch.arange(2),
    }
    found = scaled_updates(alg, task, up, sent, {}, torch.tensor([1.0, 0.5]))
    assert found["w"]["a"].tolist() == [[3, 5], [4, 6]]
    assert found["extra"].tolist() == [[2], [2]]
    assert found["j"].tolist() == [0, 1]


# -- directions -------------------------------------------------------------------------------------------------------


def directions(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_a_client_that_points_away_from_the_others_is_left_out():
    screen, ids = Directions(9), np.array([0, 2, 5, 8])
    updates = directions([1, 0.1], [1, -0.2], [-3, 0.1], [2, 0.3])
    for sign in (1, -1):  # only how they differ matters
        screen.compare(ids, sign * updates)
        assert screen.accept(ids).tolist() == [True, True, False, True]
    for _ in range(4):  # it may mend its ways
        screen.compare(ids, updates.abs())
    assert screen.accept(ids).all()


def test_four_updates_of_the_first_ten_rounds_are_compared():
    found = [(uploads, t) for uploads in (3, 4) for t in (0, 9, 10) if Directions(9).judges(uploads, t)]
    assert found == [(4, 0), (4, 9)]


def test_clients_that_send_no_change_are_used():
    screen = Directions(4)
    screen.compare(np.arange(4), torch.zeros(4, 3))
    assert screen.accept(np.arange(4)).all()


def test_who_was_left_out_in_the_first_rounds_stays_out():
    """In later rounds nothing is compared, so a client that has turned honest is not used."""
    values = {"clients": 6, "rounds": 12, "batch_size": 50, "participation": 4, "dtype": "float64"}
    task = build_task(configure("fedavg", values=values))
    made = SingleRun(method("fedavg"), task, 0, plan=EAGER, screen_directions=True)
    made.driver.directions.recent[2] = -100
    with recorded_uploads("fedavg") as seen:
        for _ in range(12):
            made.advance(evaluate=False)
    assert not any(2 in ids for _, ids in seen)
    assert any(2 in made.sample(t) for t in range(10, 12))


@pytest.mark.parametrize("name", [name for name in UPLOADING if not method(name).turns and method(name).partial])
def test_flipped_signs_are_found_and_named(name, caplog):
    values = {"clients": 10, "rounds": 3, "batch_size": 15, "beta": 1.0, "server_share": 0.1, "dtype": "float64"}
    task = build_task(configure(name, values=values))
    with altered(scaling([4], -1.0)):
        made = run(name, task, 3, screen_directions=True)
    assert 4 in made.driver.left_out
    assert "Client 4 sent updates that point away from those of others in round" in caplog.text


def test_updates_are_vectors_of_what_changed():
    alg, task = method("fedavg"), make_task((4, 4))
    up = {"w": {"a": torch.tensor([[3.0, 5.0], [5.0, 8.0]])}, "extra": torch.tensor([[2.0], [4.0]])}
    found = update_vectors(alg, task, up, {"w": {"a": torch.tensor([3.0, 4.0])}}, {})
    assert found.tolist() == [[0, 1, 2], [2, 4, 4]]


# -- running statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("screened", [True, False])
def test_running_statistics_of_one_client_do_not_spoil_those_of_the_global_model(screened):
    """BatchNorm makes up for features in other units, so the update is usual, but the statistics are not."""
    task = make_task((12, 12, 14, 12, 16, 12), norm=True)
    task.data.x[task.data.splits["train"][2]] *= 1e8
    made = run("fedavg", task, 2, screening=screened)
    largest = max(float(v.abs().max()) for v in leaves(made.driver.stats))
    assert (largest < 1e4) == screened
    assert not made.driver.left_out


def test_the_server_is_given_only_uploads_that_are_used():
    task = small_task("fedavg")
    with altered(scaling([1], 1e6)), recorded_uploads("fedavg") as seen:
        run("fedavg", task, clip_updates=1.0)
    up, ids = seen[0]
    assert ids == [0, 2, 3, 4, 5]
    assert {len(v) for v in leaves(up)} == {5}
