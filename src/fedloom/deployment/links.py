"""Links between a server and sites in the same process, for tests and examples."""

from collections.abc import Mapping
from typing import Protocol

from fedloom.deployment.messages import BadMessage, Message, decode, encode


class Answers(Protocol):
    """Somebody who answers messages."""

    def handle(self, message: Message) -> Message:
        """The answer to a message."""


class InProcess:
    """Sites in this process. Every message goes through bytes, so that nothing can be shared by mistake."""

    def __init__(self, sites: Mapping[int, Answers]) -> None:
        self.sites = sites
        self.log: list[tuple[int, bytes, bytes]] = []  # client, order, answer

    def exchange(self, messages: Mapping[int, Message], deadline: float) -> dict[int, Message | str]:
        answers: dict[int, Message | str] = {}
        for i, message in messages.items():
            try:
                answers[i] = self._one(i, message)
            except BadMessage as error:
                answers[i] = str(error)
        return answers

    def _one(self, i: int, message: Message) -> Message:
        order = encode(message)
        answer = encode(self.sites[i].handle(decode(order)))
        self.log.append((i, order, answer))
        return decode(answer)
