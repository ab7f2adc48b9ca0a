"""Server and clients exchange requests and replies, and nothing else: what these contain, and that any loop may carry
them between a driver and its clients."""

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import make_federation, make_task, method, methods

from fedloom.core.tree import leaves, size_bytes
from fedloom.engine.clients import ClientReplies, ClientRequest
from fedloom.engine.driver import Driver
from fedloom.engine.executors.per_client import PerClientExecutor
from fedloom.engine.plan import Plan
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation

SIZES = (7, 12, 3, 21, 5, 9, 4)
HELD_OUT = 2  # of these clients, the last ones
PLAN = Plan("per-client", scoring="per-client")
OPTIONS = {"eval_client_ids": np.array([0, 2, 3]), "join_rounds": 2}
SETTINGS = {  # to be fast
    "dap-fl": {"ep_max": 2},
    "page": {"ep_max": 2},
    "fedrecon": {"query_epochs": 2},
    "fedala": {"start_epochs": 3},
}


def task_for(alg, **settings):
    """With the fewest samples that the method can run with."""
    least = alg.min_samples(make_task((1,)))
    data = replace(make_federation([max(n, least) for n in SIZES], server=20), held_out=HELD_OUT)
    share = 0.6 if alg.partial else 1.0
    return make_task((), federation=data, participation=share, batch_size=5, **settings)


def executor_for(simulation):
    return PerClientExecutor(simulation.alg, simulation.task, PLAN, simulation.population)


@torch.no_grad()
def drive(steps, answer):
    """What a generator of a driver returns, if `answer` carries out its requests."""
    try:
        request = next(steps)
        while True:
            request = steps.send(answer(request))
    except StopIteration as end:
        return end.value


def two_rounds(driver, answer):
    return [(drive(driver.train_round(), answer), drive(driver.evaluation(), answer)) for _ in range(2)]


def plain_rounds(rounds):
    """What rounds return, comparable to the bit."""
    return [plain([vars(done) for done in both]) for both in rounds]


def recorded_rounds(alg, task):
    """Two rounds of a simulation: what they return, and the requests with their replies."""
    simulation, messages = Simulation(alg, task, 3, **OPTIONS), []
    executor = executor_for(simulation)

    def answer(request):
        messages.append((request, simulation.clients.ask(request, executor)))
        return messages[-1][1]

    return simulation, two_rounds(simulation.driver, answer), messages


def plain(tree):
    """The tree's values, comparable to the bit."""
    arrays = [v.numpy() if isinstance(v, torch.Tensor) else v for v in leaves(tree)]
    return [v.tobytes() if isinstance(v, np.ndarray) else v for v in arrays]


def values(message):
    return {field.name: plain(getattr(message, field.name)) for field in fields(message)}


def without_client_data(task):
    """The task of a server that has its own samples, but none of the clients'."""
    x, y = torch.full_like(task.data.x, torch.nan), torch.zeros_like(task.data.y)
    x[task.data.server], y[task.data.server] = task.data.x[task.data.server], task.data.y[task.data.server]
    return replace(task, data=replace(task.data, x=x, y=y))


@pytest.mark.parametrize("name", methods())
def test_a_server_needs_nothing_but_replies_and_replies_have_no_class_counts(name):
    """A driver without clients and without their samples, which is given the recorded replies, sends the same requests.
    So these contain no private state; and it arrives at the same server state and the same scores."""
    alg = method(name, **SETTINGS.get(name, {}))
    task = task_for(alg)
    simulation, expected, messages = recorded_rounds(alg, task)
    jobs = {(request.job, request.join_round) for request, _ in messages}
    assert jobs == {("train", None), ("evaluate", None), ("evaluate", 0), ("train", 0), ("train", 1)}
    for request, replies in messages:
        assert isinstance(request, ClientRequest)
        assert isinstance(replies, ClientReplies)
        assert (replies.info is not None) == (request.job == "train")
        if replies.info is not None:
            assert replies.info.counts.shape == (len(request.ids), 0)
            assert replies.info.id.tolist() == request.ids.tolist()

    server_task = without_client_data(simulation.task)
    driver = Driver(alg, server_task, 3, held_out=HELD_OUT, **OPTIONS)
    left = iter(messages)

    def answer(request):
        sent, replies = next(left)
        assert values(request) == values(sent)
        return replies

    found = two_rounds(driver, answer)
    assert next(left, None) is None
    assert plain_rounds(found) == plain_rounds(expected)
    assert plain(driver.server) == plain(simulation.server)


@pytest.mark.parametrize("name", methods())
def test_traffic_is_the_size_of_what_is_sent(name):
    alg = method(name, **SETTINGS.get(name, {}))
    _, rounds, messages = recorded_rounds(alg, task_for(alg))
    for t, (trained, _) in enumerate(rounds):
        sent = [pair for pair in messages if (pair[0].job, pair[0].join_round, pair[0].t) == ("train", None, t)]
        down = [size_bytes(request.shared) * len(request.ids) + alg.size_of_parts(request.parts) for request, _ in sent]
        assert trained.bytes_down == sum(down)
        assert trained.bytes_up == sum(size_bytes(replies.up) for _, replies in sent)
        assert np.concatenate([request.ids for request, _ in sent]).tolist() == trained.cohort.tolist()


@pytest.mark.parametrize("name", methods())
def test_a_hand_written_loop_gives_what_a_run_group_gives(name):
    """To the bit, with running statistics and held-out clients."""
    alg = method(name, **SETTINGS.get(name, {}))
    task = task_for(alg, norm=True, dropout=0.2)
    simulation, rounds, _ = recorded_rounds(alg, task)
    group = RunGroup([Simulation(alg, task, 3, **OPTIONS)], PLAN)
    for trained, evaluated in rounds:
        (expected,) = group.advance()
        for done in (trained, evaluated):
            for field, value in vars(done).items():
                assert plain(value) == plain(getattr(expected, field)), field
    (other,) = group.runs
    assert plain(simulation.server) == plain(other.server)
    assert plain(simulation.store.everyone()) == plain(other.store.everyone())
    assert simulation.store.trained.tolist() == other.store.trained.tolist()
    assert len(simulation.store) == len(SIZES) - HELD_OUT


def test_only_training_of_participants_changes_the_store():
    """Evaluation does not, nor do clients that join for evaluation."""
    simulation = Simulation(method("ditto"), task_for(method("ditto"), norm=True), 3, **OPTIONS)
    executor = executor_for(simulation)
    kept = []

    def answer(request):
        replies = simulation.clients.ask(request, executor)
        kept.append((request.job, request.join_round, plain(simulation.store.snapshot())))
        return replies

    two_rounds(simulation.driver, answer)
    for (*_, before), (job, join_round, after) in pairwise(kept):
        assert (before != after) == (job == "train" and join_round is None)


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_running_statistics_need_not_be_sent(name):
    """Training and the scores of participants are the same without them; a newcomer has the initial ones."""
    alg = method(name)
    task = task_for(alg, norm=True)
    simulation = Simulation(alg, task, 3, **OPTIONS)
    executor = executor_for(simulation)
    found = two_rounds(simulation.driver, lambda request: replace(simulation.clients.ask(request, executor), stats={}))
    assert simulation.driver.stats == {}
    other, expected, _ = recorded_rounds(alg, task)
    for (trained, evaluated), (trained_with, evaluated_with) in zip(found, expected, strict=True):
        assert plain(vars(trained)) == plain(vars(trained_with))
        assert plain(evaluated.scores) == plain(evaluated_with.scores)
    assert plain(simulation.server) == plain(other.server)
    assert plain(simulation.store.everyone()) == plain(other.store.everyone())
    assert plain(evaluated.unseen_scores) != plain(evaluated_with.unseen_scores)
