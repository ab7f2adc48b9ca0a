"""A federation of real processes for tests: `fedloom serve` and `fedloom join`, with certificates and keys."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from fedloom import load
from fedloom.config.keywords import from_keywords
from fedloom.deployment.flower.keys import make_keys
from fedloom.studies.execute import execute

SITES = 3
DEADLINE = 300  # seconds
STOP_SECONDS = 60


class Deployment:
    """The processes, their keys and what they say. They start where `inside` puts them, such as another host."""

    def __init__(self, folder: Path, *, host="localhost", sites=SITES) -> None:
        self.folder, self.host, self.port, self.processes = folder, host, free_port(), {}
        self.keys, self.out = folder / "keys", folder / "run"
        make_keys(self.keys, [host], sites)

    def start(self, name, *arguments, inside=()) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*inside, sys.executable, "-m", "fedloom", *arguments]
        with (self.folder / f"{name}.txt").open("ab") as output:
            self.processes[name] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        return self.processes[name]

    def join(self, i, *, dataset="digits", name=None, site=None, inside=()) -> subprocess.Popen:
        """Start site i; `site` is its folder."""
        where = ["--server", f"{self.host}:{self.port}", "--dataset", str(dataset), "--device", "cpu"]
        return self.start(name or f"site-{i}", "join", str(site or self.site(i)), *where, inside=inside)

    def serve(self, method, *more, out=None, name="server", inside=()) -> subprocess.Popen:
        self.out = out or self.out
        where = ["--keys", str(self.keys / "server"), "--port", str(self.port), "--out", str(self.out)]
        return self.start(name, "serve", method, *where, "--device", "cpu", *more, inside=inside)

    def site(self, i) -> Path:
        return self.keys / f"site-{i}"

    def kill(self, name, *, whole=False) -> None:
        """Kill a program, or with it all that it has started, as when its machine loses its power."""
        process = self.processes.pop(name)
        family = [psutil.Process(process.pid)]
        if whole:
            family += family[0].children(recursive=True)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()

    def stop(self, *names) -> None:
        """Stop programs as Ctrl-C does; all of them if none is named."""
        stopped = [self.processes.pop(name) for name in names or list(self.processes)]
        for process in stopped:
            process.terminate()
        for process in stopped:
            process.wait(STOP_SECONDS)

    def said(self, name) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def rounds(self) -> int:
        """Rounds whose results are there."""
        path = self.out / "rounds.parquet"
        try:
            return len(load(self.out).rounds) if path.exists() else 0
        except Exception:  # between two files of the same round
            return 0

    def wait_for_round(self, t) -> None:
        wait(lambda: self.rounds() >= t, lambda: f"round {t}\n{self.said('server')}")

    def wait_until_said(self, name, text) -> None:
        wait(lambda: text in self.said(name), lambda: f"{name} does not say '{text}' but\n{self.said(name)}")

    def completed(self, process) -> None:
        """The server has carried out its run."""
        assert process.wait(DEADLINE) == 0, self.said("server")


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait(condition, what) -> None:
    """Wait until a condition holds; `what()` says what is missing."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.5)


def reference(method, **settings):
    """The same run in one process, with as many threads: their number decides the last bits of a sum."""
    usual = {"clients": SITES, "device": "cpu", "engine": "reference"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return execute(from_keywords(method, "digits", {**usual, **settings}))
    finally:
        torch.set_num_threads(threads)


def same_rounds(found, expected) -> None:
    """Every number of every round and client is the same."""
    assert [repr(row) for row in found.rounds] == [repr(row) for row in expected.rounds]  # NaN is not equal to itself
    assert found.clients.equals(expected.clients)
