"""What goes wrong at a site or on the way is named, and the round goes on; nothing that was learnt is lost."""

import errno
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import Federated, advance, plain, same_round
from helpers import methods

from fedloom.core.tree import tree_map
from fedloom.deployment.links import InProcess
from fedloom.deployment.messages import Message, decode, encode
from fedloom.deployment.remote import TooFewReplies
from fedloom.storage import files

STATEFUL = ["ditto", "scaffold", "page", "pfedkt", "fedfomo", "pfedhn"]


class Faulty(InProcess):
    """A link on which `faults` change what comes from a client: its answer, bytes, or a sentence if nothing came."""

    def __init__(self, sites):
        super().__init__(sites)
        self.faults = {}  # client -> function of the message and its answer

    def _one(self, i, message):
        answer = super()._one(i, message)
        return self.faults[i](message, answer) if i in self.faults else answer


def lost(message, answer):
    return "no answer within 600 s"


def changed(**trees):
    """A fault that changes the upload."""

    def fault(message, answer):
        up = answer.trees.get("up")
        return answer if up is None else replace(answer, trees={"up": {**up, **trees}})

    return fault


def fields(**changes):
    def fault(message, answer):
        return replace(answer, fields={**answer.fields, **changes})

    return fault


def result(**changes):
    def fault(message, answer):
        *before, last = answer["results"]
        return replace(answer, fields={**answer.fields, "results": [*before, {**last, **changes}]})

    return fault


def tensors(function):
    def fault(message, answer):
        return replace(answer, trees=tree_map(function, dict(answer.trees)))

    return fault


BAD = {  # what a site may send instead of its reply to an order to train -> what is said of it
    "wrong shape": (tensors(lambda v: v[..., :-1] if v.dim() else v), "has shape"),
    "wrong type": (tensors(lambda v: v.float()), "has type torch.float32 instead of torch.float64"),
    "another tensor": (changed(extra=torch.zeros(3)), "'up/extra' was not asked for"),
    "a missing upload": (lambda m, a: replace(a, trees={}), "is missing"),
    "a missing tensor": (
        lambda m, a: replace(a, trees={"up": {"w": {k: v for k, v in a.trees["up"]["w"].items() if "bias" not in k}}}),
        "'up/w/first.bias' is missing",
    ),
    "another tree": (lambda m, a: replace(a, trees={**a.trees, "more": torch.zeros(2)}), "has more than an upload"),
    "another round": (fields(t=7), "its reply is one to another order"),
    "another client": (fields(client=2), "its reply is one to another order"),
    "another run": (fields(run="other"), "its reply is one to another order"),
    "more samples": (result(n=10**9), "it has 1000000000 training samples, but it said 12 at the start"),
    "no samples": (result(n=None), "it has None training samples"),
    "no scores": (result(scores=None), "its reply does not have the scores"),
    "scores that are no numbers": (result(scores={"post": {"val": ["a"] * 3, "test": [0, 0, 0]}}), "are not 3 numbers"),
    "infinite costs": (result(computed=[float("inf"), 1]), "does not say what it computed"),
    "no results": (fields(results="none"), "its reply does not have the results"),
    "another kind": (lambda m, a: Message("hello"), "its answer is no reply"),
    "nothing": (lost, "no answer within 600 s"),
}


def training(fault, *rounds):
    """The fault, of replies to orders to train (in these rounds) only."""

    def apply(message, answer):
        trains = any(job["job"] == "train" for job in message["jobs"])
        return fault(message, answer) if trains and (not rounds or message["t"] in rounds) else answer

    return apply


@pytest.mark.parametrize("what", BAD)
def test_a_bad_reply_is_named_and_the_round_goes_on_without_it(what, tmp_path, caplog):
    fault, said = BAD[what]
    federated = Federated("fedavg", tmp_path, wrap=Faulty, minimum=2)
    federated.link.faults[1] = training(fault, 1)
    found, expected = advance(federated.server), advance(federated.simulation)
    for view, split in (("pre", "train"), ("pre", "test"), ("post", "test"), ("global", "test")):
        assert plain(found.scores[view][split][[0, 2]]) == plain(expected.scores[view][split][[0, 2]])
    found = advance(federated.server)
    assert "Round 2: client 1 is left out: " in caplog.text
    assert said in caplog.text
    same_round(found, advance(federated.simulation, cohort=np.array([0, 2])))
    same_round(advance(federated.server), advance(federated.simulation))
    federated.same_state()


@pytest.mark.parametrize("name", methods())
def test_every_method_goes_on_without_a_client(name, tmp_path):
    """It continues later from the state after the last round in which its upload was used."""
    federated = Federated(name, tmp_path, wrap=Faulty, minimum=0)
    federated.link.faults[1] = training(lost, 1)
    advance(federated.server)
    assert advance(federated.server).cohort.tolist() == [0, 2]
    assert advance(federated.server).cohort.tolist() == [0, 1, 2]
    assert federated.server.store.of(np.arange(3)).tolist() == [2, 2, 2]
    federated.sites[1].store.open(2)
    assert federated.sites[1].store.trained[1] == 2
    assert all(torch.isfinite(v).all() for v in torch.utils._pytree.tree_leaves(federated.server.server))


def test_values_that_are_no_numbers_are_left_out_but_the_client_continues(tmp_path, caplog):
    federated = Federated("ditto", tmp_path, wrap=Faulty)
    federated.link.faults[1] = tensors(lambda v: v * torch.nan)
    found = advance(federated.server)
    assert "Client 1 diverged in round 1: its upload has NaN or infinite values" in caplog.text
    assert found.reports["diverged"].tolist() == [0, 1, 0]
    assert federated.server.store.of(np.arange(3)).tolist() == [0, 0, 0]


def test_evaluation_goes_on_without_a_client(tmp_path):
    federated = Federated("ditto", tmp_path, wrap=Faulty, minimum=2)
    federated.link.faults[1] = lambda m, a: lost(m, a) if m["jobs"][0]["job"] == "evaluate" else a
    found, expected = advance(federated.server), advance(federated.simulation)
    for view, splits in expected.scores.items():
        for split, rows in splits.items():
            assert plain(found.scores[view][split][[0, 2]]) == plain(rows[[0, 2]])
    assert not found.scores["pre"]["test"][1].any()  # it counts as a client without samples


def test_too_few_replies_repeat_the_round_and_then_end_the_run(tmp_path, caplog):
    federated = Federated("ditto", tmp_path, wrap=Faulty, minimum=3, repeats=2)
    federated.link.faults[2] = training(changed(extra=torch.zeros(1)), 1)
    same_round(advance(federated.server), advance(federated.simulation))
    with pytest.raises(TooFewReplies, match=r"Round 2 needs 3 replies and has 2; nothing usable came from clients 2\."):
        advance(federated.server)
    assert caplog.text.count("other clients are asked again") == 2
    replies = [(i, decode(answer)) for i, _, answer in federated.link.log]
    tries = [i for i, reply in replies if reply["t"] == 1 and reply.trees]
    assert tries == [0, 1, 2, 2, 2, 2]  # those that have answered are not asked again
    federated.link.faults.clear()
    same_round(advance(federated.server), advance(federated.simulation))
    federated.same_state()


def test_a_reply_that_comes_after_the_round_was_repeated_changes_nothing(tmp_path):
    federated = Federated("ditto", tmp_path, wrap=Faulty, minimum=3)
    failing = iter([True, False])
    federated.link.faults[1] = training(lambda m, a: lost(m, a) if next(failing, False) else a)
    for _ in range(3):
        same_round(advance(federated.server), advance(federated.simulation))
    federated.same_state()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_server_that_goes_back_to_its_checkpoint_ends_as_one_that_did_not(name, tmp_path):
    """It dies after a round and before the checkpoint of it; sites have trained the round already."""
    federated = Federated(name, tmp_path, durable=True)
    for t in range(4):
        saved = federated.server.state()
        federated.server.store.committed()
        advance(federated.server)  # is lost
        if t % 2:
            federated.restart()
        federated.server = federated.new_server()
        federated.server.restore(saved)
        same_round(advance(federated.server), advance(federated.simulation))
    federated.same_state()


def test_a_server_that_is_older_than_its_checkpoint_is_refused(tmp_path, caplog):
    federated = Federated("ditto", tmp_path, trains_ahead=False, durable=True, repeats=0)
    advance(federated.server)
    old = federated.server.state()
    for _ in range(3):
        federated.server.store.committed()
        advance(federated.server)
    federated.server = federated.new_server()
    federated.server.restore(old)
    with pytest.raises(TooFewReplies):
        advance(federated.server)
    assert "the server continues after round 1, but the newest state here is of round 4" in caplog.text


def test_a_site_keeps_no_more_states_than_the_server_may_ask_for(tmp_path):
    federated = Federated("ditto", tmp_path, trains_ahead=False, durable=True)
    for t in range(5):
        federated.server.store.committed()
        advance(federated.server)
        assert federated.sites[0].store.rounds() == {t - 1, t} - {-1}


def test_a_full_disk_at_a_site_costs_a_round_and_nothing_else(tmp_path, monkeypatch, caplog):
    federated = Federated("ditto", tmp_path, trains_ahead=False, minimum=2, repeats=0)
    same_round(advance(federated.server), advance(federated.simulation))
    full = federated.sites[1].store.folder
    real = files.write_temporary

    def write(path, *arguments):
        if path.parent == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *arguments)

    monkeypatch.setattr(files, "write_temporary", write)
    same_round(advance(federated.server), advance(federated.simulation, cohort=np.array([0, 2])))
    assert "client 1 is left out: its site says: " in caplog.text
    assert "The disk is full" in caplog.text
    monkeypatch.undo()
    same_round(advance(federated.server), advance(federated.simulation))
    federated.same_state()


def test_a_site_that_has_lost_its_state_says_so(tmp_path, caplog):
    federated = Federated("ditto", tmp_path, trains_ahead=False, minimum=2, repeats=0)
    advance(federated.server)
    for path in federated.sites[1].store.folder.iterdir():
        path.unlink()
    advance(federated.server)
    assert "client 1 is left out: its site says: the server continues after round 1, but there is no state here; " in (
        caplog.text
    )


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:-4] + b"abcd"])
def test_damaged_state_at_a_site_is_not_used(damage, tmp_path, caplog):
    federated = Federated("ditto", tmp_path, trains_ahead=False, minimum=2, repeats=0)
    advance(federated.server)
    (path,) = federated.sites[1].store.folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert advance(federated.server).cohort.tolist() == [0, 2]
    assert "cannot be used" in caplog.text


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (Message("hello"), "does not know what to do with a message of kind 'hello'"),
        (Message("order", {"run": "other", "client": 0}), "the order is for client 0 of run other"),
        (Message("order", {"run": "run", "client": 1}), "the order is for client 1 of run run"),
        (Message("order", {"run": "run"}), "'client' is missing"),
        (Message("order", {"run": "run", "client": 0, "t": 0, "base": -1, "saved": -1}), "'jobs' is missing"),
    ],
)
def test_a_site_answers_an_order_that_it_cannot_carry_out_with_the_reason(order, said, tmp_path):
    federated = Federated("fedavg", tmp_path)
    answer = federated.sites[0].handle(order)
    assert answer.kind == "failure"
    assert said in answer["why"]
    assert len(encode(answer)) < 1000
