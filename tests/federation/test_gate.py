"""Which requests reach Flower's SuperLink: those of sites with a known key, and of the server's own programs."""

import asyncio
import base64
import datetime

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import ACCESS_TOKEN_KEY

from fedloom.deployment.flower.codec import MAX_OBJECTS, PART_BYTES
from fedloom.deployment.flower.keys import SITES, in_pem, make_keys
from fedloom.deployment.flower.superlink import Gate, OneSecret

PULL, PUSH, OBJECT = "/v1/fleet/pull-messages", "/v1/fleet/push-messages", "/v1/fleet/push-object"


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path, ["localhost"], 2)
    return tmp_path


def ask(folder, path, headers=(), client="10.0.0.7", kind="http"):
    """The status of a request; 200 if it reached the SuperLink."""
    sent, read = [], []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        read.append(1)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "client": None if client is None else (client, 4711)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in dict(headers).items()]
    asyncio.run(Gate(app, folder / "server" / SITES)(scope, receive, send))
    assert not read  # by the gate
    return sent[0].get("status", sent[0].get("code"))


def signed(folder, site=0, by=None, age=0.0, **more):
    """Headers as a site makes them; `by` is another site, whose key signs."""
    at = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
    by = site if by is None else by
    private = serialization.load_ssh_private_key((folder / f"site-{by}" / "node.key").read_bytes(), None)
    public = in_pem((folder / f"site-{site}" / "node.pub").read_bytes())
    signature = private.sign(at.encode(), ec.ECDSA(hashes.SHA256()))
    made = {"flwr-public-key": public, "flwr-signature": signature}
    made = {name: base64.b64encode(value).decode() for name, value in made.items()}
    return {**made, "flwr-timestamp": at, "content-length": "10", **more}


def test_a_site_with_a_known_key_is_let_through(folder):
    for path in (PULL, PUSH, OBJECT):
        assert ask(folder, path, signed(folder)) == 200


@pytest.mark.parametrize(
    "change",
    [
        {"flwr-public-key": ""}, {"flwr-public-key": "!"}, {"flwr-signature": "AAAA"}, {"flwr-signature": "é"},
        {"flwr-timestamp": "now"}, {"flwr-timestamp": "2020-01-01T00:00:00"}, {"flwr-timestamp": ""},
    ],
)  # fmt: skip
def test_headers_of_any_kind_are_refused(change, folder):
    assert ask(folder, PULL, {**signed(folder), **change}) == 401
    assert ask(folder, PULL) == 401


def test_a_signature_of_another_key_or_time_is_refused(folder, tmp_path):
    assert ask(folder, PULL, signed(folder, site=0, by=1)) == 401
    assert ask(folder, PULL, signed(folder, age=400)) == 401
    assert ask(folder, PULL, signed(folder, age=-60)) == 401
    make_keys(tmp_path / "other", ["localhost"], 1)
    assert ask(folder, PULL, signed(tmp_path / "other")) == 401


def test_a_key_that_is_taken_away_is_refused_at_once(folder):
    headers = signed(folder, site=1)
    assert ask(folder, PULL, headers) == 200
    (folder / "server" / SITES / "client-1.pub").unlink()
    assert ask(folder, PULL, headers) == 401


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [
        (OBJECT, PART_BYTES, 200), (OBJECT, 2 * PART_BYTES, 413), (OBJECT, 10**30, 413), (OBJECT, "-1", 413),
        (PUSH, 70 * MAX_OBJECTS, 200), (PUSH, PART_BYTES, 413),
    ],
)  # fmt: skip
def test_a_request_that_is_too_long_is_refused_before_it_is_read(path, length, status, folder):
    assert ask(folder, path, signed(folder, **{"content-length": str(length)})) == status


def test_a_request_of_unknown_length_is_refused(folder):
    assert ask(folder, PULL, signed(folder, **{"transfer-encoding": "chunked"})) == 411


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleet"])
def test_all_but_what_sites_need_is_for_programs_of_the_same_machine(path, folder):
    for client in ("10.0.0.7", "127.0.0.10.example", None):
        assert ask(folder, path, signed(folder), client) == 403
    for client in ("127.0.0.1", "::1"):
        assert ask(folder, path, client=client) == 200


def test_web_sockets_are_closed(folder):
    assert ask(folder, PULL, signed(folder), kind="websocket") == 1008


@pytest.mark.parametrize(
    ("given", "right"), [("abc", True), (b"abc", True), ("abd", False), ("", False), (None, False)]
)
def test_programs_are_started_only_for_those_who_know_the_secret(given, right):
    metadata = [] if given is None else [(ACCESS_TOKEN_KEY, given)]
    found, account = OneSecret("abc").validate_tokens_in_metadata(metadata)
    assert (found, account is not None) == (right, right)
