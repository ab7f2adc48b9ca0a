"""Runs in MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fedloom.studies.callbacks import TrainingRun
from fedloom.trackers.tracker import Tracker, settings, title

FOLDER_TAG = "fedloom.folder"  # by which a resumed run finds what was logged before


class MLflow(Tracker):
    """Logs runs of an experiment, which `mlflow ui` shows. Needs `pip install 'fedloom[mlflow]'`."""

    extra, library = "mlflow", "mlflow"

    def __init__(self, experiment: str = "fedloom", tracking_uri: str | None = None) -> None:
        """
        Args:
            experiment: name of the experiment; it is made if there is none.
            tracking_uri: a server or a folder; by default what MLflow is set to, for example by $MLFLOW_TRACKING_URI.
        """
        super().__init__()
        self.experiment, self.tracking_uri = experiment, tracking_uri

    def begin(self, run: TrainingRun) -> Any:
        """Open the record of a run, and log its settings."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        folder = "" if run.folder is None else str(run.folder.absolute())
        if run.round and folder:
            earlier = client.search_runs([experiment], f"tags.`{FOLDER_TAG}` = '{folder}'", max_results=1)
            if earlier:
                return client, earlier[0].info.run_id
        started = client.create_run(experiment, run_name=title(run), tags={FOLDER_TAG: folder, "seed": str(run.seed)})
        params = [Param(name, str(value)) for name, value in settings(run).items()]
        client.log_batch(started.info.run_id, params=params)
        return client, started.info.run_id

    def log(self, record: Any, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers of a round."""
        from mlflow.entities import Metric

        client, run_id = record
        now = int(1000 * time.time())
        client.log_batch(run_id, [Metric(name, value, now, step) for name, value in numbers.items()])

    def finish(self, record: Any, best: Mapping[str, float]) -> None:
        """Log the metrics of the best round, and close the record."""
        self.log(record, best, 0)
        client, run_id = record
        client.set_terminated(run_id)
