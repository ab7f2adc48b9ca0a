"""Flower's ClientApp: passes FedLoom's messages on to the program of the site whose node runs it."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.federation.flower.codec import NotAMessage, from_records, to_records
from fedloom.federation.flower.program import NotRunning, ask
from fedloom.federation.kinds import FAILURE

PATIENCE = 30.0  # seconds in which the site's program may be started again

app = ClientApp()


@app.query()
def answer(message: Message, context: Context) -> Message:
    """The site's answer. Its folder is in the configuration of the node."""
    folder = Path(str(context.node_config["fedloom-site"]))
    try:
        found = ask(folder, from_records(message.content), PATIENCE)
    except (NotAMessage, NotRunning) as error:
        found = json.dumps({"kind": FAILURE, "fields": {"why": str(error)}, "trees": {}}), b""
    return Message(to_records(*found), reply_to=message)
