"""What honest clients lose when others send harmful updates, and whether honest ones are left out.

    python benchmarks/robustness.py scaled [--methods fedavg scaffold] [--rounds 30] [--seeds 3] [--workers 2] [--quick]
    python benchmarks/robustness.py directed ...

Digits, 10 clients, Dirichlet 1, MLP; one or three clients attack, all or two of ten clients take part in a round.
`scaled`: attackers multiply their updates (upload less download) by 1e2 to 1e12, with default settings. `directed`:
they flip the signs of their updates or send constant or random numbers, for the methods whose server averages, with
each of the defences that a user can choose.

The loss is in points of mean test accuracy (PM_pre) of the honest clients, against a run with the same cohorts from
which the attackers are removed (or honest, for a method that needs all clients), with default settings. Every seed has
its own partition.
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from machine import describe, head, row
from torch import Tensor
from torch.func import vmap

from fedloom.config.resolve import configure
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.keys import rng
from fedloom.core.tree import leaves, tree_map
from fedloom.engine.clients import LocalClients
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.studies.build import make_task

CLIENTS = 10
ATTACKERS = ([3], [1, 4, 8])
COHORTS = (1.0, 2)  # all clients in a round, or two of the ten

Attack = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # upload, what it is measured from -> what is sent


def scaled(by: float) -> Attack:
    return lambda up, sent, draw: sent + by * (up - sent)


def constant(up: Tensor, sent: Tensor, draw: torch.Generator) -> Tensor:
    return torch.ones_like(up)


def random(up: Tensor, sent: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(up.shape, generator=draw)


def random_update(up: Tensor, sent: Tensor, draw: torch.Generator) -> Tensor:
    """A random update as large, entry by entry of the upload, as the true one."""
    noise = torch.randn(up.shape, generator=draw).flatten(1)
    size = (up - sent).flatten(1).norm(dim=1, keepdim=True)
    return sent + (size * noise / noise.norm(dim=1, keepdim=True)).view_as(up)


SCALED: dict[str, Attack] = {f"{by:.0e}": scaled(by) for by in (1e2, 1e4, 1e8, 1e12)}
DIRECTED: dict[str, Attack] = {
    "signs": scaled(-1),
    "signs x 10": scaled(-10),
    "constant": constant,
    "random": random,
    "random update": random_update,
}
DEFENCES: dict[str, dict[str, Any]] = {
    "default": {},
    "clipping": {"clip_updates": 1},
    "median": {"aggregation": "median"},
    "trimmed mean": {"aggregation": "trimmed_mean", "trim": 0.3},
    "directions": {"screen_directions": True},
    "directions and clipping": {"screen_directions": True, "clip_updates": 1},
}


def make_run(name: str, participation: float, seed: int, rounds: int, settings: dict[str, Any]) -> Simulation:
    values = {"clients": CLIENTS, "beta": 1.0, "server_share": 0.1, "participation": participation, "rounds": rounds}
    config = configure(name, values={**values, "partition_seed": seed + 1, "device": "cpu", **settings})
    s = config.settings
    options = {"clip_updates": s.clip_updates, "screen_directions": s.screen_directions}
    return Simulation(config.algorithm, make_task(config), seed, **options)


def attack(clients: LocalClients, attackers: Sequence[int], what: Attack) -> None:
    """From now on, these clients send what the attack makes of their uploads."""
    original = clients.training_replies

    def training_replies(request, cohort, outcome, executor):
        bad = torch.from_numpy(np.isin(request.ids, attackers))
        draw = torch.Generator().manual_seed(int(rng("attack", clients.seed, request.t).integers(2**31)))
        shared = {**clients.initial.constants, **request.shared}

        def reference(up, mine):
            sent = clients.alg.reference(clients.task, up, {**shared, **mine})
            return {name: sent.get(name, tree_map(torch.zeros_like, part)) for name, part in up.items()}

        def attacked(up, sent):
            return torch.where(bad.view(-1, *[1] * (up.dim() - 1)), what(up, sent, draw), up)

        if bad.any():
            sent = vmap(reference)(outcome.up, request.parts)
            numbers = [n for n, part in outcome.up.items() if all(v.is_floating_point() for v in leaves(part))]
            wrong = {name: tree_map(attacked, outcome.up[name], sent[name]) for name in numbers}
            outcome = outcome._replace(up={**outcome.up, **wrong})
        return original(request, cohort, outcome, executor)

    clients.training_replies = training_replies  # type: ignore[method-assign]


def remove(run: Simulation, attackers: Sequence[int]) -> None:
    """From now on, these clients are in no cohort but in those that have no other client."""
    original = run.driver.sample

    def sample(t: int) -> np.ndarray:
        honest = np.setdiff1d(original(t), attackers)
        return honest if len(honest) else original(t)

    run.driver.sample = sample  # type: ignore[method-assign]


def losses(
    name: str, participation: float, attackers: Sequence[int], seed: int, rounds: int, kinds: Sequence[tuple[str, str]]
) -> tuple[list[float], set[int]]:
    """Points that honest clients lose with each (attack, defence); and honest clients that were left out."""
    runs = [make_run(name, participation, seed, rounds, {})]
    if ALGORITHMS[name].partial:
        remove(runs[0], attackers)
    for kind, defence in kinds:
        runs.append(make_run(name, participation, seed, rounds, DEFENCES[defence]))
        attack(runs[-1].clients, attackers, {**SCALED, **DIRECTED}[kind])
    group = RunGroup(runs, "stacked-eager")
    for t in range(rounds):
        alone = np.isin(runs[0].driver.sample(t), attackers).all() and ALGORITHMS[name].partial
        runs[0].driver.t += int(alone)  # there is no round without the attackers
        group.advance(evaluate=False, some=range(int(alone), len(runs)))
    scores = [found.scores["pre"]["test"] for found in group.evaluate()]
    expected, *found = [float(np.delete(100 * one[:, 0] / one[:, 2], attackers).mean()) for one in scores]
    return [expected - one for one in found], {i for run in runs for i in run.driver.left_out} - set(attackers)


def table(job: str, name: str, seeds: int, rounds: int, quick: bool) -> list[list[Any]]:
    """The rows of a method."""
    torch.set_num_threads(1)
    logging.getLogger("fedloom").setLevel(logging.ERROR)
    attacks = list(SCALED if job == "scaled" else DIRECTED)
    defences = ["default"] if job == "scaled" else list(DEFENCES)
    rows = []
    for participation in COHORTS if ALGORITHMS[name].partial and not quick else COHORTS[:1]:
        for attackers in ATTACKERS:
            kinds = [(a, d) for a in attacks for d in defences]
            each = [losses(name, participation, attackers, seed, rounds, kinds) for seed in range(seeds)]
            found = {kind: np.array([lost[k] for lost, _ in each]) for k, kind in enumerate(kinds)}
            wrong = {i for _, left_out in each for i in left_out}
            cohort = "10" if participation == 1 else "2"
            honest = ", ".join(map(str, sorted(wrong))) or "nobody"
            if job == "scaled":
                largest = max(found[a, "default"].max() for a in attacks)
                cells = [f"{found[a, 'default'].mean():+.1f}" for a in attacks]
                rows.append([name, cohort, len(attackers), *cells, f"{largest:+.1f}", honest])
                continue
            for a in attacks:
                cells = [f"{found[a, d].mean():+.1f}" for d in defences]
                best = min(found[a, d].mean() for d in defences)
                rows.append([name, cohort, len(attackers), a, *cells, f"{best:+.1f}", honest])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", nargs="?", choices=["scaled", "directed"], default="scaled")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a smoke run: FedAvg, 3 rounds, one seed")
    args = parser.parse_args()
    if args.quick:
        args.methods, args.rounds, args.seeds = ["fedavg"], 3, 1
    chosen = args.methods or [
        name for name in ALGORITHMS.names() if (name != "local" if args.job == "scaled" else ALGORITHMS[name].averages)
    ]
    print(describe(torch.device("cpu")))
    columns = [*SCALED, "worst of all seeds"] if args.job == "scaled" else ["attack", *DEFENCES, "best"]
    head("method", "clients per round", "attackers", *columns, "honest left out")
    work = partial(table, args.job, seeds=args.seeds, rounds=args.rounds, quick=args.quick)
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for rows in (map if args.quick else pool.map)(work, chosen):
            for cells in rows:
                row(*cells)


if __name__ == "__main__":
    main()
