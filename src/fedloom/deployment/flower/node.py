"""A site's connection to Flower's SuperLink.

Flower's own program for it, the SuperNode, runs the code that comes with a run, in a new process for every message. A
server could have a site run anything. This node asks for messages in the same way, but answers them itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedloom.core.errors import UserError
from fedloom.deployment.flower.codec import MAX_OBJECTS

POLL_SECONDS = 0.5  # between two questions whether there is a message
HEARTBEAT_SECONDS = 10.0  # the shortest that Flower allows; after twice as long without one, a site counts as gone


class ConnectionEnded(Exception):
    """The server cannot be reached, or does not let this site take part; says why. It can be tried again."""


class Node:
    """A site at a SuperLink, while it is open as a context."""

    def __init__(self, server: str, authority: Path, key: Path) -> None:
        """
        Args:
            server: `host:port`.
            authority: file with the certificate of the authority that has signed the server's.
            key: file with the site's private key.
        """
        private = serialization.load_ssh_private_key(key.read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        self.public_key = public_key_to_bytes(private.public_key())
        interceptors: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(private, private.public_key())
        ]  # fmt: skip
        try:
            self.client = FleetHttpClient.from_server_address(server, False, authority.read_bytes(), interceptors)
        except (ValueError, OSError) as error:
            raise UserError(f"{authority} cannot be used ({error}); copy the site's folder again.") from None
        self.node = FlowerNode()
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Self:
        asked = ActivateNodeRequest(public_key=self.public_key, heartbeat_interval=HEARTBEAT_SECONDS)
        with _said_plainly():
            self.node = FlowerNode(node_id=self.client.ActivateNode(asked).node_id)
        TaskIdentity.node_id = self.node.node_id
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._heart.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self.node.node_id:
            with suppress(httpx.HTTPError, RuntimeError):
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        self.client.close()

    def _beat(self) -> None:
        """Let the server know that this site is there, also while it trains."""
        beat = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT_SECONDS)
        while not self._ended.wait(HEARTBEAT_SECONDS / 2):
            with suppress(httpx.HTTPError):  # the next question will fail, too, if it lasts
                self.client.SendNodeHeartbeat(beat)

    def receive(self) -> FlowerMessage | None:
        """The next message for this site; None if there is none now."""
        with _said_plainly():
            found = self.client.PullMessages(PullMessagesRequest(node=self.node))
            if not found.messages_list:
                return None
            run, tree = found.messages_list[0].metadata.run_id, found.message_object_trees[0]
            if sum(1 for _ in iterate_object_tree(tree)) > MAX_OBJECTS:
                raise ConnectionEnded("the server sends a message that is too large")
            pull = make_pull_object_fn_protobuf(self.client.PullObject, self.node, run)
            confirm = make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, self.node, run)
            message = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=FlowerMessage)
        message.metadata.__dict__["_message_id"] = tree.object_id  # which is not part of what it is the digest of
        TaskIdentity.run_id = TaskIdentity.task_id = run
        return message

    def send(self, reply: FlowerMessage) -> None:
        """Send the answer to a message."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        run = reply.metadata.run_id
        with _said_plainly(), no_object_id_recompute():
            objects, about = get_all_nested_objects(reply), message_to_proto(reply)
            about.content.Clear()  # it goes in parts
            asked = PushMessagesRequest(
                node=self.node, messages_list=[about], message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],
            )  # fmt: skip
            found = self.client.PushMessages(asked)
            push = make_push_object_fn_protobuf(self.client.PushObject, self.node, run, found.session_id)
            push_objects(objects, push, object_ids_to_push=set(found.objects_to_push))


def take_part(node: Node, app: ClientApp) -> None:
    """Answer messages by the app, until the connection ends."""
    while True:
        message = node.receive()
        if message is None:
            time.sleep(POLL_SECONDS)
        else:
            node.send(app(message, Context(message.metadata.run_id, node.node.node_id, {}, RecordDict(), {})))


@contextmanager
def _said_plainly() -> Iterator[None]:
    """Errors of the network and of Flower's protocol, as a ConnectionEnded that says what is wrong."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise ConnectionEnded(_refusal(error.response)) from None
    except httpx.TransportError as error:
        raise ConnectionEnded(str(error) or type(error).__name__) from None
    except ConnectionEnded:
        raise
    except Exception as error:  # of many kinds, where bytes are not what they should be
        raise ConnectionEnded(f"a message could not be carried over: {type(error).__name__} {error}") from None


def _refusal(response: httpx.Response) -> str:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return "the server does not know the key of this site"
    found = FlowerError.from_json(response.text)
    if found is None:
        return f"the server answers with status {response.status_code}"
    return ". ".join(part.strip().rstrip(".") for part in (found.message, found.public_details) if part)
