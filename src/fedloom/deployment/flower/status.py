"""What a server knows of its sites while a run goes on, in a file that `fedloom status` reads."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.deployment.messages import Message
from fedloom.storage.files import json_writer, write_file

FILE = "sites.json"  # in the folder of a server
SECONDS = 1.0  # between two versions of the file, unless something was sent or received


class SiteStatus(NamedTuple):
    """A site, as its server sees it. Times are seconds since 1970."""

    client: int
    connected: bool = False
    asked: str = ""  # what it is doing; "" if nothing was asked that it has not answered
    since: float = 0.0  # when this was asked
    answered: float = 0.0  # when it last answered; 0 if never
    problem: str = ""  # why its last answer could not be used, or did not come


class Sites:
    """Keeps the file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.sites: dict[int, SiteStatus] = {}
        self._written = 0.0

    def connected(self, clients: Iterable[int]) -> None:
        """These sites are connected now, and no others."""
        now = set(clients)
        before = dict(self.sites)
        for i in now | self.sites.keys():
            self._change(i, connected=i in now)
        if self.sites != before or time.monotonic() > self._written + SECONDS:
            self._write()

    def asked(self, messages: dict[int, Message]) -> None:
        """These messages were sent."""
        if not messages:
            return
        for i, message in messages.items():
            self._change(i, asked=_what(message), since=time.time())
        self._write()

    def answered(self, client: int, problem: str = "") -> None:
        """An answer came, or it will not come any more."""
        at = self.sites.get(client, SiteStatus(client)).answered
        self._change(client, asked="", answered=at if problem else time.time(), problem=problem)
        self._write()

    def _change(self, client: int, **values: Any) -> None:
        self.sites[client] = self.sites.get(client, SiteStatus(client))._replace(**values)

    def _write(self) -> None:
        self._written = time.monotonic()
        write_file(self.path, json_writer([one._asdict() for _, one in sorted(self.sites.items())]))


def read(folder: Path) -> list[SiteStatus]:
    """The sites of a server in a folder; none before its first run."""
    try:
        return [SiteStatus(**one) for one in json.loads((folder / FILE).read_text())]
    except FileNotFoundError:
        return []


def _what(message: Message) -> str:
    jobs = message.fields.get("jobs")
    if not jobs:
        return message.kind
    trains = any(job["job"] == "train" for job in jobs)
    return f"{'train' if trains else 'evaluate'}, round {message['t'] + 1 if trains else message['t']}"
