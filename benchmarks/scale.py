"""Cost of a round and peak memory by number of clients: a cohort of 100 trains and a fixed 100 are evaluated.

    python benchmarks/scale.py [--clients 100 1000 10000 100000] [--algorithm fedrep] [--filled] [--quick]

Every case (a population and a place for the clients' private state) runs in a process of its own, so that the peak of
memory is its own; the samples are part of it, and so are pages of files that the system keeps mapped. With private
state on disk, the samples are in a file, too, which is mapped to memory (`np.memmap`), so only those that are used take
it. Times are medians over rounds, after two that warm up. The whole list of cases is run five times (`--repeats`), and
the table shows the lowest of the five medians: on a shared machine noise only adds. About five minutes.

A checkpoint is saved every 10 rounds. `round` is training and evaluation alone, `with checkpoint` adds a tenth of the
checkpoint. The first checkpoint does not count: a store on disk has nothing to bring into its files yet.

A run from the start has trained few of 100,000 clients when it ends. `--filled` measures a late state instead: every
client has trained before. Files are below TMPDIR and are removed.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.federation import Federation, Ragged
from fedloom.core.keys import rng
from fedloom.core.task import Task
from fedloom.engine.client_store import ClientStore, make_store
from fedloom.engine.plan import Plan
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network
from fedloom.runs.checkpoints import Checkpoints

COHORT = EVALUATED = 100
SAMPLES = {"train": 20, "val": 5, "test": 5}  # per client
INPUTS, CLASSES, BATCH, LR = 32, 10, 10, 0.01
PLAN = Plan("stacked", "traced", chunk=COHORT)  # one for all, so that only the population differs
STORES = ("memory", "disk")
WARM_UP, EVERY = 2, 10
BASE = 1000  # clients that ratios refer to
BLOCK = 1000  # clients filled at once

Case = dict[str, float]


def federation(clients: int, file: Path | None) -> Federation:
    """Samples in memory or, mapped to memory, in a file."""
    draw = np.random.default_rng(0)
    each = sum(SAMPLES.values())
    shape = clients * each, INPUTS
    if file is None:
        x = draw.standard_normal(shape, dtype=np.float32)  # no float64 in between: it would be the peak
    else:
        with file.open("wb") as opened:
            for _ in range(clients):
                draw.standard_normal((each, INPUTS), dtype=np.float32).tofile(opened)
            os.fsync(opened.fileno())  # not while rounds are timed
        x = np.memmap(file, np.float32, "c", shape=shape)
    y = draw.integers(0, CLASSES, clients * each)
    columns = np.split(np.arange(clients * each).reshape(clients, each), np.cumsum(list(SAMPLES.values()))[:-1], axis=1)
    splits = {
        name: Ragged(torch.from_numpy(rows.reshape(-1)), np.arange(clients + 1) * rows.shape[1])
        for name, rows in zip(SAMPLES, columns, strict=True)
    }
    return Federation(torch.from_numpy(x), torch.from_numpy(y), CLASSES, splits)


def fill(store: ClientStore) -> None:
    """Every client has a row, and none of them waits for a checkpoint."""
    for ids in np.array_split(np.arange(len(store)), -(-len(store) // BLOCK)):
        store.write(ids, store.initial_rows(ids))
        store.committed()
    store.committed()


def measure(clients: int, store: str, algorithm: str, rounds: int, filled: bool) -> Case:
    """What one process does."""
    evaluated = rng("eval", 0).choice(clients, EVALUATED, replace=False)
    with TemporaryDirectory(prefix="fedloom-scale-") as folder:
        place = Path(folder) / "store"
        data = federation(clients, Path(folder) / "samples" if store == "disk" else None)
        start = time.perf_counter()
        build = MODELS["mlp"]().build
        network = Network(lambda: build((INPUTS,), CLASSES), "head", data.x[:2])
        task = Task(data, network, lr=LR, batch_size=BATCH, rounds=rounds, participation=COHORT)
        keep = partial(make_store, kind=store, folder=place)
        run = Simulation(ALGORITHMS[algorithm](), task, 0, eval_client_ids=evaluated, make_store=keep)
        group = RunGroup([run], PLAN)
        set_up = time.perf_counter() - start
        if filled:
            fill(run.store)
        checkpoints = Checkpoints(Path(folder), _every(rounds))
        train, evaluation, saves = [], [], []
        for _ in range(WARM_UP + rounds):
            (done,) = group.advance()
            train.append(done.train_seconds)
            evaluation.append(done.eval_seconds)
            if checkpoints.due(run):
                checkpoints.save(run)
                saves.append(checkpoints.cost)
        times = np.array([train, evaluation])[:, WARM_UP:]
        return {
            "set_up": set_up,
            "train": float(np.median(times[0])),
            "evaluation": float(np.median(times[1])),
            "round": float(np.median(times.sum(0))),
            "checkpoint": float(np.median(saves[1:])),
            "checkpoint_bytes": checkpoints.found()[0].stat().st_size,
            "store_bytes": sum(file.stat().st_blocks * 512 for file in place.glob("*")),  # holes take no space
            "peak_bytes": _peak_bytes(),
        }


def _every(rounds: int) -> int:
    """At least two checkpoints in a run, of which the first does not count."""
    return max(1, min(EVERY, rounds // 2))


def _peak_bytes() -> int:
    """A process starts with the peak of its parent; here the parent has imported the same and done nothing else."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_process(clients: int, store: str, args: argparse.Namespace) -> Case:
    command = [sys.executable, __file__, "--case", str(clients), store]
    command += ["--algorithm", args.algorithm, "--rounds", str(args.rounds), *(["--filled"] if args.filled else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def lowest(runs: list[Case]) -> Case:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def table(found: dict[tuple[int, str], Case], every: int) -> Iterator[str]:
    names = (
        "clients", "store", "set-up s", "train ms", "evaluation ms", "round ms", f"ratio to {BASE}", "checkpoint ms",
        "checkpoint MB", "round with checkpoint ms", f"ratio to {BASE}", "peak GB", "store on disk MB",
    )  # fmt: skip
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for (clients, store), case in found.items():
        base = found.get((BASE, store))
        train, evaluation, alone, save = (
            f"{case[name] * 1e3:.1f}" for name in ("train", "evaluation", "round", "checkpoint")
        )
        whole = f"{_with_checkpoint(case, every) * 1e3:.1f}"
        ratio = f"{case['round'] / base['round']:.2f}x" if base else "-"
        whole_ratio = f"{_with_checkpoint(case, every) / _with_checkpoint(base, every):.2f}x" if base else "-"
        saved, kept = (f"{case[name] / 1e6:.2f}" for name in ("checkpoint_bytes", "store_bytes"))
        row = (
            str(clients), store, f"{case['set_up']:.2f}", train, evaluation, alone, ratio, save,
            saved, whole, whole_ratio, f"{case['peak_bytes'] / 1e9:.2f}", kept,
        )  # fmt: skip
        yield f"| {' | '.join(row)} |"


def _with_checkpoint(case: Case, every: int) -> float:
    """Seconds of a round with its share of a checkpoint."""
    return case["round"] + case["checkpoint"] / every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--algorithm", default="fedrep", choices=ALGORITHMS.names())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--filled", action="store_true", help="every client has trained before the first round")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 100 and 1000 clients, 4 rounds, once")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)  # a population and a store, in this process
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(int(args.case[0]), args.case[1], args.algorithm, args.rounds, args.filled)))
        return
    if args.quick:
        args.clients, args.rounds, args.repeats = [100, 1000], 4, 1
    every = _every(args.rounds)
    samples, state = sum(SAMPLES.values()), "all have trained before" if args.filled else "none has trained before"
    print(f"{args.algorithm}, mlp, batch {BATCH}, {samples} samples per client, float32; {state}")
    print(f"{COHORT} clients train and {EVALUATED} are evaluated per round, a checkpoint every {every} rounds")
    where = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"python {shlex.join(sys.argv)}\n", flush=True)
    cases = [(clients, store) for store in STORES for clients in args.clients]
    passes = [{case: in_process(*case, args) for case in cases} for _ in range(args.repeats)]
    runs = {case: [found[case] for found in passes] for case in cases}
    print(*table({case: lowest(found) for case, found in runs.items()}, every), sep="\n")
    if args.repeats > 1:
        noise = [max(run["round"] for run in found) / lowest(found)["round"] for found in runs.values()]
        print(f"\nThe slowest run of a case took {min(noise):.2f} to {max(noise):.2f} times as long as its fastest.")


if __name__ == "__main__":
    main()
