"""Microseconds per client-step of FedAvg: a plain PyTorch loop, the reference engine, the vectorized engine.

    python benchmarks/engines.py [--clients 20 100] [--models mlp cnn4 lstm_shakes] [--device cuda] [--quick]

All three train the same clients on the same data in memory, in one run, without evaluation; a round ends with the
average of the models. The plain loop is what one would write by hand: `nn.Module`, `torch.optim.SGD`, a random
permutation per epoch. `ragged` divides the same samples by Dirichlet(0.1) over classes.
"""

import argparse
import copy
import platform
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.federation import Federation, Ragged
from fedloom.core.keys import rng
from fedloom.core.network import Network
from fedloom.core.task import Task
from fedloom.data.partitions import DirichletClass
from fedloom.engines.rounds import Rounds
from fedloom.models.zoo import MODELS

SHAPES = {"logreg": (64,), "mlp": (64,), "cnn8": (1, 8, 8), "cnn4": (1, 28, 28), "lstm_shakes": (80,)}
VOCAB = {"lstm_shakes": 80}  # number of token ids; the other models take numbers
BATCH, LR, PER_CLIENT = 10, 0.01, 100


def federation(model: str, clients: int, ragged: bool) -> Federation:
    draw = np.random.default_rng(0)
    n = clients * PER_CLIENT
    y = draw.integers(0, 10, n)
    size = (n, *SHAPES[model])
    x = draw.integers(0, VOCAB[model], size) if model in VOCAB else draw.normal(size=size).astype(np.float32)
    lists = (
        DirichletClass(beta=0.1).assign(y, 10, clients, rng("partition", 1))
        if ragged
        else np.arange(n).reshape(clients, -1)
    )
    few = [rows[:1] for rows in lists]
    return Federation(
        torch.from_numpy(x), torch.from_numpy(y), 10,
        {"train": Ragged.of(lists), "val": Ragged.of(few), "test": Ragged.of(few)},
    )  # fmt: skip


def plain_round(module: torch.nn.Module, data: Federation) -> None:
    """One round of FedAvg as one would write it by hand."""
    start = copy.deepcopy(module.state_dict())
    sums = {k: torch.zeros_like(v) for k, v in start.items()}
    sizes = data.splits["train"].sizes
    for i in range(data.clients):
        module.load_state_dict(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        rows = data.splits["train"][i]
        rows = rows[torch.randperm(len(rows), device=rows.device)]
        for batch in torch.split(rows, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(module(data.x[batch]), data.y[batch]).backward()
            optimizer.step()
        for k, v in module.state_dict().items():
            sums[k] += v * (sizes[i] / sizes.sum())
    module.load_state_dict(sums)


def seconds(engines: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median per engine; the engines take turns, so that a noisy moment hits them alike. The first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds + 1):
        for name, advance in engines.items():
            start = time.perf_counter()
            advance()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(found[1:])) for name, found in times.items()}


def measure(model: str, clients: int, ragged: bool, rounds: int, device: torch.device, plan: str) -> None:
    data = federation(model, clients, ragged).to(device, torch.float32)
    build = partial(MODELS[model]().build, SHAPES[model], 10, VOCAB.get(model))
    network = Network(build, "head", data.x[:2], data.dtype)
    task = Task(data, network, lr=LR, batch_size=BATCH, rounds=1000)
    steps = int((-(-data.splits["train"].sizes // BATCH)).sum())
    module = build().to(device)
    reference = Rounds(FedAvg(), task, 0, "reference")
    vectorized = Rounds(FedAvg(), task, 0, "vectorized", plan)
    engines = {
        "plain": lambda: plain_round(module, data),
        "reference": lambda: reference.advance(evaluate=False),
        "vectorized": lambda: vectorized.advance(evaluate=False),
    }
    us = {name: found / steps * 1e6 for name, found in seconds(engines, rounds, device).items()}
    shape = "ragged" if ragged else "equal"
    how = vectorized.plan.mode if vectorized.plan.mode == "per-client" else vectorized.plan.replay
    print(
        f"| {model} | {clients} | {shape} | {us['plain']:.1f} | {us['reference']:.1f} | {us['vectorized']:.1f} "
        f"| {us['plain'] / us['reference']:.2f}x | {us['plain'] / us['vectorized']:.2f}x | {how} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--models", nargs="+", default=[m for m in SHAPES if m not in VOCAB], choices=list(SHAPES))
    parser.add_argument("--shapes", nargs="+", default=["equal", "ragged"], choices=["equal", "ragged"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--plan", default="auto", choices=["auto", "stacked", "stacked-eager", "per-client"])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 5 clients, one round")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    where = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.processor() or platform.machine()} CPU"
    )
    print(f"FedAvg, batch {BATCH}, {PER_CLIENT} samples per client on average, float32; us per client-step")
    print(f"{where}, {args.threads} threads, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| model | clients | sizes | plain loop | reference | vectorized | reference gain | vectorized gain | plan |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in args.models:
        for clients in [5] if args.quick else args.clients:
            for shape in args.shapes:
                measure(model, clients, shape == "ragged", 1 if args.quick else args.rounds, device, args.plan)


if __name__ == "__main__":
    main()
