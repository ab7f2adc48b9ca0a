"""Wall time of whole commands in fresh processes, from the command to its table: with an empty cache, and once more.

    python benchmarks/startup.py                                        # small runs on a CPU
    python benchmarks/startup.py --methods fedavg fedrep gpfl --preset gpfl/fmnist-dirichlet --rounds 100 \\
        --device cuda --data-dir FOLDER [--seeds 3] [--memory 3GB]      # Fashion-MNIST on a GPU
    python benchmarks/startup.py --quick

For every method `fedloom compare METHOD` runs twice, with the same cache, which is empty at first. `planning` is what
the run has measured before its first round, `rounds` are training and evaluation, both as the run records them. `rest`
is everything else: the interpreter, imports, loading and dividing data, files, the table. The first line tells what
imports take alone: of torch, and of all that `fedloom.run` needs. The first stacked step of a process imports torch's
compiler (under a second), which counts as planning where a plan is measured.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from machine import describe, give_up, head, row

from fedloom.storage.files import read_table

IMPORTS = {"torch": "import torch", "fedloom.run": "import fedloom; fedloom.run"}
COMPARED = {"rounds": "--rounds", "preset": "--preset", "dataset": "--dataset", "seeds": "--seeds",
            "device": "--device", "data_dir": "--data-dir", "memory": "--memory", "dtype": "--dtype"}  # fmt: skip


def import_seconds(code: str, repeats: int) -> float:
    """Median of the seconds that this takes in a fresh process, by its own clock."""
    program = f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
    times = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(repeats)]
    return float(np.median([float(done.stdout) for done in times]))


def command(method: str, folder: Path, args: argparse.Namespace) -> list[str]:
    given = {option: getattr(args, name) for name, option in COMPARED.items()}
    options = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return [sys.executable, "-m", "fedloom", "compare", method, "--out", str(folder), *options]


def timed(words: list[str], cache: Path) -> float:
    """Wall seconds of a command that uses this cache."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("FEDLOOM_CACHE", None)
    start = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        give_up(done.stderr)
    return time.perf_counter() - start


def recorded(folder: Path) -> tuple[float, float]:
    """Seconds of planning, and of rounds, of all runs of a comparison."""
    tables = [read_table(path) for path in sorted(folder.rglob("timings.parquet"))]
    total = {name: sum(sum(table[name].to_pylist()) for table in tables) for name in tables[0].column_names}
    return total["plan_seconds"], total["train_seconds"] + total["eval_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["ditto", "fedavg", "fedrep", "gpfl", "page", "pfedkt"])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of processes, of which the medians are shown")
    for name in ("preset", "dataset", "device", "data-dir", "memory", "dtype"):
        parser.add_argument(f"--{name}", help="as of `fedloom compare`")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two rounds of one method, once")
    args = parser.parse_args()
    if args.quick:
        args.methods, args.rounds, args.repeats = args.methods[:1], 2, 1
    print(describe(torch.device(args.device or "cpu")))
    imports = (f"{name} {import_seconds(code, args.repeats):.2f} s" for name, code in IMPORTS.items())
    print(f"imports: {', '.join(imports)}\n")
    head("method", "cache", "wall s", "planning s", "rounds s", "rest s")
    for method in args.methods:
        times: dict[str, list[tuple[float, ...]]] = {"empty": [], "kept": []}
        for _ in range(args.repeats):
            with tempfile.TemporaryDirectory(prefix="fedloom-startup-") as name:
                for cache in times:
                    folder = Path(name, cache)
                    wall = timed(command(method, folder, args), Path(name, "cache"))
                    planning, rounds = recorded(folder)
                    times[cache].append((wall, planning, rounds, wall - planning - rounds))
        for cache, found in times.items():
            row(method, cache, *(f"{value:.2f}" for value in np.median(found, axis=0)))


if __name__ == "__main__":
    main()
