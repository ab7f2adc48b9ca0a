"""The benchmarks run, and print the table that they promise."""

import io
import logging
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fedloom.core.algorithm import ALGORITHMS

FOLDER = Path(__file__).parents[2] / "benchmarks"
IN_PROCESSES = ("endurance", "scale")  # which start processes of their own, and measure the memory of one


def run(name: str, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """What a script prints; most run in this process, because starting another takes longer than they do."""
    command = [str(FOLDER / f"{name}.py"), "--quick", *options]
    if name in IN_PROCESSES:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    else:
        done = run_here(command)
    assert done.returncode == code, done.stderr
    return done


def run_here(command: list[str]) -> subprocess.CompletedProcess[str]:
    out, err, code = io.StringIO(), io.StringIO(), 0
    log, threads = logging.getLogger("fedloom"), torch.get_num_threads()
    level, disabled = log.level, logging.root.manager.disable
    known = {name: ALGORITHMS[name] for name in ALGORITHMS.names()}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", command)
        patch.syspath_prepend(FOLDER)
        patch.setattr(ALGORITHMS, "_known", known)  # without the methods of scripts afterwards
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            torch.set_num_threads(threads)
            log.setLevel(level)
            logging.disable(disabled)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def table(text: str) -> list[dict[str, str]]:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


def test_engines():
    done = run("engines", "--models", "logreg", "mlp", "--batch", "5")
    rows = table(done.stdout)
    assert [(row["model"], row["sizes"]) for row in rows] == [
        (model, sizes) for model in ("logreg", "mlp") for sizes in ("equal", "ragged")
    ]
    for row in rows:
        gain = float(row["vectorized gain"].removesuffix("x"))
        assert gain == pytest.approx(float(row["plain loop"]) / float(row["vectorized"]), rel=0.01, abs=0.006)
    assert "batch 5" in done.stdout
    assert "torch" in done.stdout


def test_scale():
    done = run("scale", "--filled")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    names, cases = rows[0], rows[2:]
    assert [case[:2] for case in cases] == [[n, store] for store in ("memory", "disk") for n in ("100", "1000")]
    assert names.count("ratio to 1000") == 2  # of a round alone, and with its share of a checkpoint
    assert [case[names.index("ratio to 1000")] for case in cases if case[0] == "1000"] == ["1.00x", "1.00x"]
    assert all((float(case[-1]) > 0) == (case[1] == "disk") for case in cases)  # only there are rows on disk
    assert "torch" in done.stdout


def test_perturbation():
    rows = table(run("perturbation").stdout)
    assert [(row["rho"], row["scale"]) for row in rows] == [(r, s) for r in ("0.05", "0.2") for s in ("sum1", "mean1")]
    eps, ratio = ([float(row[name]) for row in rows] for name in ("norm of eps", "ratio"))
    assert eps[2:] == pytest.approx([4 * eps[0], 4 * eps[1]], rel=0.05)  # two digits are printed
    assert ratio[1] == pytest.approx(2 * ratio[0], rel=0.05)  # of two layers


def test_methods():
    done = run("methods", "--methods", "ditto", "plgu-lf:D=1")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| mlp")]
    assert [row.split("|")[2].strip() for row in rows] == ["fedavg", "ditto", "plgu-lf:D=1"]
    assert rows[0].endswith("| 1.00x |")


def test_gpu_fmnist():
    found = {row["method"]: row for row in table(run("gpu_fmnist", "--methods", "fedavg", "ditto").stdout)}
    assert list(found) == ["fedavg", "ditto", "plain FedAvg"]
    fedavg, ditto = found["fedavg"], found["ditto"]
    # one sample through cnn4: 5x5 convolutions to 32x24x24 and 64x8x8, then 1024 -> 512 -> 10
    conv1, rest = 2 * 32 * 24**2 * 25, 2 * (64 * 8**2 * 32 * 25 + 1024 * 512 + 512 * 10)
    flops = 9 * 10 * (2 * conv1 + 3 * rest)  # 9 steps, batch 10; the first convolution needs no gradient of its input
    assert float(fedavg["GFLOP"]) == pytest.approx(flops / 1e9, rel=1e-3)
    assert float(ditto["GFLOP"]) == pytest.approx(2 * flops / 1e9, rel=1e-3)  # it trains two models
    # bytes: parameters and gradients twice, what is kept of a sample twice (of poolings also where the maximum was)
    parameters = 32 * 26 + 64 * (32 * 25 + 1) + 512 * 1025 + 10 * 513
    kept = 4 * (32 * 24**2 + 64 * 8**2 + 512) + 12 * (32 * 12**2 + 64 * 4**2)
    least = 9 * (4 * 4 * parameters + 10 * (2 * kept + 4 * 28**2))
    assert float(fedavg["GB"]) == pytest.approx(least / 1e9, rel=0.01)
    assert [row["client-steps"] for row in found.values()] == ["9", "18", "9"]
    assert all(float(row["with evaluation"]) > 0 and row["gain over plain FedAvg"][-1] == "x" for row in found.values())
    assert all(float(row["of the ceiling"].removesuffix(" %")) > 0 for row in (fedavg, ditto))


def test_a_mistake_gets_one_sentence():
    done = run("gpu_fmnist", "--dtype", "float31", code=2)
    assert done.stderr.strip() == "dtype cannot be 'float31'; did you mean 'float32'?"


@pytest.mark.parametrize(("name", "package"), [("vs_flower", "ray"), ("pfl_cifar10", "pfl")])
def test_other_frameworks(name, package):
    if find_spec(package) is None:
        assert "pip install" in run(name, code=2).stderr
    else:
        gains = [row["gain"] for row in table(run(name).stdout)]
        assert len(gains) == 2
        assert all(float(gain.removesuffix("x")) >= 0 for gain in gains)


def test_robustness():
    scaled, directed = (table(run("robustness", job).stdout) for job in ("scaled", "directed"))
    assert [row["attackers"] for row in scaled] == ["1", "3"]
    assert all(abs(float(row[scale])) < 2 for row in scaled for scale in ("1e+02", "1e+12"))
    assert {row["honest left out"] for row in scaled} == {"nobody"}
    assert [row["attack"] for row in directed[:5]] == ["signs", "signs x 10", "constant", "random", "random update"]
    assert len(directed) == 10


def test_endurance():
    """A finding would be exit code 1. With this seed the command is killed once; tests/runs/test_kills.py has more."""
    commands = (["flips"], ["kills", "--seed", "11"], ["soak"])
    flips, kills, soak = (table(run("endurance", *words).stdout) for words in commands)
    assert sum(int(row["flips"]) for row in flips) == 4
    assert [(row["store"], row["commands"]) for row in kills] == [("memory", "1")]
    assert [row["rounds"] for row in soak] == ["10 %", "20 %", "50 %", "100 %"]


def test_startup():
    """In the second process the plan is known. How long both take depends on the machine."""
    done = run("startup")
    rows = table(done.stdout)
    assert [(row["method"], row["cache"]) for row in rows] == [("ditto", "empty"), ("ditto", "kept")]
    for row in rows:
        parts = sum(float(row[name]) for name in ("planning s", "rounds s", "rest s"))
        assert parts == pytest.approx(float(row["wall s"]), abs=0.02)
    assert "imports: torch" in done.stdout


def test_report():
    (found,) = table(run("report").stdout)
    assert [found[name] for name in ("clients", "methods", "rounds", "seeds")] == ["6", "2", "6", "1"]
    assert float(found["made"].removesuffix(" s")) > 0
    assert 0.7 < float(found["size"].removesuffix(" MB")) < 1.5  # most of it is Vega
    times = [found[name].removesuffix(" s") for name in ("load event", "first chart", "all charts")]
    assert not any(times) or times == sorted(times, key=float)  # there may be no browser
