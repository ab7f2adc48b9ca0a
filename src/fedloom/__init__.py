"""FedLoom: personalized federated learning, every client served and every client visible."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.comparison import Comparison, compare
    from fedloom.core.contract import Algorithm, Batch, Draw, Info, Phase, Slot
    from fedloom.core.errors import UserError
    from fedloom.core.federation import Federation, Ragged
    from fedloom.core.settings import setting
    from fedloom.core.task import Task
    from fedloom.data.own.arrays import federation
    from fedloom.data.sets.own import OwnData
    from fedloom.deviation import deviations
    from fedloom.experiment import Result, load, run
    from fedloom.search import Sweep, sweep

__version__ = "0.1.0"

_HOMES = {
    "fedloom.core.contract": ("Algorithm", "Batch", "Draw", "Info", "Phase", "Slot"),
    "fedloom.core.errors": ("UserError",),
    "fedloom.core.federation": ("Federation", "Ragged"),
    "fedloom.core.settings": ("setting",),
    "fedloom.core.task": ("Task",),
    "fedloom.comparison": ("Comparison", "compare"),
    "fedloom.data.own.arrays": ("federation",),
    "fedloom.data.sets.own": ("OwnData",),
    "fedloom.deviation": ("deviations",),
    "fedloom.experiment": ("Result", "load", "run"),
    "fedloom.search": ("Sweep", "sweep"),
}

__all__ = [
    "Algorithm", "Batch", "Comparison", "Draw", "Federation", "Info", "OwnData", "Phase", "Ragged", "Result", "Slot",
    "Sweep", "Task", "UserError", "compare", "deviations", "federation", "load", "run", "setting", "sweep",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when first used: the command line answers `--help` without waiting for torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'fedloom' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
