"""What honest clients lose when others send updates that are far too large, and whether honest ones are left out.

    python benchmarks/robustness.py [--methods fedavg scaffold] [--scales 1e2 1e12] [--rounds 30] [--quick]

Digits, 10 clients, Dirichlet 1, MLP. Attackers scale their updates (upload less download). The loss is in points of
mean test accuracy (PM_pre) of the honest clients, against a run with the same cohorts from which attackers are removed.
"""

import argparse
import logging
from collections.abc import Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from machine import describe, head, row
from torch.func import vmap

from fedloom.config.resolve import configure
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.tree import leaves, tree_map
from fedloom.engine.clients import LocalClients
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.studies.build import make_task

ATTACKERS = ([3], [1, 4, 8])
COHORTS = (1.0, 2)  # all clients in a round, or two of the ten


@contextmanager
def poisoned(attackers: Sequence[int], scale: float):
    """Within this context, these clients send scaled updates."""
    original = LocalClients.training_replies

    def training_replies(self, request, cohort, outcome, executor):
        bad = torch.from_numpy(np.isin(request.ids, attackers))
        shared = {**self.initial.constants, **request.shared}

        def of_client(up, mine, bad):
            sent = self.alg.reference(self.task, up, {**shared, **mine})
            found = {}
            for name, part in up.items():
                if all(v.is_floating_point() for v in leaves(part)):
                    old = sent.get(name, tree_map(torch.zeros_like, part))
                    found[name] = tree_map(lambda a, b: torch.where(bad, b + scale * (a - b), a), part, old)
            return found

        up = {**outcome.up, **vmap(of_client)(outcome.up, request.parts, bad)} if outcome.up else outcome.up
        return original(self, request, cohort, outcome._replace(up=up), executor)

    with patch.object(LocalClients, "training_replies", training_replies):
        yield


def accuracy(
    name: str, participation: float, attackers: Sequence[int], rounds: int, removed: bool
) -> tuple[float, set[int]]:
    """Mean accuracy of the honest clients in percent, and who was left out; `removed`: attackers are in no cohort."""
    values = {"clients": 10, "beta": 1.0, "server_share": 0.1, "participation": participation, "rounds": rounds}
    config = configure(name, values={**values, "device": "cpu"})
    run = Simulation(config.algorithm, make_task(config), 0)
    group = RunGroup([run], "stacked-eager")
    for t in range(rounds):
        cohort = np.setdiff1d(run.driver.sample(t), attackers) if removed else None
        if cohort is not None and not len(cohort):
            run.driver.t += 1
        else:
            group.advance(evaluate=False, cohort=cohort)
    scores = group.evaluate()[0].scores["pre"]["test"]
    return float(np.delete(100 * scores[:, 0] / scores[:, 2], attackers).mean()), run.driver.left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=[name for name in ALGORITHMS.names() if name != "local"])
    parser.add_argument("--scales", nargs="+", type=float, default=[1e2, 1e4, 1e8, 1e12])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="a smoke run: FedAvg, one scale, 3 rounds")
    args = parser.parse_args()
    if args.quick:
        args.methods, args.scales, args.rounds = ["fedavg"], [1e8], 3
    logging.getLogger("fedloom").setLevel(logging.ERROR)
    print(describe(torch.device("cpu")))
    head("method", "clients per round", "attackers", *(f"loss at {s:.0e}" for s in args.scales), "honest left out")
    for name in args.methods:
        for participation in COHORTS if ALGORITHMS[name].partial else COHORTS[:1]:
            for attackers in ATTACKERS:
                # a method that needs all clients is compared with a run in which the attackers are honest
                removed = ALGORITHMS[name].partial
                expected, _ = accuracy(name, participation, attackers, args.rounds, removed)
                losses, wrong = [], set()
                for scale in args.scales:
                    with poisoned(attackers, scale):
                        found, left_out = accuracy(name, participation, attackers, args.rounds, False)
                    losses.append(f"{expected - found:+.1f}")
                    wrong |= left_out - set(attackers)
                row(name, "10" if participation == 1 else "2", len(attackers), *losses, sorted(wrong) or "nobody")


if __name__ == "__main__":
    main()
