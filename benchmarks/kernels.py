"""What each custom kernel gains: a round of training with all kernels, and with one of them switched off.

    python benchmarks/kernels.py [--models cnn4 mlp lstm_shakes resnet18_gn_c] [--clients 20] [--rounds 8] [--quick]

Needs a CUDA GPU; without one (`--quick`) it only checks that it runs. Both runs take turns in one process. `all`
switches all kernels off. A kernel that saves less than 15 % of every job does not earn its keep.
"""

import argparse
import gc
from contextlib import nullcontext
from functools import partial

import torch
from engines import federation, seconds
from machine import describe, head, row
from pfl_cifar10 import make_model

from fedloom.config.resolve import configure
from fedloom.core.task import Task
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.nn.kernels import dispatch
from fedloom.nn.kernels.batch_gather import gather_batch
from fedloom.studies.build import make_task

DENSE = ("batch_gather", "cross_entropy", "matmul")
KERNELS = {
    "logreg": DENSE,
    "mlp": DENSE,
    "cnn4": (*DENSE, "channel_sum", "convolution", "pooling"),
    "lstm_shakes": (*DENSE, "lstm", "lstm_hopper"),
    "resnet18_gn_c": (*DENSE, "convolution"),
    "mlp_dropout": (*DENSE, "dropout"),
    "cnn_pfl": (*DENSE, "channel_sum", "convolution", "dropout", "pooling"),  # with dropout
}
GROUPS = {  # of kernels that each do little, and of those that share an operation
    "batch_gather, cross_entropy": {"batch_gather", "cross_entropy"},
    "channel_sum, pooling": {"channel_sum", "pooling"},
}
JOBS = {
    "logreg": (100, 1000),
    "mlp": (100, 1000),
    "cnn4": (20, 200),
    "lstm_shakes": (100, 100),
    "resnet18_gn_c": (20, 50),
    "mlp_dropout": (100, 1000),
    "cnn_pfl": (50, 50),
}


def prepared(task: Task, disabled: set[str], mode: str) -> RunGroup:
    """A run whose steps were traced and captured without some kernels."""
    dispatch.DISABLED = disabled
    algorithm = configure("fedavg").algorithm
    plain_gather = gather_batch.set_kernel_enabled("cuda", False) if "batch_gather" in disabled else nullcontext()
    with plain_gather:
        group = RunGroup([Simulation(algorithm, task, 0)], mode)
        for _ in range(12):  # so that what is called once per round is captured, too
            group.advance(evaluate=False)
    dispatch.DISABLED = set()
    return group


def measure(model: str, args: argparse.Namespace) -> None:
    clients, samples = (
        asked or default for asked, default in zip((args.clients, args.per_client), JOBS[model], strict=True)
    )
    settings = {"lr": 0.01, "batch_size": 10, "rounds": 1000, "device": args.device}
    inputs, module = {"mlp_dropout": ("mlp", "mlp3"), "cnn_pfl": ("resnet18_gn_c", make_model)}.get(
        model, (model, model)
    )
    settings |= {"dropout": 0.5} if model == "mlp_dropout" else {}
    data = federation(inputs, clients, samples, ragged=False)
    task = make_task(configure("fedavg", data, model=module, values=settings))
    mode = "stacked" if task.data.device.type == "cuda" else "stacked-eager"
    complete = prepared(task, set(), mode)
    variants = {name: {name} for name in KERNELS[model]}
    variants |= {name: kernels for name, kernels in GROUPS.items() if kernels <= set(KERNELS[model])}
    for name, disabled in {**variants, "all": set(dispatch.KERNELS)}.items():
        reduced = prepared(task, disabled, mode)
        runs = {"complete": partial(complete.advance, False), "reduced": partial(reduced.advance, False)}
        times = seconds(runs, args.rounds, task.data.device)
        milliseconds = (f"{1e3 * times[key]:.2f}" for key in ("complete", "reduced"))
        row(
            model,
            f"{clients} x {samples}",
            name,
            *milliseconds,
            f"{100 * (1 - times['complete'] / times['reduced']):+.1f} %",
        )
        del reduced, runs
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--per-client", type=int)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a smoke run: mlp, 3 clients, 1 round")
    args = parser.parse_args()
    if args.quick:
        args.models, args.clients, args.per_client, args.rounds = ["mlp"], 3, 20, 1
    print(describe(torch.device(args.device)))
    head("model", "clients x samples", "kernel", "ms per round", "without it", "saves")
    for model in args.models:
        measure(model, args)


if __name__ == "__main__":
    main()
