"""Running one method from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.config.keywords import from_keywords, takes_settings
from fedloom.config.resolve import AlgorithmLike, DatasetLike
from fedloom.core.errors import check_path
from fedloom.studies.callbacks import Callback
from fedloom.studies.execute import OnRound, execute
from fedloom.studies.notebook import with_progress
from fedloom.studies.result import Result


@takes_settings()
def run(
    algorithm: AlgorithmLike = "ditto",
    dataset: DatasetLike = "digits",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Train and evaluate one method.

    Args:
        algorithm: the method, a name (see `fedloom list algorithms`), an `Algorithm` class or instance.
        dataset: a data set's name, a path to your own data, a `Federation`, a `Dataset`, or data in Python: a data
            frame, a torch or Hugging Face data set, or a dictionary of them by client.
        out: folder in which everything is kept; without it, nothing is written.
        resume: continue the run in `out`.
        on_round: called after every round with the rounds done, the rounds in all and the row of an evaluated round;
            it may return True to end the run.
        callbacks: objects that see more than that: `fedloom.EarlyStopping`, trackers, your own (docs/callbacks.md).
        **settings: the keyword arguments below, and settings of the method, the data set, the partition or the model,
            by name; `partition__k=2` where two of them have a setting of the same name.

    Returns:
        The results: metrics by round and client, final models.

    >>> import fedloom
    >>> result = fedloom.run("fedrep", rounds=3, clients=5, seed=1)
    >>> sorted(result.last())[:3]
    ['bytes_down', 'bytes_up', 'cohort']
    """
    if out is not None:
        check_path(out)
    config = from_keywords(algorithm, dataset, settings)
    return execute(config, out=out, resume=resume, on_round=on_round, callbacks=with_progress(callbacks))
