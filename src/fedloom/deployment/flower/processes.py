"""Starting Flower's programs, and stopping them whatever happens."""

from __future__ import annotations

import json
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

import psutil

from fedloom.core.errors import UserError
from fedloom.storage.files import json_writer, write_file

QUIET = {  # Flower asks hosts of its own for updates, and reports usage, unless it is told not to
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
START_SECONDS = 60.0
STOP_SECONDS = 10.0


def program(name: str) -> str:
    """The path of a program that was installed with Flower."""
    here = Path(sys.executable).parent / name
    found = str(here) if here.exists() else shutil.which(name)
    if found is None:
        raise UserError(f"The program {name} is missing; install it with \"pip install 'fedloom[flower]'\".")
    return found


def environment(folder: Path) -> dict[str, str]:
    """Environment of Flower's programs, whose own files are in this folder. They start more of them by name."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(folder.absolute() / "flwr")}


@contextmanager
def started(command: list[str], env: Mapping[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to a file; in the end it is stopped, with those that it has started. One that this
    program had to leave behind, because it was killed, is stopped first."""
    stop_left_behind(output)
    with output.open("ab") as file:
        process = subprocess.Popen(command, env=dict(env), stdout=file, stderr=file, start_new_session=True)
    with recorded(output.with_suffix(".pid"), process.pid):
        try:
            yield process
        finally:
            _stop(psutil.Process(process.pid))
            process.wait()


@contextmanager
def recorded(path: Path, pid: int | None = None) -> Iterator[None]:
    """Within this context, the file says which process it is: this one, or another."""
    found = psutil.Process(pid)
    write_file(path, json_writer({"pid": found.pid, "since": found.create_time()}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def stop_left_behind(output: Path) -> None:
    """Stop the process with this output that an earlier program has started and left behind."""
    found = _process(output.with_suffix(".pid"))
    if found is not None:
        _stop(found)


def is_running(path: Path) -> bool:
    """True if the process that a file says (`recorded`) is running."""
    return _process(path) is not None


def _process(path: Path) -> psutil.Process | None:
    with suppress(OSError, ValueError, KeyError, psutil.NoSuchProcess):
        about = json.loads(path.read_text())
        found = psutil.Process(about["pid"])
        return found if found.create_time() == about["since"] else None  # numbers of processes are used again
    return None


def _stop(process: psutil.Process) -> None:
    """Ask a process to end, and kill what of it and its children is left."""
    with suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
        process.terminate()
        for left in psutil.wait_procs(family, STOP_SECONDS)[1]:
            with suppress(psutil.NoSuchProcess):
                left.kill()


def wait_for(done: Callable[[], bool], process: subprocess.Popen[bytes], what: str, output: Path) -> None:
    """Wait until a process has started; raises UserError if it does not."""
    end = time.monotonic() + START_SECONDS
    while not done():
        if process.poll() is not None or time.monotonic() > end:
            lines = output.read_text(errors="replace").strip().splitlines()
            raise UserError(f"{what} did not start ({lines[-1] if lines else 'no output'}); see {output}.")
        time.sleep(0.2)


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


def answers(port: int) -> bool:
    """True if somebody listens at a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
