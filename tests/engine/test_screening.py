"""Uploads that are far larger than usual are left out; those of honest clients never are."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from helpers import EAGER, SingleRun, make_task, method, methods, state_bytes

from fedloom.config.resolve import configure
from fedloom.core.tree import leaves
from fedloom.engine import screening
from fedloom.engine.clients import LocalClients
from fedloom.engine.screening import BOUND, MAX_BOUND, Screening, scaled_updates, update_norms
from fedloom.studies.build import make_task as digits_task

CLIENTS = 10
UPLOADING = [name for name in methods() if name != "local"]
ALL_AT_ONCE = [name for name in UPLOADING if method(name).partial]


def digits(name, **settings):
    values = {"clients": CLIENTS, "rounds": 3, "server_share": 0.1, "batch_size": 15, "dtype": "float64", **settings}
    return digits_task(configure(name, values=values))


@contextmanager
def poisoned(clients, scale):
    """Within this context, the updates of some clients are scaled."""
    original = LocalClients.training_replies

    def training_replies(self, request, cohort, outcome, executor):
        factors = torch.from_numpy(np.where(np.isin(request.ids, clients), scale, 1.0))
        shared = {**self.initial.constants, **request.shared}
        up = scaled_updates(self.alg, self.task, outcome.up, shared, request.parts, factors)
        return original(self, request, cohort, outcome._replace(up=up), executor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalClients, "training_replies", training_replies)
        yield


def run(name, task, rounds=2, without=(), **options):
    """The run after some rounds; `without` are clients that are taken out of every cohort."""
    made = SingleRun(method(name), task, 0, plan=EAGER, **options)
    for t in range(rounds):
        made.advance(evaluate=False, cohort=np.setdiff1d(made.sample(t), without) if len(without) else None)
    return made


# -- attacks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scale"), [*((name, 1e2) for name in ALL_AT_ONCE), ("fedavg", 1e12), ("gpfl", 1e12), ("pfedhn", 1e12)]
)
def test_the_server_is_as_if_clients_with_huge_updates_had_not_taken_part(name, scale, caplog):
    task, bad = digits(name), [1, 4, 8]
    if name == "dap-fl":  # its clients choose learning rates and epochs, so honest updates may differ by 1e2
        scale = max(scale, 1e4)
    with poisoned(bad, scale):
        attacked = run(name, task)
    for found, expected in zip(leaves(attacked.server), leaves(run(name, task, without=bad).server), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert attacked.driver.left_out == set(bad)
    for client in bad:
        message = f"Client {client} sent an update far larger than usual in round 1: such updates are left out."
        assert [record.message for record in caplog.records].count(message) == 1


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "pfedhn", "fedproto", "gpfl", "hypcluster"])
def test_recent_rounds_are_the_measure_where_few_clients_take_part(name):
    task, bad = digits(name, participation=2), [1, 4, 8]
    with poisoned(bad, 1e2):
        attacked = run(name, task, rounds=12)
    assert attacked.driver.left_out == {i for t in range(12) for i in attacked.sample(t)} & set(bad)
    assert np.isfinite(torch.cat([v.reshape(-1) for v in leaves(attacked.server)]).numpy()).all()


def test_page_treats_a_client_that_was_left_out_as_one_that_diverged():
    task = digits("page")
    with poisoned([3], 1e8):
        attacked = run("page", task)
    assert attacked.driver.left_out == {3}
    assert attacked.server["p"][3] == 0
    assert attacked.server["s"][3] == 0
    assert all(torch.isfinite(v).all() for v in leaves(attacked.server["w"]))


def test_without_screening_one_client_spoils_the_model_of_all():
    task = digits("fedavg")
    with poisoned([3], 1e8):
        attacked = run("fedavg", task, screening=False)
    assert max(float(v.abs().max()) for v in leaves(attacked.server)) > 1e5


# -- honest clients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods())
def test_an_honest_federation_is_not_touched(name):
    task = digits(name)
    screened, free = run(name, task), run(name, task, screening=False)
    assert not screened.driver.left_out
    assert state_bytes(screened) == state_bytes(free)


@pytest.mark.parametrize("name", ["fedavg", "fedfomo", "fedproto", "pfedhn", "pfedkt", "scaffold"])
def test_honest_clients_are_not_left_out_where_few_take_part(name):
    assert not run(name, digits(name, participation=2), rounds=12).driver.left_out


# -- the rule -----------------------------------------------------------------------------------------------------


def accept(screen, *sizes, sent=1.0):
    """Whether uploads with these norms are used."""
    factors = screen.factors(np.full(len(sizes), sent), np.array(sizes, float), np.ones(len(sizes)))
    return (factors > 0).tolist()


def test_a_round_is_measured_by_its_median():
    assert accept(Screening(False), 1, 1, 1, BOUND - 1) == [True] * 4
    assert accept(Screening(False), 1, 1, 1, BOUND + 1) == [True, True, True, False]
    assert accept(Screening(False), 1, 1.1, 0.9, 1, 1e3, 1e9) == [True] * 4 + [False] * 2


def test_the_bound_grows_where_honest_sizes_differ():
    assert accept(Screening(False), 0.1, 0.5, 1, 1.2, 1.5, MAX_BOUND - 1) == [True] * 6
    assert accept(Screening(False), 1e-4, 1e-2, 1, 1, 1.2, MAX_BOUND + 1) == [True] * 5 + [False]


def test_few_uploads_are_measured_by_recent_ones_used_or_not():
    screen = Screening(False)
    assert accept(screen, 1, 1) == [True, True]
    assert accept(screen, 500, 500) == [False, False]  # there is nothing but START to tell
    for _ in range(4):
        assert accept(screen, 1, 30) == [True, False]
    for _ in range(20):
        accept(screen, 30, 30)  # sizes may change for good
    assert accept(screen, 30, 30) == [True, True]


def test_the_first_uploads_are_measured_by_what_was_sent():
    assert accept(Screening(True), 7, sent=1) == [True]
    assert accept(Screening(True), 9, sent=1) == [False]
    assert accept(Screening(True), 9, sent=0) == [True]


def test_uploads_without_a_change_are_no_measure():
    assert accept(Screening(False), 0, 0, 0, 1e-9, 1, 1.5, 2, 1e9) == [True] * 7 + [False]
    few = (1, MAX_BOUND - 1, MAX_BOUND + 1)  # of three the smallest is usual
    assert accept(Screening(False), 0, 0, 0, 0, *few) == [True] * 6 + [False]


def test_updates_grow_with_the_number_of_steps():
    sent, sizes = np.ones(6), np.array([1.0] * 5 + [99])
    assert Screening(False).factors(sent, sizes, np.ones(6)).tolist() == [1] * 5 + [0]
    assert Screening(False).factors(sent, sizes, np.array([10.0] * 5 + [1000])).tolist() == [1] * 6
    few = np.array([1.0, 1, 60])
    assert Screening(False).factors(few, few, np.array([1.0, 1, 1])).tolist() == [1, 1, 0]
    assert Screening(False).factors(few, few, np.array([1.0, 10, 10])).tolist() == [1, 1, 1]


def test_norms_are_those_of_differences_to_what_was_sent():
    alg, task = method("fedavg"), make_task((4, 4))
    sent = {"w": {"a": torch.tensor([3.0, 4.0])}}
    up = {"w": {"a": torch.tensor([[3.0, 4.0], [6.0, 8.0]])}, "extra": torch.tensor([[2.0], [torch.inf]])}
    found = update_norms(alg, task, up, sent, {}, {"w": torch.tensor([[4.0], [7.0]])})
    assert found.tolist() == [[5, 2, 4], [5, torch.inf, 7]]


def test_a_resumed_run_remembers_recent_norms():
    options = {"screen_directions": True, "clip_updates": 1}
    made = run("fedavg", digits("fedavg", participation=4), **options)
    again = SingleRun(method("fedavg"), digits("fedavg", participation=4), 0, plan=EAGER, **options)
    again.restore(made.state())
    assert np.array_equal(again.driver.screening["updates"].recent, made.driver.screening["updates"].recent)
    assert np.array_equal(again.driver.directions.recent, made.driver.directions.recent)
    assert len(made.driver.screening["updates"].recent) == min(8, screening.RECENT)
    assert made.driver.directions.recent.any()
