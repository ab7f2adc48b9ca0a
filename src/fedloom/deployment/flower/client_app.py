"""Flower's ClientApp: answers FedLoom's messages as a site."""

from __future__ import annotations

import logging

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.deployment.flower.codec import NotAMessage, from_records, to_records
from fedloom.deployment.host import Host
from fedloom.deployment.kinds import FAILURE
from fedloom.deployment.messages import BadMessage, decode_parts, encode_parts
from fedloom.deployment.messages import Message as SiteMessage

log = logging.getLogger("fedloom")


def make_app(host: Host) -> ClientApp:
    """The app of a site, for any method."""
    app = ClientApp()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        return Message(to_records(*_answer(host, message)), reply_to=message)

    return app


def _answer(host: Host, message: Message) -> tuple[str, bytes]:
    """The site's answer. A failure that nobody foresaw is told without its text, which may quote data."""
    try:
        return encode_parts(host.handle(decode_parts(*from_records(message.content))))
    except (NotAMessage, BadMessage) as error:
        why = str(error)
    except Exception as error:
        log.exception("A message could not be answered.")
        why = f"its program failed with {type(error).__name__}, of which it says more"
    return encode_parts(SiteMessage(FAILURE, {"why": why}))
