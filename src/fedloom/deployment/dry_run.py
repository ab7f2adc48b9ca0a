"""What a site would send in a federation, found by carrying out a round with nobody but the site itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.config.files import ConfigDict
from fedloom.config.resolve import combine, resolve
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.errors import unknown
from fedloom.deployment.host import Host
from fedloom.deployment.kinds import COUNTED, DONE, OFFER, READY, REPLY
from fedloom.deployment.links import InProcess
from fedloom.deployment.messages import Message, decode, paths
from fedloom.deployment.serve import Server, Terms

WHEN = {
    OFFER: "when it is asked what it has",
    COUNTED: "when all have agreed on an encoding",
    READY: "when a run is set up",
    REPLY: "in a round",
    DONE: "when the run is over",
}


class Sent(NamedTuple):
    """A field or tensor of a message."""

    when: str
    name: str
    what: str  # its value or, of a tensor, type, shape and bytes
    meaning: str = ""  # of an upload, in the method's words


def what_is_sent(client: int, local: ConfigDict, algorithm: str) -> list[Sent]:
    """All that this client's site would send in a run of one round: fields of messages with their values, and tensors.

    Args:
        client: the site's client.
        local: what the site decides, see `Host`.
        algorithm: the method of the run.
    """
    if algorithm not in ALGORITHMS.names():
        raise unknown("method", algorithm, ALGORITHMS.names())
    with tempfile.TemporaryDirectory() as folder:
        asked = {"algorithm": algorithm, "rounds": 1}
        one = Host(0, Path(folder), local)
        one.check()
        if one.own is not None:
            client, hosts = 0, {0: one}
        else:
            hosts = {i: Host(i, Path(folder) / str(i), local) for i in range(max(2, client + 1))}
        link = InProcess(hosts)
        server = Server(link, Terms(repeats=0))
        if one.own is not None:
            server.run_on_own_data(asked, 1)
        else:
            server.run(resolve(combine({**asked, "dataset": local["dataset"], "clients": len(hosts)}, _device(local))))
    meanings = ALGORITHMS[algorithm].uploads
    found: dict[tuple[str, str], Sent] = {}
    for i, _, answer in link.log:
        if i == client:
            for one_sent in _of_message(decode(answer), meanings):
                found.setdefault(one_sent[:2], one_sent)
    return list(found.values())


def _device(local: ConfigDict) -> ConfigDict:
    return {key: local[key] for key in ("device", "data_dir") if key in local}


def _of_message(message: Message, meanings: Mapping[str, str]) -> Iterator[Sent]:
    when = WHEN.get(message.kind, message.kind)
    for name, value in _flat(message.fields):
        yield Sent(when, name, json.dumps(value, ensure_ascii=False))
    for tree in message.trees:
        for name, tensor in paths(message.trees[tree]):
            if tensor is not None:
                shape = "x".join(map(str, tensor.shape)) or "one number"
                size = f"{tensor.numel() * tensor.element_size():,} bytes"
                kind = str(tensor.dtype).removeprefix("torch.")
                yield Sent(when, f"{tree}/{name}", f"{shape}, {kind}, {size}", meanings.get(name.partition("/")[0], ""))


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for j, one in enumerate(value):
                yield from _flat(one, f"{prefix}{name}.{j}.")
        else:
            yield f"{prefix}{name}", value
