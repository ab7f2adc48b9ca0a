"""What it costs to keep the models of the best and the last round, on the Fashion-MNIST job of `gpu_fmnist.py`.

    python benchmarks/keep.py --data-dir FOLDER [--device cuda] [--methods gpfl ditto] [--rounds 50] [--repeats 3]

Each method runs in turn with keep=none and keep=best, in new folders, as often as `--repeats` says. The time is that of
the whole call, from reading the data to the last file; the column `cost` is the median of the second over the median of
the first, minus 1. `spread` is the largest over the smallest time of keep=none, minus 1: a cost below it is none.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from machine import describe, head, row

from fedloom.config.files import preset
from fedloom.config.resolve import combine, resolve
from fedloom.studies.execute import execute


def seconds(method: str, keep: str, asked: argparse.Namespace) -> tuple[float, int]:
    """Seconds of a run, and the bytes of its folder."""
    folder = Path(tempfile.mkdtemp())
    asks = {
        "algorithm": method,
        "rounds": asked.rounds,
        "device": asked.device,
        "data_dir": asked.data_dir,
        "keep": keep,
    }
    config = resolve(combine(preset("gpfl/fmnist-dirichlet"), asks))
    start = time.perf_counter()
    execute(config, out=folder / "run")
    took = time.perf_counter() - start
    size = sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file())
    shutil.rmtree(folder)
    return took, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "gpfl", "ditto"])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    print(describe(torch.device(asked.device)))
    head("method", "keep=none, s", "keep=best, s", "cost", "spread", "folder, MB")
    for method in asked.methods:
        seconds(method, "none", asked)  # warms up
        found: dict[str, list[float]] = {"none": [], "best": []}
        size = 0
        for _ in range(asked.repeats):
            for keep, times in found.items():
                took, size = seconds(method, keep, asked)
                times.append(took)
        none, best = (statistics.median(found[keep]) for keep in ("none", "best"))
        spread = max(found["none"]) / min(found["none"]) - 1
        row(method, f"{none:.2f}", f"{best:.2f}", f"{best / none - 1:+.1%}", f"{spread:.1%}", f"{size / 1e6:.1f}")


if __name__ == "__main__":
    main()
