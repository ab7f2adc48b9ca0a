"""A federation of real processes on this machine: a server and three sites, with certificates and keys.

These tests take minutes; `make test-federation` runs them.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedloom import load
from fedloom.config.keywords import from_keywords
from fedloom.federation.flower.keys import make_keys
from fedloom.federation.flower.processes import free_port
from fedloom.studies.execute import execute

pytestmark = pytest.mark.federation

SITES = 3
DEADLINE = 300  # seconds


class Deployment:
    """Processes of `fedloom join` and `fedloom serve`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.processes = folder, free_port(), {}
        make_keys(folder / "keys", ["localhost"], SITES)
        self.out = folder / "run"

    def start(self, name, *arguments) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "fedloom", *arguments]
        with (self.folder / f"{name}.txt").open("ab") as output:
            self.processes[name] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        return self.processes[name]

    def join(self, i, **changes) -> subprocess.Popen:
        site, dataset = self.folder / "keys" / f"site-{i}", changes.pop("dataset", "digits")
        where = ["--server", f"localhost:{self.port}", "--dataset", str(dataset), "--device", "cpu"]
        return self.start(f"site-{i}", "join", str(site), *where)

    def serve(self, method, *more) -> subprocess.Popen:
        keys = ["--keys", str(self.folder / "keys" / "server"), "--port", str(self.port)]
        return self.start("server", "serve", method, *keys, "--out", str(self.out), "--device", "cpu", *more)

    def kill(self, name) -> None:
        """As when the machine loses its power: nothing is closed."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(60)

    def said(self, name) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def wait_for_round(self, t) -> None:
        def there():
            path = self.out / "rounds.parquet"
            try:
                return path.exists() and len(load(self.out).rounds) >= t
            except Exception:
                return False

        wait(there, f"round {t}\\n{self.said('server')}")


def wait(condition, what) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.5)


@pytest.fixture
def deployment(tmp_path):
    made = Deployment(tmp_path)
    yield made
    made.stop()


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
    assert [repr(row) for row in found.rounds] == [repr(row) for row in expected.rounds]
    assert found.clients.equals(expected.clients)


@pytest.mark.parametrize("method", ["fedrep", "scaffold"])
def test_a_deployment_gives_the_bits_of_one_process(method, deployment):
    for i in range(SITES):
        deployment.join(i)
    server = deployment.serve(method, "--dataset", "digits", "--rounds", "2")
    assert server.wait(DEADLINE) == 0, deployment.said("server")
    same_rounds(load(deployment.out), reference(method, rounds=2))


def test_sites_and_server_that_are_killed_change_nothing(deployment):
    for i in range(SITES):
        deployment.join(i)
    command = ("ditto", "--dataset", "digits", "--rounds", "5", "--deadline", "120", "--repeats", "5")
    deployment.serve(*command)
    deployment.wait_for_round(1)
    deployment.kill("site-1")
    time.sleep(1)
    deployment.join(1)
    deployment.wait_for_round(3)
    deployment.kill("server")
    time.sleep(1)
    assert deployment.serve(*command).wait(DEADLINE) == 0, deployment.said("server")
    same_rounds(load(deployment.out), reference("ditto", rounds=5))


def test_sites_train_on_data_of_their_own(deployment):
    for i in range(SITES):
        lines = [f"{k % 7 + 10 * (k % 2)},{k % 5},{'ab'[k % 2]}" for k in range(40 + i)]
        path = deployment.folder / f"{i}.csv"
        path.write_text("\n".join(["x,z,label", *lines]))
        deployment.join(i, dataset=path)
    server = deployment.serve("fedavg", "--rounds", "2")
    assert server.wait(DEADLINE) == 0, deployment.said("server")
    assert len(load(deployment.out).rounds) == 2


def test_a_site_with_an_unknown_key_or_another_authority_is_refused(deployment, tmp_path):
    """The others train without it."""
    other = tmp_path / "other"
    make_keys(other, ["localhost"], SITES)
    site = deployment.folder / "keys" / "site-2"
    (site / "node.key").write_bytes((other / "site-2" / "node.key").read_bytes())
    for i in range(SITES):
        deployment.join(i)
    server = deployment.serve("fedavg", "--dataset", "digits", "--rounds", "1", "--deadline", "40", "--repeats", "0")
    assert server.wait(DEADLINE) == 2
    assert "The run cannot begin without the sites 2: its site is not connected" in deployment.said("server")
    assert "refused" in deployment.said("site-2") or "ended" in deployment.said("site-2")
