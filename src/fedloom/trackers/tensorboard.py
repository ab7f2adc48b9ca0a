"""Runs in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.core.errors import oserror_as_user_error
from fedloom.studies.callbacks import TrainingRun
from fedloom.trackers.tracker import Tracker, settings, title


class TensorBoard(Tracker):
    """Writes event files, which `tensorboard --logdir FOLDER` shows. Needs `pip install 'fedloom[tensorboard]'`."""

    extra, library = "tensorboard", "torch.utils.tensorboard"

    def __init__(self, folder: str | Path = "runs/tensorboard") -> None:
        """
        Args:
            folder: where every run gets a folder of its own.
        """
        super().__init__()
        self.folder = Path(folder)

    def begin(self, run: TrainingRun) -> Any:
        """Open the record of a run, and log its settings."""
        from torch.utils.tensorboard import SummaryWriter

        with oserror_as_user_error(self.folder):
            # what an interrupted run had logged of rounds that it repeats is discarded
            writer = SummaryWriter(self.folder / title(run), purge_step=run.round + 1 if run.round else None)
        if not run.round:
            rows = "\n".join(f"| {name} | {value} |" for name, value in settings(run).items())
            writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")
        return writer

    def log(self, record: Any, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers of a round."""
        for name, value in numbers.items():
            record.add_scalar(name, value, step)
        record.flush()

    def finish(self, record: Any, best: Mapping[str, float]) -> None:
        """Log the metrics of the best round, and close the record."""
        for name, value in best.items():
            record.add_scalar(name, value)
        record.close()
