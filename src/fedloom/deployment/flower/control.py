"""Requests of the server's program to its SuperLink, which starts runs for nobody else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufClientInterceptor, ProtobufRequestContext

from fedloom.core.errors import UserError


class Control:
    """A connection to the SuperLink of this machine."""

    def __init__(self, port: int, authority: Path, secret: str) -> None:
        """`authority` is the file with the certificate that the SuperLink's is signed with."""
        interceptors: list[ProtobufClientInterceptor] = [RuntimeVersionHttpInterceptor("flwr CLI"), _WithSecret(secret)]
        self.client = ControlHttpClient.from_server_address(
            f"127.0.0.1:{port}", False, authority.read_bytes(), interceptors
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def register(self, key: bytes, name: str) -> None:
        """Let the site with this public key take part under a name."""
        with _said_plainly():
            self.client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def start(self, app: str, values: Mapping[str, str]) -> int:
        """Start a run of an app that is described in a pyproject.toml, with some of its values; returns Flower's number
        of it."""
        content, _ = build_fab_from_files({"pyproject.toml": app.encode()})
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        asked = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(values)))
        with _said_plainly():
            return int(self.client.StartRun(asked).run_id)

    def status(self, run: int) -> str:
        """What Flower says about a run: pending, starting, running or finished."""
        with _said_plainly():
            return str(self.client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status.status)


class _WithSecret:
    """Adds the server's secret to every request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers["Authorization"] = f"Bearer {self.secret}"
        return call_next(context)


@contextmanager
def _said_plainly() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPStatusError as error:
        found = FlowerError.from_json(error.response.text)
        why = str(found.message if found else error)
        raise UserError(f"Flower's SuperLink refuses a request: {why.rstrip('.')}.") from None
    except httpx.TransportError as error:
        raise UserError(f"Flower's SuperLink does not answer: {str(error).rstrip('.')}.") from None
