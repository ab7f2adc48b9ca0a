"""The benchmarks run, and print the table that they promise."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_engines():
    command = [sys.executable, FOLDER / "engines.py", "--quick", "--models", "logreg", "mlp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| logreg", "| mlp"))]
    assert len(rows) == 4  # two models, equal and ragged sizes
    assert all(row.count("x |") == 2 for row in rows)  # two gains
    assert "torch" in done.stdout


def test_scale():
    command = [sys.executable, FOLDER / "scale.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    names, cases = rows[0], rows[2:]
    assert [case[:2] for case in cases] == [[n, store] for store in ("memory", "disk") for n in ("100", "1000")]
    assert names.count("ratio to 1000") == 2  # of a round alone, and with its share of a checkpoint
    assert [case[names.index("ratio to 1000")] for case in cases if case[0] == "1000"] == ["1.00x", "1.00x"]
    assert all((float(case[-1]) > 0) == (case[1] == "disk") for case in cases)  # rows of clients are where they should
    assert "torch" in done.stdout


def test_methods():
    command = [sys.executable, FOLDER / "methods.py", "--quick", "--methods", "ditto", "plgu-lf:D=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| mlp")]
    assert [row.split("|")[2].strip() for row in rows] == ["fedavg", "ditto", "plgu-lf:D=1"]
    assert rows[0].endswith("| 1.00x |")
