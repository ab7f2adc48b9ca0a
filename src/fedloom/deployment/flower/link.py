"""Carries messages to sites as Flower's messages."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping

import httpx
from flwr.app import Message as FlowerMessage
from flwr.app import MessageType
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedloom.core.errors import printable
from fedloom.deployment.flower.answers import Answers
from fedloom.deployment.flower.codec import NotAMessage, from_records, to_records
from fedloom.deployment.flower.status import Sites
from fedloom.deployment.kinds import FAILURE
from fedloom.deployment.messages import BadMessage, Message, decode_parts, encode_parts
from fedloom.deployment.replies import MAX_TEXT, said

log = logging.getLogger("fedloom")

NODE_NAME = re.compile(r"client-(\d{1,9})")
POLL = 0.5  # seconds between two looks for answers


def node_name(client: int) -> str:
    """The name under which the node of a client is registered with its key."""
    return f"client-{client}"


class FlowerLink:
    """Reaches each client at the node that is registered under its name. A node has its name from the server, together
    with its key, so no site can take the place of another."""

    def __init__(self, grid: Grid, sleep: Callable[[float], None] = time.sleep, status: Sites | None = None) -> None:
        """`status` is told what is sent and what comes back, for people to read."""
        self.grid, self.sleep, self.status, self.answers = grid, sleep, status, Answers(grid)

    def nodes(self) -> dict[int, NodeInfo]:
        """The node of every client that is there."""
        found: dict[int, NodeInfo] = {}
        twice = set()
        for node in self.grid.get_nodes():
            match = NODE_NAME.fullmatch(node.name)
            if match is None:
                continue
            client = int(match[1])
            if client in found:
                twice.add(client)
            found[client] = node
        for client in twice:  # no name is given twice, unless somebody registered keys by hand
            log.warning("Two nodes are registered as client %d; neither is used.", client)
            del found[client]
        return found

    def exchange(self, messages: Mapping[int, Message], deadline: float) -> dict[int, Message | str]:
        """Send the messages, and wait for their answers."""
        end = time.monotonic() + deadline
        waiting = dict(messages)
        sent: dict[str, int] = {}  # id of a message -> client
        began: dict[int, str] = {}  # client -> since when its site had been connected when it was sent to
        answers: dict[int, Message | str] = {}
        while time.monotonic() < end and (waiting or sent):
            nodes = self.nodes()
            ready = {i: waiting.pop(i) for i in list(waiting) if i in nodes}
            began |= {i: nodes[i].last_activated_at for i in ready}
            sent |= self._push({nodes[i].node_id: (i, message) for i, message in ready.items()}, end - time.monotonic())
            if self.status is not None:
                self.status.connected(nodes)
                self.status.asked(ready)
            for number, client in list(sent.items()):
                found = self._pull(number)
                if found is not None:
                    del sent[number]
                    answers[client] = found
                    if self.status is not None:
                        self.status.answered(client, _problem(found))
                elif client in nodes and nodes[client].last_activated_at != began[client]:
                    del sent[number]  # the site has started again, and knows nothing of the message
                    self.answers.forget(number)
                    waiting[client] = messages[client]
            if waiting or sent:
                self.sleep(POLL)
        for number in sent:
            self.answers.forget(number)
        late = f"no answer within {deadline:g} s"
        missing = dict.fromkeys(sent.values(), late) | dict.fromkeys(waiting, "its site is not connected")
        for client, why in missing.items():
            if self.status is not None:
                self.status.answered(client, why)
        return answers | missing

    def _pull(self, number: str) -> Message | str | None:
        """The answer to a message, or why there is none; None if it is still awaited. Answers are fetched one by one,
        since one that cannot be read would take others with it."""
        try:
            answer = self.answers.pull(number)
            return None if answer is None else _read(answer)
        except httpx.HTTPError:  # of the server's own programs
            raise
        except Exception as error:
            log.debug("An answer cannot be read.", exc_info=error)
            self.answers.forget(number)
            return f"its answer cannot be read ({type(error).__name__})"

    def _push(self, messages: Mapping[int, tuple[int, Message]], ttl: float) -> dict[str, int]:
        """Ids of messages that were sent, and their clients."""
        if not messages:
            return {}
        made = []
        for node, (_, message) in messages.items():
            records = to_records(*encode_parts(message), nonce=secrets.token_hex(16))
            made.append(FlowerMessage(records, node, MessageType.QUERY, ttl=max(1.0, ttl)))
        ids = list(self.grid.push_messages(made))
        if len(ids) != len(made):
            raise BadMessage("the message is too large for the server")
        return {id_: client for id_, (client, _) in zip(ids, messages.values(), strict=True)}


def _problem(found: Message | str) -> str:
    if isinstance(found, str):
        return found
    return said(found) if found.kind == FAILURE else ""


def _read(answer: FlowerMessage) -> Message | str:
    if answer.has_error():
        return printable(f"its site failed ({answer.error.reason or f'code {answer.error.code}'})"[:MAX_TEXT])
    try:
        return decode_parts(*from_records(answer.content))
    except (NotAMessage, BadMessage) as error:
        return str(error)
