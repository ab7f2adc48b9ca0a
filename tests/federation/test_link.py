"""How messages reach sites over Flower: whom they go to, and what comes of those that are not answered."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.app import Error, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedloom.deployment.flower.codec import from_records, to_records
from fedloom.deployment.flower.link import FlowerLink
from fedloom.deployment.kinds import FAILURE
from fedloom.deployment.messages import Message as SiteMessage
from fedloom.deployment.messages import decode_parts, encode_parts

ORDER = SiteMessage("order", {"t": 3})


class Server:
    """Flower's grid as a test needs it: `answer(message, n)` is what comes of the n-th message, if anything."""

    def __init__(self, answer, names=("client-0",)):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.answer, self.names, self.started = answer, list(names), "monday"
        self.pushed, self.answers = [], {}

    def get_nodes(self):
        return [NodeInfo(node_id=7 + i, name=name, last_activated_at=self.started) for i, name in enumerate(self.names)]

    def push_messages(self, messages):
        ids = [message.object_id for message in messages]
        for number, message in zip(ids, messages, strict=True):
            self.pushed.append((message.metadata.dst_node_id, from_records(message.content)))
            self.answers[number] = self.answer(message, len(self.pushed))
        return ids

    def pull_messages(self, numbers):
        found = [self.answers.pop(number) for number in numbers if self.answers.get(number) is not None]
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found


def reply(message, n):
    return Message(to_records(*encode_parts(SiteMessage("reply", {"n": n}))), reply_to=message)


def exchange(server, deadline=5.0, sleep=lambda seconds: None, clients=(0,)):
    return FlowerLink(server, sleep).exchange(dict.fromkeys(clients, ORDER), deadline)


def test_an_answer_comes_from_the_node_with_the_name_of_the_client():
    server = Server(reply, ["client-1", "stranger", "client-0"])
    found = exchange(server, clients=(0, 1))
    assert [found[i].kind for i in (0, 1)] == ["reply", "reply"]
    assert [node for node, _ in server.pushed] == [9, 7]
    assert all(decode_parts(*parts) == ORDER for _, parts in server.pushed)


def test_two_nodes_with_one_name_are_not_used(caplog):
    server = Server(reply, ["client-0", "client-0"])
    assert exchange(server, 0.05) == {0: "its site is not connected"}
    assert "Two nodes are registered as client 0; neither is used." in caplog.text


def test_a_site_that_has_started_again_is_asked_again_at_once():
    """It knows nothing of what its last process was asked."""
    server = Server(lambda message, n: None if n == 1 else reply(message, n))

    def sleep(seconds):
        server.started = "tuesday"

    assert exchange(server, 60.0, sleep)[0].fields == {"n": 2}
    assert len(server.pushed) == 2


def test_an_answer_that_came_before_a_restart_is_taken():
    server = Server(reply)
    real = server.push_messages

    def push(messages):
        found = real(messages)
        server.started = "tuesday"
        return found

    server.push_messages = push
    assert exchange(server)[0].fields == {"n": 1}
    assert len(server.pushed) == 1


def test_a_site_that_is_slow_is_asked_once():
    server = Server(lambda message, n: None)
    assert exchange(server, 0.05) == {0: "no answer within 0.05 s"}
    assert len(server.pushed) == 1


@pytest.mark.parametrize("wrong", [ValueError("x"), AttributeError("x"), KeyError("x"), MemoryError()])
def test_an_answer_that_cannot_be_read_costs_no_other(wrong):
    server = Server(lambda message, n: wrong if n == 1 else reply(message, n), ["client-0", "client-1"])
    found = exchange(server, clients=(0, 1))
    assert found[0] == f"its answer cannot be read ({type(wrong).__name__})"
    assert found[1].kind == "reply"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda m: Message(Error(5, "node\x1b[2J is\ngone"), reply_to=m), "its site failed (node\\x1b[2J is\\ngone)"),
        (lambda m: Message(RecordDict(), reply_to=m), "these records are no message of FedLoom"),
        (lambda m: Message(to_records("[", b""), reply_to=m), "these bytes are no message of FedLoom"),
    ],
)
def test_what_comes_instead_of_an_answer_is_said(made, said):
    assert exchange(Server(lambda message, n: made(message))) == {0: said}


def test_the_status_has_no_long_or_hostile_text(tmp_path):
    from fedloom.deployment.flower.status import Sites, read

    why = "\x1b[2J" + "x" * 10**6
    failure = SiteMessage(FAILURE, {"why": why})
    server = Server(lambda message, n: Message(to_records(*encode_parts(failure)), reply_to=message))
    FlowerLink(server, lambda seconds: None, Sites(tmp_path)).exchange({0: ORDER}, 5.0)
    (site,) = read(tmp_path)
    assert site.problem.isprintable()
    assert len(site.problem) < 600


def test_no_message_can_be_guessed():
    """Who knows the number of a message could answer it in another's name: equal messages have other numbers."""
    server, numbers = Server(reply), []
    real = server.push_messages
    server.push_messages = lambda messages: numbers.append(real(messages)) or numbers[-1]
    for _ in range(2):
        exchange(server)
    assert numbers[0] != numbers[1]
    records = [to_records("{}", b"x", nonce) for nonce in ("a", "b", "")]
    assert len({record.object_id for record in records}) == 3


# -- answers that arrive in parts


class Parts(HttpGrid):
    """Flower's grid for a server whose sites send their answers in parts. `arrived(number, part)` says whether a part
    of the answer to the n-th message has arrived."""

    def __init__(self, arrived, names=("client-0",)):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.arrived, self.names, self.started = arrived, list(names), dict.fromkeys(names, "monday")
        self.node, self.confirmed, self.asked, self.answers, self.contents = Node(node_id=1), [], [], {}, {}

    run = property(lambda self: SimpleNamespace(run_id=1))
    _runtime_client = property(lambda self: self)

    def get_nodes(self):
        names = enumerate(self.names)
        return [NodeInfo(node_id=7 + i, name=name, last_activated_at=self.started[name]) for i, name in names]

    def push_messages(self, messages):
        for message in messages:
            self.asked.append(message.metadata.dst_node_id - 7)
            answer = reply(message, len(self.asked))
            answer.metadata.__dict__["_message_id"] = answer.object_id
            parts = get_all_nested_objects(answer)
            self.contents |= {id_: (len(self.asked), i, part.deflate()) for i, (id_, part) in enumerate(parts.items())}
            self.answers[message.object_id] = message_to_proto(answer), get_object_tree(answer)
        return [message.object_id for message in messages]

    def PullMessages(self, request):
        found = [self.answers.pop(id_) for id_ in request.message_ids if id_ in self.answers]  # they are told once
        return SimpleNamespace(messages_list=[a for a, _ in found], message_object_trees=[b for _, b in found])

    def PullObject(self, request):
        number, part, content = self.contents[request.object_id]
        there = self.arrived(number, part)
        return SimpleNamespace(object_found=there is not None, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)


def test_an_answer_is_read_when_all_its_parts_have_arrived():
    looks = []

    def sleep(seconds):
        looks.append(list(grid.confirmed))

    grid = Parts(lambda number, part: part <= len(looks))
    found = exchange(grid, sleep=sleep)
    assert found[0].fields == {"n": 1}
    assert len(looks) == max(part for _, part, _ in grid.contents.values()) > 1
    assert not any(looks)
    assert len(grid.confirmed) == 1


def test_an_answer_that_was_cut_off_delays_no_other_and_its_site_is_asked_again_when_it_is_back():
    """A site is killed while it sends its answer: the rest never comes."""
    looks = []

    def sleep(seconds):
        looks.append(len(grid.confirmed))
        if len(looks) == 5:
            grid.started["client-0"] = "tuesday"

    grid = Parts(lambda number, part: number != 1 or part == 0, ["client-0", "client-1"])
    found = exchange(grid, sleep=sleep, clients=(0, 1))
    assert {i: found[i].fields for i in (0, 1)} == {0: {"n": 3}, 1: {"n": 2}}
    assert looks[0] == 1  # that of the other site
    assert grid.asked == [0, 1, 0]


def test_an_answer_that_was_cut_off_costs_no_more_than_the_deadline():
    grid = Parts(lambda number, part: False)
    link = FlowerLink(grid, lambda seconds: None)
    assert link.exchange({0: ORDER}, 0.2) == {0: "no answer within 0.2 s"}
    assert not link.answers._arriving


def test_a_part_that_will_not_come_is_said():
    grid = Parts(lambda number, part: None if part == 1 else True)
    assert exchange(grid) == {0: "its answer cannot be read (ObjectPullError)"}
