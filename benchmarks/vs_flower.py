"""Time of a round of FedAvg with many clients of a small model: Flower's simulation and FedLoom in one run.

    python benchmarks/vs_flower.py [--models logreg mlp] [--per-client 20 100] [--clients 100] [--repeats 3]
                                   [--quick]

Both train the same models on the same number of samples, one epoch in batches of 10, all clients in every round,
without evaluation, which would send Flower's clients a second message. Flower runs as a simulation with Ray, one
worker with one thread per core, `FedAvg` as its strategy; its clients keep their samples and their model in memory
between rounds. FedLoom runs with the plan that is chosen for 100 rounds. The two take turns (`--repeats`); the table
shows the median and the fastest of all rounds but the first of each run. `start` is everything up to the end of the
first round.

`pip install 'flwr[simulation]'` if Flower is missing; FedLoom does not need it here.
"""

import argparse
import logging
import os
import time
import warnings
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
from machine import describe, give_up, head, row
from timing import first_rounds

from fedloom.config.resolve import configure
from fedloom.core.federation import Federation, Ragged
from fedloom.models.zoo import MODELS

ROUNDS = 100  # of the run that FedLoom's plan is made for


def federation(clients: int, per_client: int) -> Federation:
    from flower_client import CLASSES, samples

    x, y = (torch.cat(parts) for parts in zip(*(samples(i, per_client) for i in range(clients)), strict=True))
    rows = list(np.arange(len(y)).reshape(clients, -1))
    few = Ragged.of([mine[:1] for mine in rows])
    return Federation(x, y, CLASSES, {"train": Ragged.of(rows), "val": few, "test": few})


def fedloom(model: str, data: Federation, rounds: int) -> tuple[float, list[float]]:
    """Seconds up to the end of the first round, and of each of the others."""
    from flower_client import BATCH, LR

    settings = {"rounds": ROUNDS, "eval_every": ROUNDS, "lr": LR, "batch_size": BATCH, "device": "cpu"}
    set_up, (first, *others) = first_rounds([configure("fedavg", data, model=model, values=settings)], data, rounds)
    return set_up + first, others


def flower(model: str, clients: int, per_client: int, rounds: int) -> tuple[float, list[float]]:
    """The same."""
    from flower_client import CLASSES, INPUTS, app
    from flwr.app import ArrayRecord, ConfigRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    at = [time.perf_counter()]
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        strategy.start(
            grid,
            ArrayRecord(MODELS[model]().build((INPUTS,), CLASSES).state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"model": model, "samples": per_client}),
            evaluate_fn=lambda t, arrays: at.append(time.perf_counter()) if t else None,
        )

    cores = os.cpu_count() or 1
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "log_to_driver": False},
    }
    run_simulation(server, app, num_supernodes=clients, backend_config=backend)
    if len(at) != rounds + 1:
        raise RuntimeError(f"Flower ended after {len(at) - 1} of {rounds} rounds")
    first, *others = np.diff(at).tolist()
    return first, others


def measure(model: str, per_client: int, args: argparse.Namespace) -> None:
    data = federation(args.clients, per_client)
    runs: dict[str, list[tuple[float, list[float]]]] = {"Flower": [], "FedLoom": []}
    for _ in range(args.repeats):
        runs["Flower"].append(flower(model, args.clients, per_client, args.rounds))
        runs["FedLoom"].append(fedloom(model, data, 10 * args.rounds))
    times = {who: [t for _, others in found for t in others] for who, found in runs.items()}
    usual, least = ({who: float(f(found)) for who, found in times.items()} for f in (np.median, np.min))
    for who, found in runs.items():
        start = float(np.median([first for first, _ in found]))
        gains = (f"{of['Flower'] / of[who]:.0f}x" for of in (usual, least))
        row(
            model,
            per_client,
            who,
            f"{start:.2f}",
            f"{usual[who] * 1e3:.1f}",
            next(gains),
            f"{least[who] * 1e3:.1f}",
            next(gains),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["logreg", "mlp"], choices=["logreg", "mlp"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--per-client", type=int, nargs="+", default=[20, 100], help="samples")
    parser.add_argument("--rounds", type=int, default=5, help="of Flower in a turn; FedLoom makes ten times as many")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a smoke run: logreg, 4 clients, 2 rounds, once")
    args = parser.parse_args()
    if args.quick:
        args.models, args.clients, args.per_client, args.rounds, args.repeats = ["logreg"], 4, [20], 2, 1
    try:
        versions = f"flwr {version('flwr')}, ray {version('ray')}"
    except PackageNotFoundError:
        give_up("Flower's simulation is not here; install it with \"pip install 'flwr[simulation]'\".")
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")
    logging.disable(logging.CRITICAL)  # Flower reports every round
    warnings.filterwarnings("ignore")
    print(f"FedAvg, {args.clients} clients, batch 10, one epoch; ms per round; {versions}")
    print(describe(torch.device("cpu")))
    head("model", "samples per client", "who", "start s", "median", "gain", "fastest", "gain of the fastest")
    for model in args.models:
        for per_client in args.per_client:
            measure(model, per_client, args)


if __name__ == "__main__":
    main()
