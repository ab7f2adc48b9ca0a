"""Flower's SuperLink behind a gate: who may send it what. This is a program that `fedloom serve` starts.

By itself the SuperLink runs any program for whoever reaches its port, and reads requests of any length before it asks
who has sent them. Here only sites with a known key reach it from other machines, and only what sites need; the rest is
for programs of this machine that know the server's secret.
"""

from __future__ import annotations

import hmac
import sys
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import uvicorn
from flwr.common.constant import (
    ACCESS_TOKEN_KEY,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.superlink.auth_plugin.noop_auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app

from fedloom.deployment.flower.codec import MAX_OBJECTS, PART_BYTES
from fedloom.deployment.flower.keys import SITES, in_pem

FLEET = "/v1/fleet/"
HERE = ("127.0.0.1", "::1")  # addresses from which programs of this machine come
PART_LIMIT = PART_BYTES + (1 << 20)  # bytes of a request: a part of an array, or less
TREE_LIMIT = 80 * MAX_OBJECTS + (16 << 10)  # bytes of the list of a message's parts

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """A request that is not let through: its status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Gate:
    """Lets requests through to Flower's app, or answers them itself before it has read them."""

    def __init__(self, app: App, keys: Path) -> None:
        """`keys` is the folder with the public keys of the sites that may take part."""
        self.app, self.keys = app, keys
        self._sites: set[bytes] = set()
        self._changed = -1  # when the folder was changed last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            if scope["type"] != "http":
                raise Refused(403, "only requests are answered here")
            self._check(scope)
            await self.app(scope, receive, send)
        except Refused as refused:
            if scope["type"] == "http":
                await _answer(send, refused.status, str(refused))
            else:
                await send({"type": "websocket.close", "code": 1008})

    def _check(self, scope: Scope) -> None:
        """Raise Refused for a request that may not be made, or is too long."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["path"].startswith(FLEET):
            self._check_site(headers)
            limit = TREE_LIMIT if scope["path"] == f"{FLEET}push-messages" else PART_LIMIT
        elif scope["client"] is None or scope["client"][0] not in HERE:
            raise Refused(403, "this is for programs of the server's own machine")
        else:
            limit = sys.maxsize
        if "transfer-encoding" in headers:
            raise Refused(411, "a request has to say how long it is")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > limit:
            raise Refused(413, "the request is too large")

    def _check_site(self, headers: dict[str, str]) -> None:
        """Raise Refused unless a site with a known key has made the request now."""
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            at = headers[TIMESTAMP_HEADER]
            age = (now() - datetime.fromisoformat(at)).total_seconds()
            fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
            known = fresh and key in self._known()
            if known and verify_signature(bytes_to_public_key(key), at.encode("ascii"), signature):
                return
        except (KeyError, ValueError, TypeError):
            pass
        raise Refused(401, "only sites with a key of this federation may take part")

    def _known(self) -> set[bytes]:
        """The keys of the sites, in the format of requests."""
        changed = self.keys.stat().st_mtime_ns
        if changed != self._changed:
            self._sites = {in_pem(path.read_bytes()) for path in self.keys.glob("*.pub")}
            self._changed = changed
        return self._sites


async def _answer(send: Send, status: int, text: str) -> None:
    body = text.encode()
    about = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": about})
    await send({"type": "http.response.body", "body": body})


class OneSecret(NoOpControlAuthnPlugin):
    """Lets those start programs at the server who know its secret."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """True for the secret, with Flower's account of nobody in particular."""
        given = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        asked = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(asked, self.secret.encode()):
            return False, None
        return super().validate_tokens_in_metadata(metadata)


def main() -> None:
    """Run the SuperLink with the arguments of Flower's program; --superexec-auth-secret-file has the secret."""
    config = _parse_superlink_lifespan_config()
    if config.superexec_auth_secret is None:
        sys.exit("The SuperLink needs a secret: --isolation process --superexec-auth-secret-file FILE.")
    config.authn_plugin = OneSecret(config.superexec_auth_secret.decode())
    app = Gate(create_app(config, SuperLinkLifespan), Path(config.database).parent / SITES)
    uvicorn.run(
        app, host=config.host, port=config.port, ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile,
        access_log=False, log_level="warning",
    )  # fmt: skip


if __name__ == "__main__":
    main()
