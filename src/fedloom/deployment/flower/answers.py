"""Fetching the answers of sites from the SuperLink, as far as they have arrived.

The SuperLink lists an answer as soon as a site begins to send it, and Flower's grid then waits for all its parts. If
the site has been killed in between, that takes minutes, in which nothing else is fetched. Here an answer is looked for
again until it is complete, and whoever asks decides how long.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from flwr.app import Message as FlowerMessage
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, inflate_object_from_contents
from flwr.superlink.grid import HttpGrid

AT_ONCE = 8  # parts that are fetched at the same time


@dataclass
class _Arriving:
    """An answer of which some parts may still be on their way."""

    number: str  # of the answer itself
    missing: list[str]  # numbers of parts
    parts: dict[str, bytes] = field(default_factory=dict)


class Answers:
    """The answers to messages that were sent over a grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._arriving: dict[str, _Arriving] = {}

    def pull(self, message: str) -> FlowerMessage | None:
        """The answer to a message, once; None if it is not complete yet."""
        if not isinstance(self.grid, HttpGrid):
            return next(iter(self.grid.pull_messages([message])), None)
        answer = self._arriving.get(message) or self._begin(self.grid, message)
        if answer is None or not _complete(self.grid, answer):
            return None
        self.forget(message)
        received = ConfirmMessageReceivedRequest(
            node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=answer.number
        )
        self.grid._runtime_client.ConfirmMessageReceived(received)
        found = inflate_object_from_contents(answer.number, answer.parts)
        assert isinstance(found, FlowerMessage)
        found.metadata.__dict__["_message_id"] = answer.number  # which is not part of what it is the digest of
        return found

    def forget(self, message: str) -> None:
        """Give up the answer to a message."""
        self._arriving.pop(message, None)

    def _begin(self, grid: HttpGrid, message: str) -> _Arriving | None:
        """The answer to a message if a site has begun to send it; the SuperLink says so once."""
        found = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=[message]))
        for about, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            parts = [part.object_id for part in iterate_object_tree(tree)]
            self._arriving[message] = _Arriving(about.metadata.message_id, parts)
        return self._arriving.get(message)


def _complete(grid: HttpGrid, answer: _Arriving) -> bool:
    """Fetch what has arrived of an answer. True if that is all; raises an exception if the rest will not come."""
    pull = make_pull_object_fn_protobuf(grid._runtime_client.PullObject, grid.node, grid.run.run_id)

    def part(number: str) -> bytes | None:
        try:
            return pull(number)
        except ObjectUnavailableError:
            return None

    first, *others = answer.missing
    found = {first: part(first)}
    if found[first] is not None and others:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found |= zip(others, pool.map(part, others), strict=True)
    answer.parts |= {number: content for number, content in found.items() if content is not None}
    answer.missing = [number for number in answer.missing if number not in answer.parts]
    return not answer.missing
