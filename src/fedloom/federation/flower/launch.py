"""Flower's processes: the SuperLink of a server, the SuperNode of a site."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError
from fedloom.federation.flower import keys
from fedloom.federation.flower.client_app import SITE_FILE
from fedloom.federation.flower.link import node_name
from fedloom.federation.flower.server_app import JOB_FILE
from fedloom.storage.files import json_writer, make_folder, text_writer, write_file

log = logging.getLogger("fedloom")

QUIET = {  # Flower asks hosts of its own for updates, and reports usage, unless it is told not to
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
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
START_SECONDS = 60.0
RETRY_SECONDS = 5.0
WATCH_SECONDS = 2.0


def program(name: str) -> str:
    """The path of a program that was installed with Flower."""
    here = Path(sys.executable).parent / name
    found = str(here) if here.exists() else shutil.which(name)
    if found is None:
        raise UserError(f"The program {name} is missing; install it with \"pip install 'fedloom[flower]'\".")
    return found


def environment(folder: Path) -> dict[str, str]:
    """Environment of Flower's processes, whose own files are in this folder."""
    path = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower starts more of its programs
    )
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(folder.absolute() / "flwr")}


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
        if _answers(self.port):
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
            _wait(lambda: _answers(self.port), process, "The SuperLink", self.folder / "superlink.log")
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
        out = Path(job["out"])
        with self.running() as process:
            self.register()
            run = self.submit(job)
            while not (status := self.status(run)).startswith("finished"):
                watch()
                if process.poll() is not None:
                    raise UserError(f"The SuperLink has ended ({process.returncode}); see {self.folder}/superlink.log.")
                time.sleep(WATCH_SECONDS)
            watch()
            if status != "finished:completed":
                raise UserError(_last_error(out / "run.log") or f"The run has failed; see {self.folder}/superlink.log.")

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


def join(folder: Path, server: str, local: Mapping[str, Any], port: int = 0, once: bool = False) -> None:
    """Take part in a federation until stopped. The SuperNode is started again whenever it ends, since it gives up when
    the server is away, and is refused for some time after it was killed."""
    folder = folder.absolute()
    for name in (keys.NODE_KEY, keys.CA_CERTIFICATE, SITE_FILE):
        if not (folder / name).exists():
            raise UserError(f"{folder / name} is missing; a site's folder is made with 'fedloom keys'.")
    about = json.loads((folder / SITE_FILE).read_text())
    write_file(folder / SITE_FILE, json_writer({**about, "local": dict(local)}))
    command = [
        program("flower-supernode"), "--superlink", server, "--root-certificates", str(folder / keys.CA_CERTIFICATE),
        "--auth-supernode-private-key", str(folder / keys.NODE_KEY), "--port", str(port or free_port()),
        "--node-config", f"fedloom-site={json.dumps(str(folder))}",
    ]  # fmt: skip
    make_folder(folder / "flwr")
    while True:
        with started(command, environment(folder), folder / "supernode.log") as process:
            log.info("Client %d takes part at %s.", about["client"], server)
            code = process.wait()
        if once:
            return
        log.warning("The SuperNode has ended (%d); it is started again in %g s.", code, RETRY_SECONDS)
        time.sleep(RETRY_SECONDS)


@contextmanager
def started(command: list[str], env: Mapping[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, so that it is stopped together with those that it starts. One that an earlier
    call had to leave behind, because it was killed, is stopped first."""
    known = output.with_suffix(".pid")
    _stop_left_behind(known, Path(command[0]).name)
    with output.open("ab") as file:
        process = subprocess.Popen(command, env=dict(env), stdout=file, stderr=file, start_new_session=True)
    write_file(known, text_writer(f"{process.pid}\n"))
    try:
        yield process
    finally:
        _stop(process)
        known.unlink(missing_ok=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for which, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, which)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def _stop_left_behind(known: Path, name: str) -> None:
    """Stop the group of the process whose number is in a file, if it is still there and has this name."""
    with suppress(OSError, ValueError):
        pid = int(known.read_text())
        if name in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
            log.warning("A %s that was left behind is stopped.", name)
            os.killpg(pid, signal.SIGKILL)
            time.sleep(1.0)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within this context, SIGTERM ends the program as Ctrl-C does, so that it stops what it has started. A program
    that was started in the background of a shell ignores Ctrl-C otherwise."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(done: Callable[[], bool], process: subprocess.Popen[bytes], what: str, output: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not done():
        if process.poll() is not None or time.monotonic() > end:
            lines = output.read_text(errors="replace").strip().splitlines()
            raise UserError(f"{what} did not start ({lines[-1] if lines else 'no output'}); see {output}.")
        time.sleep(0.2)


def _last_error(path: Path) -> str:
    """The last error in a run's log, "" if there is none."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    found = [line.partition(" ERROR ")[2] for line in lines if " ERROR " in line]
    return found[-1].strip() if found else ""


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
