"""Seconds per round of Fashion-MNIST, with evaluation, for several methods, beside a plain PyTorch loop of FedAvg.

    python benchmarks/gpu_fmnist.py --device cuda --data-dir FOLDER [--methods fedavg gpfl] [--rounds 5]
                                    [--dtype tf32] [--seeds 3] [--quick]

The job is PFLlib's usual one (preset gpfl/fmnist-dirichlet): 20 clients, Dirichlet(0.1), `cnn4`, batches of 10, one
epoch, and after every round test accuracy and training loss of all clients. FedLoom scores more than that: validation
samples, and the models before and after training. Methods run one after another, each through
`fedloom.studies.execute.execute`, with the plan that is chosen for the preset's 2000 rounds. Every second round is
evaluated; `training` is the median of rounds that are not, `with evaluation` of those that are; the first rounds warm
up (on a GPU, until scores are captured). `set-up` is what comes before the first round.

The plain loop trains the same clients and computes test accuracy and training loss of the global model, in batches of
512 samples. It makes one round, divided into as many turns as there are methods, and takes a turn before each of
them; a method's gain is over what its turns so far say.

`of the ceiling` is the least time that training could take on this machine over the time that it takes. The least
time is the larger one of two. Arithmetic: operations of a client-step (matrix products and convolutions, forward and
backward, by `torch.utils.flop_counter`) times steps, at the speed of a large matrix product. Traffic: bytes that a
client-step must move, times steps, at the speed of a large copy. These bytes are: state that the step changes, read
and written once; gradients, written and read once; what forward passes keep for backward passes, except parameters,
written and read once; the batch, read once. The last batch of an epoch counts as a full one. Both speeds are measured
in the same run.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from machine import ceiling, describe, forget_peak, give_up, head, peak, precision, row, seconds
from methods import phase_steps
from plain import PlainFedAvg
from timing import first_rounds
from torch.utils.flop_counter import FlopCounterMode

from fedloom.config.files import preset
from fedloom.config.resolve import Config, combine, resolve
from fedloom.core.algorithm import Algorithm, Batch, Info, Phase
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation, Ragged
from fedloom.core.keys import fold, root
from fedloom.core.task import Task
from fedloom.core.tree import leaves, take
from fedloom.studies.build import find_device, make_data, make_task
from fedloom.studies.compare import label, parse_method

METHODS = ["fedavg", "fedrep", "ditto", "pfedme", "gpfl", "plgu-lf", "pfedkt"]
PRESET = "gpfl/fmnist-dirichlet"
EVERY = 2  # one round in so many is evaluated
WARM_UP = {"cpu": 3, "cuda": 24}  # both kinds of rounds must have run, and on a GPU be captured, before time counts


# -- what a client-step must do ---------------------------------------------------------------------------------------


@dataclass
class Least:
    """Operations and bytes of the steps of a round, at least."""

    flops: float = 0.0
    bytes: float = 0.0
    steps: int = 0


def least(alg: Algorithm, task: Task, seed: int = 0) -> Least:
    """Counted on a step of every phase by the client with the most samples."""
    total = Least()
    i = int(np.argmax(task.data.splits["train"].sizes))
    work, down, info = _start(alg, task, i, seed)
    for phase in alg.phases(task):
        if phase.enter is not None:
            work = phase.enter(task, work, down, info)
        rows = task.data.splits[phase.select if isinstance(phase.select, str) else "train"][i]
        batch = _batch(task, rows, phase.batch or task.batch_size, phase.group)
        step = partial(_step, phase, task, batch, down, info)
        flops, moved, work = _count(step, work, (down, batch.x))
        steps = phase_steps(phase, task)
        total = Least(total.flops + steps * flops, total.bytes + steps * moved, total.steps + steps)
    return total


def _step(phase: Phase, task: Task, batch: Batch, down: Any, info: Info, work: Any) -> Any:
    return phase.step(task, work, batch, down, info)


def _start(alg: Algorithm, task: Task, i: int, seed: int) -> tuple[Any, Any, Info]:
    """What client i has when a round begins, by the contract."""
    device, key = task.data.device, root(seed, "init")
    ids = torch.tensor([i], device=device)
    server = alg.init_server(task, key)
    shared, parts = alg.download(task, server, ids, 0, key)
    down = {**alg.constants(task, key), **shared, **take(parts, 0)}
    own = alg.init_client(task, key, fold(root(seed, "client-init"), ids)[0])
    info = Info(
        id=ids[0],
        n=torch.tensor(int(task.data.splits["train"].sizes[i]), device=device),
        counts=task.data.counts(np.array([i]))[0],
        t=torch.tensor(0, device=device),
        first=torch.tensor(True, device=device),
        key=fold(root(seed, "client"), ids, 0)[0],
    )
    return alg.begin(task, down, own, info), down, info


def _batch(task: Task, rows: torch.Tensor, size: int, group: int) -> Batch:
    data = task.data
    rows = rows[:size] if group == 1 else rows[: size * group].view(group, -1)
    mask = torch.ones(rows.shape, dtype=task.dtype, device=data.device)
    zero, key = torch.tensor(0, device=data.device), torch.tensor(root(0, "noise"), device=data.device)
    return Batch(data.prepare(data.x[rows]), data.y[rows], mask, zero, zero, zero.bool(), key)


@torch.no_grad()
def _count(step: Callable[[Any], Any], work: Any, given: Any) -> tuple[int, int, Any]:
    """Operations, bytes (by the rule above), and the state after the step; `given` are values that it only reads, the
    batch being the last of them."""
    kept: list[torch.Tensor] = []  # alive until the end, so that no two have the same memory
    gradients: list[torch.Tensor] = []
    differentiate = torch.autograd.grad

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def grad(*args: Any, **more: Any) -> tuple[torch.Tensor, ...]:
        found = differentiate(*args, **more)
        gradients.extend(found)
        return found

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, hooks, patch("torch.autograd.grad", grad):
        after = step(work)
    if not gradients:
        raise RuntimeError("a step took its gradients in another way than counted here")
    before, now, read = leaves(work), leaves(after), leaves(given)
    changed = [new for old, new in zip(before, now, strict=True) if new is not old]
    known = {_place(v) for v in (*before, *now, *read, *gradients)}
    activations = {_place(v): v.untyped_storage().nbytes() for v in kept if _place(v) not in known}
    twice = sum(v.nbytes for v in (*changed, *gradients)) + sum(activations.values())
    return counter.get_total_flops(), 2 * twice + read[-1].nbytes, after


def _place(v: torch.Tensor) -> int:
    return v.untyped_storage().data_ptr()


# -- the table --------------------------------------------------------------------------------------------------------


class Plain:
    """One round of the plain loop, a share of the clients at a time."""

    def __init__(self, config: Config, task: Task, turns: int) -> None:
        s = config.settings
        module = config.model.build(tuple(task.data.x.shape[1:]), task.classes)
        self.loop, self.device = PlainFedAvg(module, task.data, s.lr, s.batch_size, s.dtype), task.data.device
        sizes = task.data.splits["train"].sizes
        order = np.argsort(sizes)
        self.turns = [order[k::turns].tolist() for k in range(turns)]
        self.steps, self.samples = self.loop.steps(order), int(sizes.sum())
        self.done = np.zeros(4)  # seconds of training and of evaluation, steps, samples
        self.loop.train(order[:1])  # warms up
        self.loop.evaluate(order[:1])
        self.loop.average()

    def turn(self) -> None:
        clients = self.turns.pop(0)
        train, evaluate = (partial(job, clients) for job in (self.loop.train, self.loop.evaluate))
        samples = self.loop.splits["train"].sizes[clients].sum()
        self.done += [seconds(train, self.device), seconds(evaluate, self.device), self.loop.steps(clients), samples]

    def round(self) -> tuple[float, float]:
        """Seconds of training and of evaluation in a round, by the turns so far."""
        train, evaluation, steps, samples = self.done
        return train / steps * self.steps, evaluation / samples * self.samples


def generated() -> Federation:
    """The shape of the job, for a smoke run."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (80, 1, 28, 28), dtype=np.uint8), draw.integers(0, 10, 80)
    rows = np.split(np.arange(80), [8, 28, 50])
    splits = {"train": Ragged.of(rows), **{name: Ragged.of([r[:5] for r in rows]) for name in ("val", "test")}}
    return Federation(torch.from_numpy(x), torch.from_numpy(y), 10, splits, mean=(0.5,), std=(0.5,))


def measure(args: argparse.Namespace) -> None:
    device = find_device(args.device)
    request = {
        **preset(PRESET), "device": args.device, "dtype": args.dtype, "data_dir": args.data_dir, "eval_every": EVERY,
        "plan": "per-client" if args.quick else "auto",
    }  # fmt: skip
    configs = [resolve(combine(request, {"algorithm": parse_method(name)})) for name in args.methods]
    data = generated() if args.quick else make_data(configs[0])
    data = data.to(device, data.dtype)
    tasks = [make_task(config, data) for config in configs]  # every mistake shows before anything is trained
    with precision(args.dtype):
        flops, bandwidth = ceiling(device, args.dtype, args.quick)
        print(f"Fashion-MNIST, {data.clients} clients, Dirichlet 0.1, cnn4, batch 10, one epoch, {args.dtype}", end="")
        print(f", {args.seeds} runs at once" if args.seeds > 1 else "", "; seconds per round", sep="")
        print(f"ceiling: {flops / 1e12:.2f} TFLOP/s ({args.dtype}), {bandwidth / 1e9:.0f} GB/s (copy)")
        print(describe(device))
        head(
            "method", "client-steps", "set-up", "training", "with evaluation", "gain over plain FedAvg",
            "us per client-step", "GFLOP", "GB", "of the ceiling", "peak GB",
        )  # fmt: skip
        plain = Plain(configs[0], tasks[0], len(configs))
        for config, task in zip(configs, tasks, strict=True):
            plain.turn()
            _measure(config, task, plain, (flops, bandwidth), args)
        train, evaluation = plain.round()
        whole, each = f"{train + evaluation:.3f}", f"{train / plain.steps * 1e6:.1f}"
        row("plain FedAvg", plain.steps, "-", f"{train:.3f}", whole, "1.0x", each, *["-"] * 4)


def _measure(config: Config, task: Task, plain: Plain, machine: tuple[float, float], args: argparse.Namespace) -> None:
    device, runs = task.data.device, args.seeds
    count = least(config.algorithm, task)
    forget_peak(device)
    seeds = [config.with_seed(seed) for seed in range(runs)]
    warm_up = 3 if args.quick else WARM_UP[task.data.device.type]
    set_up, took = first_rounds(seeds, task.data, warm_up + EVERY * args.rounds)
    evaluated = np.arange(1, len(took) + 1) % EVERY == 0
    counts = np.arange(len(took)) >= warm_up
    training, whole = (float(np.median(np.array(took)[kind & counts])) for kind in (~evaluated, evaluated))
    best = runs * max(count.flops / machine[0], count.bytes / machine[1])
    row(
        label(config.algorithm), runs * count.steps, f"{set_up:.1f}", f"{training:.3f}", f"{whole:.3f}",
        f"{runs * sum(plain.round()) / whole:.1f}x", f"{training / runs / count.steps * 1e6:.1f}",
        f"{runs * count.flops / 1e9:.4g}", f"{runs * count.bytes / 1e9:.4g}", f"{100 * best / training:.1f} %",
        f"{peak(device) / 1e9:.2f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, help="names, with settings as in 'ditto:lam=0.5'")
    parser.add_argument("--rounds", type=int, default=5, help="measured with evaluation, and as many without")
    parser.add_argument("--seeds", type=int, default=1, help="so many runs of each method at once")
    parser.add_argument("--dtype", default="float32", help="as the setting of a run")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", help="where Fashion-MNIST lies")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 4 clients with generated images, one round")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    try:
        measure(args)
    except UserError as error:
        give_up(error)


if __name__ == "__main__":
    main()
