"""Trackers by name, as the command line has them."""

from collections.abc import Sequence

from fedloom.core.errors import unknown
from fedloom.trackers import TRACKERS
from fedloom.trackers.mlflow import MLflow
from fedloom.trackers.tensorboard import TensorBoard
from fedloom.trackers.tracker import Tracker
from fedloom.trackers.wandb import WandB

CLASSES: dict[str, type[Tracker]] = dict(zip(TRACKERS, (TensorBoard, MLflow, WandB), strict=True))


def trackers(names: Sequence[str]) -> list[Tracker]:
    """The trackers of these names, each once, with their defaults."""
    for name in names:
        if name not in CLASSES:
            raise unknown("tracker", name, TRACKERS)
    return [CLASSES[name]() for name in dict.fromkeys(names)]
