"""Flower's ClientApp: answers FedLoom's messages for the site whose node runs it."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.federation.flower.codec import from_records, to_records
from fedloom.federation.host import Host
from fedloom.federation.messages import BadMessage
from fedloom.federation.messages import Message as FedLoomMessage
from fedloom.federation.site import FAILURE

SITE_FILE = "site.json"  # in the folder of a site: its client and what it decides itself

app = ClientApp()
_hosts: dict[str, Host] = {}  # by folder, where a process answers several messages


@app.query()
def answer(message: Message, context: Context) -> Message:
    """The site's answer. Its folder is in the configuration of the node."""
    try:
        found = host(str(context.node_config["fedloom-site"])).handle(from_records(message.content))
    except BadMessage as error:
        found = FedLoomMessage(FAILURE, {"why": str(error)})
    return Message(to_records(found), reply_to=message)


def host(folder: str) -> Host:
    """The site in a folder."""
    if folder not in _hosts:
        about = json.loads((Path(folder) / SITE_FILE).read_text())
        _hosts[folder] = Host(about["client"], Path(folder) / "runs", about["local"])
    return _hosts[folder]
