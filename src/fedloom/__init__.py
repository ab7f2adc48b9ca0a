"""FedLoom: personalized federated learning, every client served and every client visible."""

from fedloom.core.contract import Algorithm, Batch, Draw, Info, Phase, Slot
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation, Ragged
from fedloom.core.settings import setting
from fedloom.core.task import Task
from fedloom.experiment import Result, run

__version__ = "0.1.0"

__all__ = [
    "Algorithm", "Batch", "Draw", "Federation", "Info", "Phase", "Ragged", "Result", "Slot", "Task", "UserError", "run",
    "setting",
]  # fmt: skip
