"""Running one method from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.config.resolve import configure
from fedloom.core.algorithm import Algorithm
from fedloom.core.federation import Federation
from fedloom.data.dataset import Dataset
from fedloom.data.partitions import Partition
from fedloom.models.zoo import Model
from fedloom.studies.execute import OnRound, execute
from fedloom.studies.result import Result


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
    **values: Any,
) -> Result:
    """Train and evaluate one method.

    `model` is a name, a module (its values are where everybody starts) or a function that builds one (new values for
    every seed); `head` names its last layer. Settings are given by name; `partition__k=2` where two have the same one.
    `out` is a folder in which everything is kept; with `resume`, a run that is there is continued.

    >>> import fedloom
    >>> result = fedloom.run("fedrep", rounds=3, clients=5, seed=1)
    >>> sorted(result.last())[:3]
    ['bytes_down', 'bytes_up', 'cohort']
    """
    values = {key.replace("__", "."): value for key, value in values.items()}
    config = configure(algorithm, dataset, partition, model, head, data_dir, values)
    return execute(config, out=out, resume=resume, on_round=on_round)
