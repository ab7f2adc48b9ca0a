"""FedLoom: personalized federated learning, every client served and every client visible."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {  # __init__.pyi tells type checkers and editors the same
    "fedloom.core.algorithm": ("Algorithm", "Batch", "Draw", "Info", "Phase", "Slot"),
    "fedloom.core.errors": ("UserError",),
    "fedloom.core.federation": ("Federation", "Ragged"),
    "fedloom.core.settings": ("setting",),
    "fedloom.core.task": ("Task",),
    "fedloom.studies.audit": ("Audit", "audit"),
    "fedloom.studies.callbacks": ("Callback", "EarlyStopping", "TrainingRun"),
    "fedloom.studies.compare": ("Comparison", "compare"),
    "fedloom.studies.costs": ("costs",),
    "fedloom.data.user_data.arrays": ("federation",),
    "fedloom.data.sets.own": ("OwnData",),
    "fedloom.studies.deviation": ("deviations",),
    "fedloom.studies.client_model": ("ClientModel",),
    "fedloom.studies.load": ("load",),
    "fedloom.studies.report": ("write_report",),
    "fedloom.studies.result": ("Result",),
    "fedloom.studies.reproduce": ("Reproduction", "reproduce"),
    "fedloom.studies.run": ("run",),
    "fedloom.studies.sweep": ("Sweep", "sweep"),
    "fedloom.trackers.mlflow": ("MLflow",),
    "fedloom.trackers.tensorboard": ("TensorBoard",),
    "fedloom.trackers.wandb": ("WandB",),
}

__all__ = [
    "Algorithm", "Audit", "Batch", "Callback", "ClientModel", "Comparison", "Draw", "EarlyStopping", "Federation",
    "Info", "MLflow", "OwnData", "Phase", "Ragged", "Reproduction", "Result", "Slot", "Sweep", "Task", "TensorBoard",
    "TrainingRun", "UserError", "WandB", "audit", "compare", "costs", "deviations", "federation", "load", "reproduce",
    "run", "setting", "sweep", "write_report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when first used: the command line answers `--help` without waiting for torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'fedloom' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
