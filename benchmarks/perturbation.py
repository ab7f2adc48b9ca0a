"""How large PLGU-LF's perturbation is beside a step of training, and how much it changes the gradient.

    python benchmarks/perturbation.py [--experiment PLGU-T4 --task cifar10-rho0.05] [--radii 0.05 0.2] [--rounds 50]
                                      [--data-dir FOLDER] [--device cuda] [--dtype tf32] [--quick]

PLGU-LF trains with rho = 0. In every batch the gradient at w_i + eps is also computed for both radii and both scales of
the layer scores, and not used, so that all are measured at the same points. The table has means over batches, clients
and the last ten rounds: the norm of eps and of the unperturbed step eta g, ||g(w_i + eps) - g(w_i)|| / ||g(w_i)||, and
the norm of eps in the layer in which it is largest, relative to that of eps. By default with the preset plgu/digits; a
task of a paper's experiment can be given instead.
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from machine import describe, give_up, head, row

from fedloom.algorithms.parts.lwsam import by_name, distances, perturbation, scores
from fedloom.algorithms.plgu_lf import PLGULF
from fedloom.config.files import ConfigDict, preset
from fedloom.config.resolve import combine, resolve
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.core.tree import add, norm, sub
from fedloom.papers.catalog import runnable
from fedloom.studies.execute import execute
from fedloom.studies.reproduce import select

LAST = 10  # rounds that are averaged
SCALES = ("sum1", "mean1")


@dataclass(frozen=True)
class ProbedPLGULF(PLGULF):
    """PLGU-LF that reports, for every radius and scale, the four columns of the table."""

    name = "plgu-lf-probed"

    radii: tuple[float, float] = setting((0.05, 0.2), "radii at which gradients are measured", low=0)

    @property
    def probes(self):
        return [(rho, scale) for rho in self.radii for scale in SCALES]

    def begin(self, task, down, state, info):
        work = super().begin(task, down, state, info)
        measured = torch.zeros(len(self.probes), 4, dtype=task.dtype, device=task.data.device)
        d = distances(state["theta"], down["w"], task.layers)
        return {**work, "d": d, "measured": measured, "batches": measured[0, 0]}

    def step(self, task, work, batch, down, info):
        w, ascent = work["w"], task.grad(work["theta"], batch)[0]
        g, found = task.grad(w, batch)[0], []
        for rho, scale in self.probes:
            eps = perturbation(ascent, rho, by_name(scores(work["d"], scale), task.layers), self.p)
            there = task.grad(w._replace(params=add(w.params, eps)), batch)[0]
            largest = torch.stack([norm([eps[name] for name in layer]) for layer in task.layers]).max()
            size = norm(eps)
            found.append(torch.stack([size, task.lr * norm(g), norm(sub(there, g)) / norm(g), largest / size]))
        measured = work["measured"] + torch.stack(found)
        return {**super().step(task, work, batch, down, info), "measured": measured, "batches": work["batches"] + 1}

    def report(self, task, work, down, info):
        return {"measured": (work["measured"] / work["batches"]).flatten()}


def measure(base: list[ConfigDict], asked: argparse.Namespace) -> list[tuple[float, str, np.ndarray]]:
    """Radius, scale and the four numbers."""
    mine: ConfigDict = {
        "algorithm": {"name": ProbedPLGULF.name, "rho": 0, "radii": asked.radii},
        "rounds": asked.rounds,
    }
    mine |= {"device": asked.device, "dtype": asked.dtype, "plan": "stacked"}
    mine |= {"data_dir": asked.data_dir} if asked.data_dir else {}
    config = resolve(combine(*base, mine))
    reports = execute(config).reports
    late = reports["round"].to_numpy() > asked.rounds - LAST
    measured = np.array(reports["measured"].to_pylist())[late].mean(0).reshape(-1, 4)
    return [(*probe, numbers) for probe, numbers in zip(config.algorithm.probes, measured, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experiment", help="of a paper, such as PLGU-T4")
    parser.add_argument("--task", help="one of its tasks")
    parser.add_argument("--radii", type=float, nargs=2, default=[0.05, 0.2])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two rounds")
    asked = parser.parse_args()
    asked.rounds = 2 if asked.quick else asked.rounds
    try:
        base = [preset("plgu/digits")]
        if asked.experiment:
            chosen = select(runnable(asked.experiment), [asked.task] if asked.task else [])
            base = list(chosen.tasks[0].settings)
        found = measure(base, asked)
    except UserError as error:
        give_up(error)
    print(describe(torch.device(asked.device)))
    head("rho", "scale", "norm of eps", "norm of a step", "ratio", "change of the gradient", "largest layer")
    for rho, scale, (eps, step, change, largest) in found:
        row(rho, scale, f"{eps:.2g}", f"{step:.2g}", f"{eps / step:.2f}", f"{change:.0%}", f"{largest:.0%}")


if __name__ == "__main__":
    main()
