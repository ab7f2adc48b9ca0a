"""Opening what was kept: a run or a comparison, by its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError, check_path
from fedloom.runs.directory import CONFIG
from fedloom.studies import compare
from fedloom.studies.compare import Comparison
from fedloom.studies.result import Result, load_run


def load(folder: str | Path, *, algorithm: Any = None, model: Any = None) -> Result | Comparison:
    """The results in the folder of a run or of a comparison; of a run that is not finished, what is recorded so far.

    Args:
        folder: where the results were kept (`out`).
        algorithm: the method, if it was not a registered one; needed for `Result.model` only.
        model: the architecture, if it was made in Python (a module, or a function that makes one); needed for
            `Result.model` only.

    >>> import fedloom
    >>> result = fedloom.load("runs/ditto-digits-1")  # doctest: +SKIP
    >>> result.model("Ward 3").predict({"age": 61, "pulse": 72})  # doctest: +SKIP
    """
    check_path(folder)
    path = Path(folder)
    if (path / compare.FILE).exists() and not (path / CONFIG).exists():
        if algorithm is not None or model is not None:
            raise UserError(f"{path} is a comparison; give algorithm and model when you load one of its runs.")
        return compare.load_comparison(path)
    return load_run(path, {"algorithm": algorithm, "model": model})
