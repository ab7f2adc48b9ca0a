"""The programs of a federation: the SuperLink of a server, and the node of a site."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

from fedloom.core.errors import UserError
from fedloom.deployment.flower import keys
from fedloom.deployment.flower.client_app import make_app
from fedloom.deployment.flower.control import Control
from fedloom.deployment.flower.link import node_name
from fedloom.deployment.flower.node import ConnectionEnded, Node, take_part
from fedloom.deployment.flower.processes import (
    answers,
    environment,
    program,
    recorded,
    started,
    stop_left_behind,
    wait_for,
)
from fedloom.deployment.flower.server_app import END_FILE, JOB_FILE
from fedloom.deployment.host import Host
from fedloom.runs.folders import exclusive_lock
from fedloom.storage.files import PRIVATE, json_writer, make_folder, text_writer, write_file

log = logging.getLogger("fedloom")

SECRET = "secret"  # in the folder of a server: what programs of this machine must know to use the SuperLink
DATABASE = "superlink.db"  # Flower's: what it has to deliver, and to whom; FedLoom continues without it
LINK_LOG, EXEC_LOG = "superlink.log", "superexec.log"
APP = """\
[project]
name = "fedloom-app"
version = "1.0.0"
license = {text = "see FedLoom"}

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "fedloom.deployment.flower.server_app:app"
clientapp = "fedloom.deployment.flower.client_app:make_app"

[tool.flwr.app.config]
fedloom-server = ""
"""
RETRY_SECONDS = 2.0
PID_FILE = "join.pid"  # in the folder of a site, while its program runs
WATCH_SECONDS = 0.5
STATUS_SECONDS = 5.0  # between two questions whether Flower's run has ended


class Server:
    """A SuperLink on this machine, in whose folder keys and state are."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.folder, self.host, self.port = folder.absolute(), host, port

    @contextmanager
    def running(self) -> Iterator[Popen[bytes]]:
        """Start the SuperLink, and Flower's SuperExec, which starts the server's app; stop them in the end."""
        for name in (keys.CA_CERTIFICATE, keys.SERVER_CERTIFICATE, keys.SERVER_KEY):
            if not (self.folder / name).exists():
                raise UserError(f"{self.folder / name} is missing; make it with 'fedloom keys'.")
        output, authority = self.folder / LINK_LOG, str(self.folder / keys.CA_CERTIFICATE)
        for path in (output, self.folder / EXEC_LOG):
            stop_left_behind(path)
        if answers(self.port):
            raise UserError(f"Port {self.port} of this machine is in use; give another with --port.")
        for path in self.folder.glob(f"{DATABASE}*"):  # for which the sites of an earlier run were still there
            path.unlink()
        make_folder(self.folder / "flwr")
        write_file(self.folder / SECRET, text_writer(secrets.token_hex(32)), PRIVATE)
        env = environment(self.folder)
        secret = ["--superexec-auth-secret-file", str(self.folder / SECRET)]
        link = [
            sys.executable, "-m", "fedloom.deployment.flower.superlink", "--host", self.host, "--port", str(self.port),
            "--ssl-ca-certfile", authority, "--ssl-certfile", str(self.folder / keys.SERVER_CERTIFICATE),
            "--ssl-keyfile", str(self.folder / keys.SERVER_KEY), "--enable-supernode-auth",
            "--database", str(self.folder / DATABASE), "--isolation", "process", *secret,
        ]  # fmt: skip
        with started(link, env, output) as process:
            wait_for(lambda: answers(self.port), process, "The SuperLink", output)
            execute = [
                program("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{self.port}",
                "--root-certificates", authority, *secret,
            ]  # fmt: skip
            with started(execute, env, self.folder / EXEC_LOG):
                yield process

    def control(self) -> Control:
        """A connection to the SuperLink, which runs."""
        return Control(self.port, self.folder / keys.CA_CERTIFICATE, (self.folder / SECRET).read_text())

    def sites(self) -> int:
        """How many sites have keys; raises UserError unless they are numbered from 0."""
        folder = self.folder / keys.SITES
        found = sorted(int(path.stem.removeprefix("client-")) for path in folder.glob("client-*.pub"))
        if not found:
            raise UserError(f"{folder} has no keys of sites; make them with 'fedloom keys'.")
        if found != list(range(len(found))):
            missing = min(set(range(found[-1])) - set(found))
            raise UserError(f"{folder} has no key of client {missing}; make it with 'fedloom keys'.")
        return len(found)

    def register(self, control: Control) -> None:
        """Let those sites take part whose public keys are here."""
        for path in sorted((self.folder / keys.SITES).glob("client-*.pub")):
            control.register(keys.in_pem(path.read_bytes()), node_name(int(path.stem.removeprefix("client-"))))

    def carry_out(self, job: Mapping[str, Any], watch: Callable[[], None] = lambda: None) -> None:
        """Carry out a job from beginning to end; `watch` is called every few seconds. What ends it early can be
        mended, and the same job continues."""
        with exclusive_lock(self.folder), self.running() as process, self.control() as control:
            self.register(control)
            (self.folder / END_FILE).unlink(missing_ok=True)
            write_file(self.folder / JOB_FILE, json_writer(dict(job)))
            run = control.start(APP, {"fedloom-server": str(self.folder)})
            asked = time.monotonic()
            while not (self.folder / END_FILE).exists():
                watch()
                if process.poll() is not None:
                    raise UserError(f"The SuperLink has ended ({process.returncode}); see {self.folder / LINK_LOG}.")
                if time.monotonic() > asked + STATUS_SECONDS:
                    asked = time.monotonic()
                    if control.status(run) == "finished" and not (self.folder / END_FILE).exists():
                        raise UserError(f"The server's program was killed; see {self.folder / EXEC_LOG}.")
                time.sleep(WATCH_SECONDS)
            watch()
        error = json.loads((self.folder / END_FILE).read_text())["error"]
        if error is not None:
            raise UserError(error)


def join(folder: Path, server: str, local: Mapping[str, Any]) -> None:
    """Take part in a federation until KeyboardInterrupt, with the data and the device that `local` names."""
    folder = folder.absolute()
    client = keys.client_of(folder)
    for name in (keys.NODE_KEY, keys.CA_CERTIFICATE):
        if not (folder / name).exists():
            raise UserError(f"{folder / name} is missing; a site's folder is made with 'fedloom keys'.")
    host = Host(client, folder / "runs", dict(local))
    host.check()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it says every request
    app = make_app(host)
    with exclusive_lock(folder), recorded(folder / PID_FILE):
        while True:
            try:
                with Node(server, folder / keys.CA_CERTIFICATE, folder / keys.NODE_KEY) as node:
                    log.info("Connected to %s.", server)
                    take_part(node, app)
            except ConnectionEnded as error:  # the server is away, or takes this site for one that is there already
                log.warning("The connection has ended (%s); it is tried again in %g s.", error, RETRY_SECONDS)
                time.sleep(RETRY_SECONDS)
