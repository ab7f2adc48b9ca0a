"""Runs in Weights & Biases."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedloom.core.errors import oserror_as_user_error
from fedloom.studies.callbacks import TrainingRun
from fedloom.trackers.tracker import Tracker, settings, title


class WandB(Tracker):
    """Logs runs of a project. By default nothing leaves the machine: `wandb sync FOLDER/wandb/offline-run-*` sends it
    later. Needs `pip install 'fedloom[wandb]'`."""

    extra, library = "wandb", "wandb"

    def __init__(
        self, project: str = "fedloom", mode: Literal["offline", "online"] = "offline", folder: str | Path = "runs"
    ) -> None:
        """
        Args:
            project: name of the project.
            mode: "online" sends everything at once, and needs an account.
            folder: where the files are written, in a folder `wandb`.
        """
        super().__init__()
        self.project, self.mode, self.folder = project, mode, Path(folder)

    def begin(self, run: TrainingRun) -> Any:
        """Open the record of a run, and log its settings."""
        import wandb

        with oserror_as_user_error(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        name = title(run)
        where = name if run.folder is None else str(run.folder.absolute())
        return wandb.init(
            project=self.project,
            name=name,
            group=name.rpartition("/")[0] or None,
            # a run that is resumed goes on under the same id
            id=None if run.folder is None else hashlib.sha256(where.encode()).hexdigest()[:16],
            resume="allow" if run.folder is not None else None,
            config=settings(run),
            dir=self.folder,
            mode=self.mode,
            reinit="create_new",  # several runs may train at the same time
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, record: Any, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers of a round."""
        record.log(dict(numbers), step=step)

    def finish(self, record: Any, best: Mapping[str, float]) -> None:
        """Log the metrics of the best round, and close the record."""
        record.summary.update(dict(best))
        record.finish()
