"""What a client-step of each method costs, relative to FedAvg.

    python benchmarks/methods.py [--methods plgu-lf ditto] [--models mlp cnn4] [--clients 20] [--plan per-client]
                                 [--device cuda] [--quick]

All methods train the same clients on the same data under the same execution plan; they take turns, round by round,
without evaluation. A client-step is one batch of one client in one phase, so FedRep, which passes twice over the
data, makes twice as many as FedAvg. `name:key=value` gives settings, as on the command line. The table shows medians
over rounds; what a method does once per round (a hypernetwork's step, averaging) is shared among its steps.
"""

import argparse
import platform
import shlex
import sys
from dataclasses import replace
from typing import get_args

import numpy as np
import torch

from fedloom.config.resolve import resolve
from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.federation import Federation, Ragged
from fedloom.core.task import Task
from fedloom.engine import batching as schedule
from fedloom.engine.plan import Mode, Plan
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network
from fedloom.studies.compare import label, parse_method

SHAPES = {"logreg": (64,), "mlp": (64,), "cnn8": (1, 8, 8), "cnn4": (1, 28, 28)}
BATCH, LR, PER_CLIENT, SERVER = 10, 0.005, 100, 100
METHODS = ["fedavg", "ditto", "fedrep", "plgu-lf", "plgu-grep:head_epochs=0", "plgu-ghn"]


def make_task(model: str, clients: int, device: str) -> Task:
    draw = np.random.default_rng(0)
    n = clients * PER_CLIENT
    y = torch.from_numpy(draw.integers(0, 10, n + SERVER))
    x = torch.from_numpy(draw.normal(size=(n + SERVER, *SHAPES[model])).astype(np.float32))
    rows = np.arange(n).reshape(clients, -1)
    few = [mine[:1] for mine in rows]
    splits = {"train": Ragged.of(list(rows)), "val": Ragged.of(few), "test": Ragged.of(few)}
    data = Federation(x, y, 10, splits, server=torch.arange(n, n + SERVER)).to(torch.device(device), torch.float32)
    build = MODELS[model]().build
    network = Network(lambda: build(SHAPES[model], 10), "head", data.x[:2])
    return Task(data, network, lr=LR, batch_size=BATCH, rounds=1000)


def phase_steps(phase: Phase, task: Task) -> int:
    """Client-steps of a phase in a round, where they are known beforehand."""
    ids = np.arange(task.clients)
    epochs = np.full(len(ids), phase.epochs if isinstance(phase.epochs, int) else 1)
    return int(schedule.build(task, phase, 0, ids, 0, epochs).steps.sum())


def steps(alg: Algorithm, task: Task) -> int:
    return sum(phase_steps(phase, task) for phase in alg.phases(task))


def measure(names: list[str], task: Task, mode: Mode, rounds: int) -> dict[str, tuple[int, float]]:
    """Client-steps of a round and median seconds, by method."""
    captured = task.data.device.type == "cuda"
    workers = 0 if captured or torch.get_num_threads() < 2 else torch.get_num_threads()
    if mode == "stacked":
        plan = Plan(mode, "captured" if captured else "traced", chunk=task.clients)
    else:
        plan = Plan(mode, "eager" if captured else "traced", workers=workers)
    algs = [resolve({"algorithm": parse_method(name)}).algorithm for name in names]
    in_turns = replace(plan, chunk=1, workers=0)
    runs = [RunGroup([Simulation(alg, task, 0)], in_turns if alg.turns else plan) for alg in algs]
    times = [[run.advance(evaluate=False)[0].train_seconds for run in runs] for _ in range(rounds + 1)][1:]
    return {label(alg): (steps(alg, task), float(t)) for alg, t in zip(algs, np.median(times, axis=0), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS[1:])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn4"], choices=SHAPES)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--plan", default="stacked", choices=get_args(Mode))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a smoke run: mlp, 4 clients, 2 rounds")
    args = parser.parse_args()
    if args.quick:
        args.models, args.clients, args.rounds = ["mlp"], 4, 2
    names = ["fedavg", *(name for name in args.methods if name != "fedavg")]
    where = torch.cuda.get_device_name() if args.device != "cpu" else platform.processor() or platform.machine()
    print(f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"python {shlex.join(sys.argv)}\n", flush=True)
    print("| model | method | client-steps per round | ms per round | us per client-step | to FedAvg |")
    print("|---|---|---|---|---|---|")
    for model in args.models:
        found = measure(names, make_task(model, args.clients, args.device), args.plan, args.rounds)
        base = found["fedavg"][1] / found["fedavg"][0]
        for name, (count, seconds) in found.items():
            each = seconds / count
            row = (model, name, count, f"{seconds * 1e3:.1f}", f"{each * 1e6:.1f}", f"{each / base:.2f}x")
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
