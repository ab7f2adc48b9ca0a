"""pfl-research's own benchmark, CIFAR-10 with equal users, by the package `pfl` and by FedLoom in one run.

    python benchmarks/pfl_cifar10.py --device cuda [--rounds 1500] [--pfl-rounds 200] [--dtype tf32] [--quick]

The job is that of `benchmarks/image_classification` with `configs/baseline.yaml` in pfl's repository: 1000 users of 50
samples, 50 of them in each of 1500 rounds, one epoch in batches of 10, learning rate 0.1 (1.0 at the server), a network
of two convolutions with dropout, no privacy. The images are generated, in the shape of CIFAR-10; they are in memory, on
the device, for both.

In one of ten rounds pfl evaluates the global model on 10,000 test images, and every user of the cohort before and after
its training on its 50 samples. FedLoom evaluates the global model on the same images in one of ten rounds, and on the
samples of 50 users, which are training and test samples at once; in every round it scores the models that users among
these 50 have after training, 2.5 of them on average. This makes 15,000 predictions in ten rounds for pfl and about
16,250 (10,000 + 5,000 + 1,250) for FedLoom.

FedLoom's time is the whole run with all that comes before the first round. pfl runs in one process, half of its rounds
before FedLoom and half after; its time per round, without the first ten of either half, is multiplied by the number of
rounds. `pip install pfl[pytorch]` if it is missing; FedLoom does not need it.
"""

import argparse
import os
import time
from collections import OrderedDict
from importlib.metadata import version
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import describe, give_up, head, precision, row, wait
from torch import Tensor, nn

from fedloom.config.resolve import configure
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation, Ragged
from fedloom.studies.build import find_device
from fedloom.studies.execute import execute

USERS, EACH, COHORT, TESTS = 1000, 50, 50, 10_000
BATCH, LR, SERVER_LR, EVERY = 10, 0.1, 1.0, 10
CLASSES, SIDE = 10, 32


class ChannelsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)


def make_model() -> nn.Module:
    """pfl-research's `simple_cnn`."""
    side = (SIDE - 4) // 2
    layers = {
        "conv1": nn.Conv2d(3, 32, 3), "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(32, 64, 3), "relu2": nn.ReLU(), "pool": nn.MaxPool2d(2), "drop2": nn.Dropout(0.25),
        "flat": nn.Flatten(), "hidden": nn.Linear(64 * side * side, 128), "relu3": nn.ReLU(), "drop3": nn.Dropout(0.5),
        "head": nn.Linear(128, CLASSES),
    }  # fmt: skip
    for layer in layers.values():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return nn.Sequential(OrderedDict(layers))


def images(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 3, 32, 32): noise around a pattern of the class."""
    draw = np.random.default_rng(0)
    y = draw.integers(0, CLASSES, n)
    patterns = draw.integers(0, 2, (CLASSES, 3, 8, 8), dtype=np.uint8).repeat(4, 2).repeat(4, 3) * np.uint8(32)
    return draw.integers(0, 224, (n, 3, SIDE, SIDE), dtype=np.uint8) + patterns[y], y


# -- FedLoom ----------------------------------------------------------------------------------------------------------


def federation(x: np.ndarray, y: np.ndarray, users: int) -> Federation:
    rows = list(np.arange(users * EACH).reshape(users, EACH))
    all_, none = Ragged.of(rows), Ragged.of([mine[:0] for mine in rows])
    shift, spread = normalisation(x, users)
    return Federation(
        torch.from_numpy(x), torch.from_numpy(y), CLASSES, {"train": all_, "val": none, "test": all_},
        server=torch.arange(users * EACH, len(y)), mean=tuple(shift), std=tuple(spread),
    )  # fmt: skip


def normalisation(x: np.ndarray, users: int) -> tuple[np.ndarray, np.ndarray]:
    sample = x[: min(users * EACH, 5000)] / 255
    return sample.mean((0, 2, 3)), sample.std((0, 2, 3))


def fedloom(
    data: Federation, args: argparse.Namespace, device: torch.device
) -> tuple[float, list[float], dict[int, float]]:
    """Seconds of everything, when the rounds ended, and accuracy by round."""
    settings = {
        "rounds": args.rounds, "participation": args.cohort, "lr": LR, "batch_size": BATCH, "eval_every": EVERY,
        "eval_clients": args.cohort, "device": str(device), "dtype": args.dtype,
    }  # fmt: skip
    at, found = list[float](), dict[int, float]()

    def on_round(done: int, total: int, scores: dict[str, Any] | None) -> None:
        at.append(time.perf_counter())
        if scores is not None:
            found[done] = scores["acc_global"]

    start = time.perf_counter()
    execute(configure("fedavg", data, model=make_model, values=settings), on_round=on_round)
    wait(device)
    return time.perf_counter() - start, at, found


# -- pfl --------------------------------------------------------------------------------------------------------------


class Pfl:
    """The users as pfl wants them, and runs from the start."""

    def __init__(self, x: np.ndarray, y: np.ndarray, args: argparse.Namespace, device: torch.device) -> None:
        os.environ["PFL_PYTORCH_DEVICE"] = str(device)  # read when a tensor is made
        from pfl.data import FederatedDataset
        from pfl.data.dataset import Dataset
        from pfl.data.sampling import get_user_sampler

        users = args.users
        shift, spread = (v.astype(np.float32)[:, None, None] for v in normalisation(x, users))
        pixels = torch.from_numpy(np.ascontiguousarray(((x / np.float32(255) - shift) / spread).transpose(0, 2, 3, 1)))
        pixels, labels = pixels.to(device), torch.from_numpy(y).to(device)
        parts = [slice(i * EACH, (i + 1) * EACH) for i in range(users)]
        self.users = FederatedDataset.from_slices(
            {i: (pixels[rows], labels[rows]) for i, rows in enumerate(parts)}, get_user_sampler("random", range(users))
        )
        self.central = Dataset(raw_data=[pixels[users * EACH :], labels[users * EACH :]])
        self.cohort, self.dtype, self.device = args.cohort, args.dtype, device

    def run(self, rounds: int) -> tuple[float, float]:
        """Seconds of a round after the first ten, and the last accuracy."""
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByUser
        from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
        from pfl.callback.base import TrainingProcessCallback
        from pfl.callback.central_evaluation import CentralEvaluationCallback
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.metrics import Metrics, get_overall_value
        from pfl.model.pytorch import PyTorchModel
        from pfl.privacy import CentrallyAppliedPrivacyMechanism, NoPrivacy

        module = nn.Sequential(ChannelsFirst(), make_model()).to(self.device)
        module.loss, module.metrics = MethodType(loss, module), MethodType(metrics, module)
        model = PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), SERVER_LR),
            amp_dtype=torch.bfloat16 if self.dtype == "bf16" else None,
        )
        device, at, accuracies = self.device, list[float](), list[float]()

        class Clock(TrainingProcessCallback):
            def after_central_iteration(self, found: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
                wait(device)
                at.append(time.perf_counter())
                scores = {str(name): value for name, value in found}
                if "Central val | accuracy" in scores:
                    accuracies.append(100 * float(get_overall_value(scores["Central val | accuracy"])))
                return False, Metrics()

        evaluation = NNEvalHyperParams(local_batch_size=TESTS)
        FederatedAveraging().run(
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=rounds,
                evaluation_frequency=EVERY,
                train_cohort_size=self.cohort,
                val_cohort_size=0,
            ),
            backend=SimulatedBackend(
                training_data=self.users,
                val_data=self.users,
                postprocessors=[WeightByUser(), NoPrivacy(), CentrallyAppliedPrivacyMechanism(NoPrivacy())],
            ),
            model=model,
            model_train_params=NNTrainHyperParams(
                local_learning_rate=LR, local_num_epochs=1, local_batch_size=BATCH
            ),
            model_eval_params=evaluation,
            callbacks=[CentralEvaluationCallback(self.central, evaluation, frequency=EVERY), Clock()],
            send_metrics_to_platform=False,
        )  # fmt: skip
        return (at[-1] - at[EVERY - 1]) / (rounds - EVERY), accuracies[-1]


def loss(self: nn.Module, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
    self.train(not eval)
    return F.cross_entropy(self(x), y)


@torch.no_grad()
def metrics(self: nn.Module, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
    from pfl.metrics import Weighted

    self.train(not eval)
    logits = self(x)
    correct = (logits.argmax(1) == y).float().sum().item()
    return {
        "loss": Weighted(F.cross_entropy(logits, y, reduction="sum").item(), len(x)),
        "accuracy": Weighted(correct, len(x)),
    }


# -- the table --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    device = find_device(args.device)
    x, y = images(args.users * EACH + args.tests)
    data, theirs = federation(x, y, args.users), Pfl(x, y, args, device)
    half = args.pfl_rounds // 2
    print(
        f"{args.users} users of {EACH} samples, {args.cohort} in a round, batch {BATCH}, {args.rounds} rounds, ", end=""
    )
    print(f"{args.dtype}; pfl {version('pfl')} was measured on 2 x {half} rounds")
    print(describe(device))
    with precision(args.dtype):
        first = theirs.run(half)
        whole, at, accuracies = fedloom(data, args, device)
        second = theirs.run(half)
    each = (first[0] + second[0]) / 2
    after = (half - 1) // EVERY * EVERY
    head(
        "",
        f"s for {args.rounds} rounds",
        "before the first round",
        "ms per round",
        f"accuracy after {after} rounds",
        "gain",
    )
    row("pfl", f"{each * args.rounds:.1f}", "-", f"{each * 1e3:.1f}", f"{(first[1] + second[1]) / 2:.1f} %", "1.0x")
    mine = (at[-1] - at[EVERY]) / (args.rounds - EVERY)
    gain = f"{each * args.rounds / whole:.1f}x"
    set_up = whole - (at[-1] - at[0])
    row("FedLoom", f"{whole:.1f}", f"{set_up:.1f}", f"{mine * 1e3:.1f}", f"{accuracies.get(after, np.nan):.1f} %", gain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1500, help="of FedLoom, and what pfl's time is multiplied by")
    parser.add_argument("--pfl-rounds", type=int, default=200, help="of pfl, a multiple of 20")
    parser.add_argument("--dtype", default="float32", help="as the setting of a run; pfl has no float64")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 6 users, 2 in each of 20 rounds")
    args = parser.parse_args()
    args.users, args.cohort, args.tests = (6, 2, 20) if args.quick else (USERS, COHORT, TESTS)
    if args.quick:
        args.rounds, args.pfl_rounds = 20, 40
    if args.pfl_rounds % (2 * EVERY) or args.pfl_rounds < 4 * EVERY or args.rounds <= EVERY:
        give_up("--pfl-rounds must be a multiple of 20 from 40 on, and --rounds above 10.")
    if args.dtype == "float64":
        give_up("pfl does not train in float64; use --dtype float32.")
    try:
        version("pfl")
    except ModuleNotFoundError:
        give_up("The package 'pfl' is not here; install it with 'pip install pfl[pytorch]' (Python 3.10 to 3.12).")
    try:
        measure(args)
    except UserError as error:
        give_up(error)


if __name__ == "__main__":
    main()
