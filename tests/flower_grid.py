"""Flower in one process for tests: the apps of server and sites, and every message between them as Flower's bytes."""

import json
import time
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedloom.deployment.flower import server_app
from fedloom.deployment.flower.client_app import make_app
from fedloom.deployment.flower.link import node_name

CODE_CLIENT_FAILED = 6


def through_bytes(message):
    """The message after it was written to bytes and read."""
    with no_object_id_recompute():
        contents = {id_: part.deflate() for id_, part in get_all_nested_objects(message).items()}
        back = inflate_object_from_contents(message.object_id, contents)
    back.metadata.__dict__["_message_id"] = message.object_id
    return back, sum(map(len, contents.values()))


class LocalGrid(Grid):
    """Runs the ClientApp of a site as soon as a message is pushed to its node."""

    def __init__(self, hosts):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.apps = {i: make_app(host) for i, host in hosts.items()}
        self.replies = {}
        self.bytes = 0
        self.log = []  # (node, message, reply)

    def get_node_ids(self):
        return [100 + client for client in self.apps]

    def get_nodes(self):
        return [NodeInfo(node_id=100 + client, name=node_name(client)) for client in self.apps]

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **options):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def push_messages(self, messages):
        ids = []
        for message in messages:
            arrived, size = through_bytes(message)
            ids.append(message.object_id)
            self.bytes += size
            self.replies[message.object_id] = self.answer(arrived)
        return ids

    def answer(self, message):
        node = message.metadata.dst_node_id
        context = Context(1, node, {}, RecordDict(), {})
        TaskIdentity.node_id = node
        try:
            reply = self.apps[node - 100](message, context)
        except Exception as error:
            reply = Message(Error(CODE_CLIENT_FAILED, str(error)), reply_to=message)
        finally:
            TaskIdentity.node_id = 1
        if reply.has_error():
            return reply
        self.log.append((node - 100, message, reply))
        arrived, size = through_bytes(reply)
        self.bytes += size
        return arrived

    def pull_messages(self, message_ids):
        return [self.replies.pop(id_) for id_ in message_ids if id_ in self.replies]


def run_server_app(folder: Path, grid, job):
    """Carry out a run with the ServerApp."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / server_app.JOB_FILE).write_text(json.dumps(job))
    start = time.perf_counter()
    server_app.app(grid, Context(1, 1, {}, RecordDict(), {"fedloom-server": str(folder)}))
    return time.perf_counter() - start
