"""Running one method from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.config.keywords import takes_settings
from fedloom.config.resolve import configure
from fedloom.core.algorithm import Algorithm
from fedloom.core.federation import Federation
from fedloom.data.dataset import Dataset
from fedloom.data.partitions import Partition
from fedloom.models.zoo import Model
from fedloom.studies.execute import OnRound, execute
from fedloom.studies.result import Result


@takes_settings()
def run(
    algorithm: str | Algorithm | type[Algorithm] = "ditto",
    dataset: str | Path | Dataset | Federation = "digits",
    *,
    partition: str | Partition | None = None,
    model: str | Model | nn.Module | Callable[[], nn.Module] | None = None,
    head: str = "head",
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Result:
    """Train and evaluate one method.

    Args:
        algorithm: the method, a name (see `fedloom list algorithms`), an `Algorithm` class or instance.
        dataset: a data set's name, a path to your own data, a `Federation` or a `Dataset`.
        partition: how samples are divided among clients, a name or a `Partition`; by default the data set's.
        model: a name, a `torch.nn.Module` (its parameters are everybody's initial ones) or a function that builds one
            (every seed has its own initial parameters); by default the data set's.
        head: name of the last layer of a model of your own.
        data_dir: folder with the data set's files.
        out: folder in which everything is kept; without it, nothing is written.
        resume: continue the run in `out`.
        on_round: called after every round with the rounds done, the rounds in all and the row of an evaluated round.
        **settings: settings of the run (below), of the method, the data set, the partition or the model, by name;
            `partition__k=2` where two of them have a setting of the same name.

    Returns:
        The results: metrics by round and client, final models.

    >>> import fedloom
    >>> result = fedloom.run("fedrep", rounds=3, clients=5, seed=1)
    >>> sorted(result.last())[:3]
    ['bytes_down', 'bytes_up', 'cohort']
    """
    values = {key.replace("__", "."): value for key, value in settings.items()}
    config = configure(algorithm, dataset, partition, model, head, data_dir, values)
    return execute(config, out=out, resume=resume, on_round=on_round)
