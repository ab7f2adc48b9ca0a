"""Opening what was kept: a run, a comparison or a sweep, or the models of a site, by its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError, check_path
from fedloom.runs.directory import CONFIG
from fedloom.studies import compare, personal_models, sweep
from fedloom.studies.compare import Comparison
from fedloom.studies.personal_models import PersonalModels
from fedloom.studies.result import Result, load_run
from fedloom.studies.sweep import Sweep


def load(
    folder: str | Path, *, algorithm: Any = None, model: Any = None
) -> Result | Comparison | Sweep | PersonalModels:
    """The results in the folder of a run, a comparison or a sweep; of an unfinished run, what is recorded so far. Of a
    site of a federation, the personal models that it has of its last run (or of the run whose folder there is given).

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
    studies: dict[str, tuple[str, Callable[[Path], Comparison | Sweep]]] = {
        compare.FILE: ("comparison", compare.load_comparison),
        sweep.FILE: ("sweep", sweep.load_sweep),
    }
    for file, (what, load_study) in studies.items():
        if (path / file).exists() and not (path / CONFIG).exists():
            if algorithm is not None or model is not None:
                raise UserError(f"{path} is a {what}; give algorithm and model when you load one of its runs.")
            return load_study(path)
    if not (path / CONFIG).exists() and (at_site := personal_models.find(path)) is not None:
        return PersonalModels(at_site)
    return load_run(path, {"algorithm": algorithm, "model": model})
