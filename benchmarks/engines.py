"""Microseconds per client-step of FedAvg: a plain PyTorch loop, the reference engine, the vectorized engine.

    python benchmarks/engines.py [--clients 20 100] [--models mlp cnn4 lstm_shakes resnet18_gn_c] [--batch 50]
                                 [--per-client SAMPLES] [--dtype tf32] [--device cuda] [--quick]

All three train on the same data in memory, in one run, without evaluation; a round ends with the average of the models.
The plain loop is what one would write by hand: `nn.Module`, `torch.optim.SGD`, a random permutation per epoch. `ragged`
divides the same samples by Dirichlet(0.1) over classes. A step of the plain loop and of the reference engine takes as
long whoever else trains, so these two train 10 of the clients (`--one-by-one`), the vectorized engine all of them.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from machine import describe, give_up, head, precision, row, wait
from plain import PlainFedAvg

from fedloom.config.resolve import configure
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation, Ragged
from fedloom.core.keys import rng
from fedloom.core.task import Task
from fedloom.data.partitions import DirichletClass
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.models.zoo import MODELS
from fedloom.studies.build import make_task

SHAPES = {
    "logreg": (64,), "mlp": (64,), "cnn8": (1, 8, 8), "cnn4": (1, 28, 28), "lstm_shakes": (80,),
    "resnet18_gn": (3, 32, 32), "resnet18_gn_c": (3, 32, 32),
}  # fmt: skip
VOCAB = {"lstm_shakes": 80}  # number of token ids; the other models take numbers
SMALL = ["logreg", "mlp", "cnn8", "cnn4"]
CLASSES, LR, ROUNDS = 10, 0.01, 1000
WARM_UP = 2  # turns


def federation(model: str, clients: int, per_client: int, ragged: bool) -> Federation:
    draw = np.random.default_rng(0)
    n = clients * per_client
    y = draw.integers(0, CLASSES, n)
    size = (n, *SHAPES[model])
    x = draw.integers(0, VOCAB[model], size) if model in VOCAB else draw.standard_normal(size, dtype=np.float32)
    lists = (
        DirichletClass(beta=0.1).assign(y, CLASSES, clients, rng("partition", 1))
        if ragged
        else list(np.arange(n).reshape(clients, -1))
    )
    few = Ragged.of([rows[:1] for rows in lists])
    splits = {"train": Ragged.of(lists), "val": few, "test": few}
    return Federation(torch.from_numpy(x), torch.from_numpy(y), CLASSES, splits, vocab=VOCAB.get(model))


def some_of(data: Federation, most: int) -> Federation:
    """The same with every k-th client, `most` of them at most."""
    ids = np.linspace(0, data.clients - 1, min(most, data.clients)).round().astype(int)
    lists = {name: rows.lists() for name, rows in data.splits.items()}
    return replace(data, splits={name: Ragged.of([rows[i] for i in ids]) for name, rows in lists.items()})


def seconds(engines: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median per engine; the engines take turns, so that a noisy moment hits them alike. The first turns warm up."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds + WARM_UP):
        for name, advance in engines.items():
            start = time.perf_counter()
            advance()
            wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(found[WARM_UP:])) for name, found in times.items()}


def steps(task: Task) -> int:
    return int((-(-task.data.splits["train"].sizes // task.batch_size)).sum())


def measure(model: str, clients: int, shape: str, args: argparse.Namespace) -> None:
    settings = {"lr": LR, "batch_size": args.batch, "rounds": ROUNDS, "device": args.device, "dtype": args.dtype}
    everyone = federation(model, clients, args.per_client, shape == "ragged")
    whole, few = (
        make_task(configure("fedavg", data, model=model, values=settings))
        for data in (everyone, some_of(everyone, args.one_by_one))
    )
    fedavg = configure("fedavg").algorithm
    plain = PlainFedAvg(
        MODELS[model]().build(SHAPES[model], CLASSES, VOCAB.get(model)), few.data, LR, args.batch, args.dtype
    )
    reference = RunGroup([Simulation(fedavg, few, 0)], REFERENCE)
    vectorized = RunGroup([Simulation(fedavg, whole, 0)], args.plan)

    def plain_round() -> None:
        plain.train(range(few.clients))
        plain.average()

    engines = {
        "plain": plain_round,
        "reference": lambda: reference.advance(evaluate=False),
        "vectorized": lambda: vectorized.advance(evaluate=False),
    }
    found = seconds(engines, args.rounds, whole.data.device)
    us = {name: t / steps(whole if name == "vectorized" else few) * 1e6 for name, t in found.items()}
    plan = vectorized.plan()
    how = plan.mode if plan.mode == "per-client" else plan.replay
    gains = (f"{us['plain'] / us[name]:.2f}x" for name in ("reference", "vectorized"))
    row(model, clients, shape, *(f"{us[name]:.1f}" for name in engines), *gains, how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--models", nargs="+", default=SMALL, choices=list(SHAPES))
    parser.add_argument("--shapes", nargs="+", default=["equal", "ragged"], choices=["equal", "ragged"])
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--per-client", type=int, default=100, help="training samples per client on average")
    parser.add_argument("--one-by-one", type=int, default=10, help="clients of the plain loop and the reference engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", help="as the setting of a run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--plan", default="auto", choices=["auto", "stacked", "stacked-eager", "per-client"])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 5 clients of 20 samples, one round")
    args = parser.parse_args()
    if args.quick:
        args.clients, args.per_client, args.rounds = [5], 20, 1
    torch.set_num_threads(args.threads)
    print(
        f"FedAvg, batch {args.batch}, {args.per_client} samples per client on average, {args.dtype}; us per client-step"
    )
    print(describe(torch.device(args.device)))
    head(
        "model", "clients", "sizes", "plain loop", "reference", "vectorized",
        "reference gain", "vectorized gain", "plan",
    )  # fmt: skip
    with precision(args.dtype):
        for model in args.models:
            for clients in args.clients:
                for shape in args.shapes:
                    try:
                        measure(model, clients, shape, args)
                    except UserError as error:
                        give_up(error)


if __name__ == "__main__":
    main()
