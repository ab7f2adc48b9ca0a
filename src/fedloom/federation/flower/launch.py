"""Flower's processes: the SuperLink of a server, the SuperNode of a site."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError
from fedloom.federation.flower import keys
from fedloom.federation.flower.link import node_name
from fedloom.federation.flower.processes import (
    answers,
    environment,
    free_port,
    program,
    started,
    stop_left_behind,
    wait_for,
)
from fedloom.federation.flower.program import Parts, serve
from fedloom.federation.flower.server_app import END_FILE, JOB_FILE
from fedloom.federation.host import Host
from fedloom.federation.kinds import FAILURE
from fedloom.federation.messages import BadMessage, Message, decode_parts, encode_parts
from fedloom.runs.folders import exclusive_lock
from fedloom.storage.files import json_writer, make_folder, text_writer, write_file

log = logging.getLogger("fedloom")

REGISTERED = "registered.json"  # in the folder of a server: keys that Flower knows already
CONNECTION = "fedloom"  # name of the SuperLink in Flower's configuration
APP = """\
[project]
name = "fedloom-app"
version = "1.0.0"
license = {text = "see FedLoom"}

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "fedloom.federation.flower.server_app:app"
clientapp = "fedloom.federation.flower.client_app:app"

[tool.flwr.app.config]
fedloom-server = ""
"""
RETRY_SECONDS = 5.0
WATCH_SECONDS = 0.5
STATUS_SECONDS = 15.0  # Flower's command that says whether a run has ended takes a second


class Server:
    """A SuperLink on this machine, in whose folder keys and state are."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.folder, self.host, self.port = folder.absolute(), host, port

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the SuperLink and stop it in the end."""
        for name in (keys.CA_CERTIFICATE, keys.SERVER_CERTIFICATE, keys.SERVER_KEY):
            if not (self.folder / name).exists():
                raise UserError(f"{self.folder / name} is missing; make it with 'fedloom keys'.")
        stop_left_behind(self.folder / "superlink.log")
        if answers(self.port):
            raise UserError(f"Port {self.port} of this machine is in use; give another with --port.")
        self._configure()
        command = [
            program("flower-superlink"), "--host", self.host, "--port", str(self.port),
            "--ssl-ca-certfile", str(self.folder / keys.CA_CERTIFICATE),
            "--ssl-certfile", str(self.folder / keys.SERVER_CERTIFICATE),
            "--ssl-keyfile", str(self.folder / keys.SERVER_KEY),
            "--enable-supernode-auth", "--database", str(self.folder / "superlink.db"),
            "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        with started(command, environment(self.folder), self.folder / "superlink.log") as process:
            wait_for(lambda: answers(self.port), process, "The SuperLink", self.folder / "superlink.log")
            yield process

    def _configure(self) -> None:
        """Write Flower's configuration, and the app that it sends around."""
        home, app = self.folder / "flwr", self.folder / "app"
        for path in (home, app):
            make_folder(path)
        certificate = json.dumps(str(self.folder / keys.CA_CERTIFICATE))
        connection = f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = {certificate}\n'
        write_file(home / "config.toml", text_writer(connection))
        write_file(app / "pyproject.toml", text_writer(APP))

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

    def register(self) -> int:
        """Let those sites take part whose public keys are here; returns their number."""
        known = sorted((self.folder / keys.SITES).glob("client-*.pub"))
        done = self.folder / REGISTERED
        registered = json.loads(done.read_text()) if done.exists() else {}
        for path in known:
            name, key = node_name(int(path.stem.removeprefix("client-"))), path.read_text()
            if registered.get(name) != key:
                self.flwr("supernode", "register", str(path), CONNECTION, "--name", name)
                registered[name] = key
                write_file(done, json_writer(registered))
        return len(known)

    def submit(self, job: Mapping[str, Any]) -> int:
        """Start the ServerApp; returns Flower's number of the run."""
        write_file(self.folder / JOB_FILE, json_writer(dict(job)))
        where = f"fedloom-server={json.dumps(str(self.folder))}"
        return int(self._json("run", str(self.folder / "app"), CONNECTION, "--run-config", where)["run-id"])

    def carry_out(self, job: Mapping[str, Any], watch: Callable[[], None] = lambda: None) -> None:
        """Carry out a job from beginning to end; `watch` is called every few seconds. What ends it early can be
        mended, and the same job continues."""
        with exclusive_lock(self.folder), self.running() as process:
            self.register()
            (self.folder / END_FILE).unlink(missing_ok=True)
            run = self.submit(job)
            asked = time.monotonic()
            while not (self.folder / END_FILE).exists():
                watch()
                if process.poll() is not None:
                    raise UserError(f"The SuperLink has ended ({process.returncode}); see {self.folder}/superlink.log.")
                if time.monotonic() > asked + STATUS_SECONDS:
                    asked = time.monotonic()
                    if self.status(run).startswith("finished") and not (self.folder / END_FILE).exists():
                        raise UserError(f"The server's program was killed; see {self.folder}/superlink.log.")
                time.sleep(WATCH_SECONDS)
            watch()
        error = json.loads((self.folder / END_FILE).read_text())["error"]
        if error is not None:
            raise UserError(error)

    def status(self, run: int) -> str:
        """What Flower says about a run, such as `running` or `finished:completed`."""
        found = self._json("list", "--run-id", str(run), CONNECTION)
        return str(found["runs"][0]["status"])

    def flwr(self, *arguments: str) -> str:
        """The output of Flower's command line."""
        command = [program("flwr"), *arguments]
        done = subprocess.run(command, env=environment(self.folder), capture_output=True, text=True, timeout=120)
        if done.returncode:
            said = (done.stderr + done.stdout).strip().splitlines()
            raise UserError(f"Flower's command 'flwr {' '.join(arguments[:2])}' failed: {said[-1] if said else ''}")
        return done.stdout

    def _json(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.flwr(*arguments, "--format", "json"))


def join(folder: Path, server: str, local: Mapping[str, Any], port: int = 0) -> None:
    """Take part in a federation until KeyboardInterrupt, with the data and the device that `local` names."""
    folder = folder.absolute()
    client = keys.client_of(folder)
    for name in (keys.NODE_KEY, keys.CA_CERTIFICATE):
        if not (folder / name).exists():
            raise UserError(f"{folder / name} is missing; a site's folder is made with 'fedloom keys'.")
    command = [
        program("flower-supernode"), "--superlink", server, "--root-certificates", str(folder / keys.CA_CERTIFICATE),
        "--auth-supernode-private-key", str(folder / keys.NODE_KEY), "--port", str(port or free_port()),
        "--node-config", f"fedloom-site={json.dumps(str(folder))}",
    ]  # fmt: skip
    make_folder(folder / "flwr")
    host = Host(client, folder / "runs", dict(local))
    host.check()
    stop = threading.Event()
    node = threading.Thread(target=_keep_connected, args=(command, folder, stop))
    with exclusive_lock(folder):
        try:
            serve(folder, partial(answered, host), node.start)
        finally:
            stop.set()
            if node.is_alive():
                node.join()


def answered(host: Host, parts: Parts) -> Parts:
    """The site's answer to a message. A failure that nobody foresaw is told without its text, which may quote data."""
    try:
        found = host.handle(decode_parts(*parts))
    except BadMessage as error:
        found = Message(FAILURE, {"why": str(error)})
    except Exception as error:
        log.exception("A message could not be answered.")
        found = Message(FAILURE, {"why": f"its program failed with {type(error).__name__}, of which it says more"})
    return encode_parts(found)


def _keep_connected(command: list[str], folder: Path, stop: threading.Event) -> None:
    """Run the SuperNode. It is started again whenever it ends, since it gives up when the server is away, and is
    refused for some time after it was killed."""
    output = folder / "supernode.log"
    while not stop.is_set():
        with started(command, environment(folder), output) as process:
            while process.poll() is None and not stop.wait(WATCH_SECONDS):
                pass
        if not stop.is_set():
            lines = output.read_text(errors="replace").strip().splitlines()
            why = lines[-1].strip() if lines else "no output"
            log.warning("The connection has ended (%s); it is tried again in %g s.", why, RETRY_SECONDS)
            stop.wait(RETRY_SECONDS)
