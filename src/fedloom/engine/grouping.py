"""Finding runs that can be stacked, by a dry run."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedloom.core.tree import tree_flatten
from fedloom.engine.planning.dry_run import dry_run
from fedloom.engine.simulation import Simulation
from fedloom.engine.stacked_settings import Name, differing_settings, numeric_settings, stacked_algorithm, values_tree

log = logging.getLogger("fedloom")


def groups(runs: Sequence[Simulation], plan: str = "auto") -> list[list[int]]:
    """Divide runs into as few groups as can be stacked; returns their positions.

    If a method branches in Python on a numeric setting or derives tensor shapes from it, runs with different values go
    to different groups; a dry run finds such settings.
    """
    names = differing_settings(runs)
    everyone = list(range(len(runs)))
    if not names or plan == "per-client":
        return [everyone]
    structures: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        structures.setdefault(_structure(run), []).append(place)
    if len(structures) > 1:
        each = [(places, groups([runs[place] for place in places], plan)) for places in structures.values()]
        return [[places[place] for place in group] for places, found in each for group in found]
    why = _obstacle(runs, names)
    if why is None or _obstacle(runs, []) is not None:  # it cannot be stacked in any case
        return [everyone]
    bad = [name for name in names if _obstacle(runs, [name]) is not None] or names
    log.warning(
        "Runs that differ in %s cannot be stacked and run one after another: %s branches on such a setting or derives "
        "tensor shapes from it.",
        " or ".join(name.name for name in bad), runs[0].alg.name,
    )  # fmt: skip
    log.debug("%s", why)
    found: dict[tuple[float, ...], list[int]] = {}
    for place, run in enumerate(runs):
        mine = numeric_settings(run.alg, run.task)
        found.setdefault(tuple(mine[name] for name in bad), []).append(place)
    return list(found.values())


def _structure(run: Simulation) -> str:
    """The tree structure of what clients have and receive: only runs with the same one can be stacked."""
    cohort = run.first_cohort()
    return str(tree_flatten((cohort.shared, cohort.parts, cohort.client_state, cohort.stats))[1])


def _obstacle(runs: Sequence[Simulation], names: Sequence[Name]) -> str | None:
    """Why runs that differ in these settings cannot be stacked; None if they can."""
    first, twice = runs[0], np.zeros(2, dtype=np.int64)
    cohort = replace(first.first_cohort(), shared_by_run={0: values_tree(first, names)}).rows(twice)
    try:
        dry_run(stacked_algorithm(runs, names), first.task, cohort)
    except Exception as error:  # a method may do anything with a number that has become a tensor
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None
