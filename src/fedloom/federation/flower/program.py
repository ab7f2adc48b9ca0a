"""The connection within a site's machine. Flower starts a new process for every message; it passes the message on to
the program `fedloom join`, which keeps the data and the model in memory, and brings back the answer."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

ADDRESS_FILE = "program.json"  # in the folder of a site: where its program listens, and the key that opens it
HOST = "127.0.0.1"
RETRY_SECONDS = 0.5

Parts = tuple[str, bytes]  # header and body of a message


class NotRunning(Exception):
    """The site's program does not answer."""


def serve(folder: Path, answer: Callable[[Parts], Parts], started: Callable[[], None] = lambda: None) -> None:
    """Answer messages, one after the other, until an exception such as KeyboardInterrupt. Only who can read the site's
    folder can send one. `started` is called when messages can be sent."""
    key = secrets.token_bytes(32)
    with Listener((HOST, 0), authkey=key) as listener:
        _write_private(folder / ADDRESS_FILE, json.dumps({"port": listener.address[1], "key": key.hex()}))
        started()
        while True:
            try:
                with listener.accept() as connection:
                    _send(connection, answer(_receive(connection)))
            except (AuthenticationError, EOFError, OSError):  # who asked has gone, or may not ask
                continue


def ask(folder: Path, parts: Parts, patience: float = 0.0) -> Parts:
    """The answer of the program of a site; raises NotRunning if there is none. For `patience` seconds it is tried
    again, since a program that was stopped may be started again. Messages may be answered twice."""
    end = time.monotonic() + patience
    while True:
        try:
            about = json.loads((folder / ADDRESS_FILE).read_text())
            with Client((HOST, about["port"]), authkey=bytes.fromhex(about["key"])) as connection:
                _send(connection, parts)
                return _receive(connection)
        except (AuthenticationError, EOFError, OSError, ValueError, KeyError):
            if time.monotonic() >= end:
                raise NotRunning("the program 'fedloom join' is not running at the site") from None
            time.sleep(RETRY_SECONDS)


def _send(connection: Connection, parts: Parts) -> None:
    connection.send_bytes(parts[0].encode())
    connection.send_bytes(parts[1])


def _receive(connection: Connection) -> Parts:
    return connection.recv_bytes().decode(), connection.recv_bytes()


def _write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its owner reads."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(temporary, path)
