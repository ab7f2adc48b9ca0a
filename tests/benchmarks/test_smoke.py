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
