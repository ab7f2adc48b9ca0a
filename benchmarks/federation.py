"""Cost of a round of a federation and of a cluster.

    python benchmarks/federation.py [--width 64 4096] [--rounds 20] [--clients 1000] [--quick]

The first table: seconds and bytes of a round with three sites, by the width of an MLP on digits. "one process" passes
every message through bytes, as the tests do; "deployment" is a server and three sites in processes of their own, with
TLS and keys, over the loopback interface. Both train the same run to the same bits, which is checked. Bytes are those
of messages and, of a deployment, of everything that crosses the loopback interface, polls and the server's own programs
included.

The second table: a round of 1,000 clients in the vectorized engine and at one Ray actor, in turns, with as many
threads, by the passes over a client's data. Every process uses one thread, unless OMP_NUM_THREADS says otherwise.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from machine import describe
from scale import BATCH, CLASSES, INPUTS, LR
from scale import federation as many_clients

import fedloom
from fedloom.cluster.actors import RayActors, pickled, session
from fedloom.cluster.clients import ShardedClients
from fedloom.cluster.shards import usual_number
from fedloom.config.keywords import from_keywords
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.task import Task
from fedloom.deployment.flower.keys import make_keys
from fedloom.deployment.host import Host
from fedloom.deployment.links import InProcess
from fedloom.deployment.messages import decode
from fedloom.deployment.serve import Server, Terms
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network

SITES = 3
METHOD = "fedrep"
LOCAL = {"dataset": "digits", "device": "cpu"}
FIRST = 2  # rounds that warm up


def configured(width: int, rounds: int) -> Any:
    values = {"model": "mlp", "width": width, "clients": SITES, "rounds": rounds, "device": "cpu"}
    return from_keywords(METHOD, "digits", values)


def seconds_per_round(result: fedloom.Result) -> float:
    """Median over all rounds but the first."""
    rows = result.timings[FIRST:] if len(result.timings) > FIRST else result.timings
    return float(np.median([row["train_seconds"] + row["eval_seconds"] for row in rows]))


def in_one_process(width: int, rounds: int, folder: Path) -> tuple[fedloom.Result, float]:
    """A run with sites in this process, and bytes of messages per round."""
    link = InProcess({i: Host(i, folder / f"site-{i}", LOCAL) for i in range(SITES)})
    result = Server(link, Terms(repeats=0)).run(configured(width, rounds), out=folder / "run")
    sent = sum(len(order) + len(answer) for _, order, answer in link.log if decode(order).kind == "order")
    return result, sent / rounds


@contextmanager
def processes() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts commands of FedLoom, and stops them in the end."""
    started = []

    def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            command = [sys.executable, "-m", "fedloom", *arguments]
            started.append(subprocess.Popen(command, stdout=output, stderr=output))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def deployed(width: int, rounds: int, folder: Path) -> tuple[fedloom.Result, float, float]:
    """A run of real processes, bytes on the loopback interface per round, and seconds from the command to the first
    round."""
    make_keys(folder / "keys", ["localhost"], SITES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with processes() as start:
        for i in range(SITES):
            where = ("--server", f"localhost:{port}", "--dataset", "digits", "--device", "cpu")
            start(folder / f"site-{i}.txt", "join", str(folder / "keys" / f"site-{i}"), *where)
        begin = time.perf_counter()
        where = ("--keys", str(folder / "keys" / "server"), "--port", port, "--out", str(folder / "run"))
        what = ("--dataset", "digits", "--model", "mlp", "--set", f"width={width}", "--rounds", str(rounds))
        server = start(folder / "server.txt", "serve", METHOD, *where, *what, "--device", "cpu")
        log, before, first = folder / "run" / "run.log", 0, 0.0
        while server.poll() is None:
            if not first and log.exists() and "Checkpoint of round 1" in log.read_text():
                first, before = time.perf_counter() - begin, bytes_on_loopback()
            time.sleep(0.05)
        after = bytes_on_loopback()
        if server.returncode:
            sys.exit((folder / "server.txt").read_text())
    return fedloom.load(folder / "run"), (after - before) / max(1, rounds - 1), first


def bytes_on_loopback() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def federations(widths: list[int], rounds: int) -> None:
    """The first table."""
    print("| model | upload | where | s per round | messages per round | loopback per round | until round 1 |")
    print("|---|--:|---|--:|--:|--:|--:|")
    for width in widths:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            here, messages = in_one_process(width, rounds, Path(one))
            there, loopback, first = deployed(width, rounds, Path(other))
            same = [repr(row) for row in here.rounds] == [repr(row) for row in there.rounds]
            assert same, "the two runs differ"
            model, upload = f"mlp, width {width}", f"{here.last()['bytes_up'] / SITES / 1e3:,.0f} kB"
            print(f"| {model} | {upload} | one process | {seconds_per_round(here):.3f} | {messages / 1e6:.2f} MB | | |")
            print(
                f"| {model} | {upload} | deployment | {seconds_per_round(there):.3f} | {messages / 1e6:.2f} MB | "
                f"{loopback / 1e6:.2f} MB | {first:.0f} s |"
            )


def rounds_of_cluster(ray: bool, clients: int, epochs: int, rounds: int) -> float:
    """Median seconds of a round, after some that warm up."""
    data = many_clients(clients, None)
    build = MODELS["mlp"]().build
    network = Network(lambda: build((INPUTS,), CLASSES), "head", data.x[:2])
    task = Task(data, network, lr=LR, batch_size=BATCH, rounds=rounds, epochs=epochs)
    local: dict[str, Any] = {}
    if ray:
        actors = RayActors(1, on_gpus=False)
        parts = usual_number(clients, 1)
        local = {"make_local": partial(ShardedClients, actors=actors, shards=parts, pickled=pickled)}
    run = Simulation(ALGORITHMS["fedavg"](), task, 0, **local)
    plan = run.clients.make_plan(run.driver, "auto") if ray else "auto"  # type: ignore[union-attr]
    group, times = RunGroup([run], plan), []
    for _ in range(FIRST + rounds):
        start = time.perf_counter()
        group.advance()
        times.append(time.perf_counter() - start)
    return float(np.median(times[FIRST:]))


def clusters(clients: int, epochs: list[int], rounds: int, repeats: int) -> None:
    """The second table."""
    print(f"| FedAvg, {clients:,} clients, epochs | vectorized, ms | ray, 1 actor, ms | ratio |")
    print("|--:|--:|--:|--:|")
    for count in epochs:
        found: dict[bool, list[float]] = {False: [], True: []}
        with session():
            for _ in range(repeats):
                for ray in (False, True):
                    found[ray].append(rounds_of_cluster(ray, clients, count, rounds))
        one, other = min(found[False]), min(found[True])  # on a shared machine noise only adds
        print(f"| {count} | {1e3 * one:.0f} | {1e3 * other:.0f} | {one / other:.2f} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 4096, 20000], help="hidden units of the MLP")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=1000, help="of the second table")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5], help="of the second table")
    parser.add_argument("--repeats", type=int, default=3, help="of the second table")
    parser.add_argument("--only", choices=["federation", "cluster"], help="one of the tables")
    parser.add_argument("--quick", action="store_true", help="few rounds of small runs")
    given = parser.parse_args()
    if given.quick:
        given.width, given.rounds, given.clients, given.epochs, given.repeats = [16], 2, 12, [1], 1
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    print(describe(torch.device("cpu")))
    if given.only != "cluster":
        federations(given.width, given.rounds)
        print()
    if given.only != "federation":
        clusters(given.clients, given.epochs, given.rounds, given.repeats)


if __name__ == "__main__":
    main()
