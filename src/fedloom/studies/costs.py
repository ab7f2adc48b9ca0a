"""What methods cost on a task, before any training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from fedloom.config.keywords import takes_settings
from fedloom.config.resolve import AlgorithmLike, Config, DatasetLike, combine, resolve
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.engine.costs import Costs, method_costs
from fedloom.engine.simulation import Simulation
from fedloom.studies.build import make_data, make_task
from fedloom.studies.compare import (
    EQUAL_BUDGET,
    configure_methods,
    label,
    parse_method,
    parse_methods,
    same_division,
)

Row = dict[str, Any]


@takes_settings()
def costs(
    methods: Iterable[AlgorithmLike] | AlgorithmLike | None = None, dataset: DatasetLike = "digits", **settings: Any
) -> list[dict[str, Any]]:
    """What methods cost on a task: bytes that are sent, floating-point operations, and state that is kept.

    Nothing is trained but one step of each phase, so this takes about as long as one round of one client.

    Args:
        methods: names, names with settings (`"ditto:lam=0.5"`), `Algorithm` classes or instances; by default all that
            are registered.
        dataset: a data set's name, a path to your own data, a `Federation` or a `Dataset`.
        **settings: the keyword arguments below, and settings of the data set, the partition or the model, by name.

    Returns:
        A dictionary for each method, see docs/costs.md. `problem` says why a method does not fit the task; it has no
        numbers then.

    >>> import fedloom
    >>> fedavg, fedrep = fedloom.costs(["fedavg", "fedrep"])
    >>> (fedavg["parameters"], fedavg["bytes_up"], fedrep["bytes_up"])
    (4810, 19240, 16640)
    """
    return cost_rows(configure_methods(ALGORITHMS.names() if methods is None else methods, dataset, settings))


def configurations(methods: Sequence[str] | None, config: Mapping[str, Any]) -> list[Config]:
    """One configuration per method, from what the command line or a file gives: the file of a run or of a comparison
    names methods, too."""
    task = {key: value for key, value in config.items() if key not in ("methods", "seeds", EQUAL_BUDGET)}
    if methods is None and "algorithm" in task:
        return [resolve(task)]
    names = methods or parse_methods(config.get("methods", ALGORITHMS.names()))
    return [resolve(combine(task, {"algorithm": parse_method(name)})) for name in names]


def cost_rows(configs: Sequence[Config]) -> list[Row]:
    """A row for each configuration, all on the same division of the data. Raises a UserError if none of the methods
    fits the task."""
    if not configs:
        raise UserError("Costs are those of methods; name one, such as 'fedavg'.")
    entries = same_division({label(config.algorithm): config for config in configs})
    data = make_data(on_cpu(next(iter(entries.values()))))
    rows: list[Row] = []
    for name, config in entries.items():
        try:
            rows.append({"method": name, **costs_of(config, data)._asdict(), "problem": ""})
        except UserError as error:  # the method does not fit the task
            rows.append({"method": name, **dict.fromkeys(Costs._fields), "problem": str(error)})
    if all(row["problem"] for row in rows):
        raise UserError(rows[0]["problem"])
    return rows


def costs_of(config: Config, data: Federation) -> Costs:
    """The costs of a configuration's method on data that were loaded for `on_cpu(config)`."""
    config = on_cpu(config)
    return method_costs(Simulation(config.algorithm, make_task(config, data), config.settings.seed, screening=False))


def on_cpu(config: Config) -> Config:
    """The configuration on the CPU, where products can be counted. Parameters keep their precision: tf32 and bf16 are
    precisions of products."""
    dtype: Literal["float32", "float64"] = "float64" if config.settings.dtype == "float64" else "float32"
    return dataclasses.replace(config, settings=dataclasses.replace(config.settings, device="cpu", dtype=dtype))
