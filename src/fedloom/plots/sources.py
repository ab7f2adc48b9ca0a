"""What figures are made of: results by the label of their method, from folders, comparisons and single runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError, shown
from fedloom.metrics.registry import in_percent
from fedloom.studies.compare import Comparison
from fedloom.studies.found_runs import FoundRun, by_label, check_one_task, distinguished, find_runs
from fedloom.studies.result import VIEWS, Result
from fedloom.studies.sweep import Sweep

Runs = Mapping[str, Sequence[Result]]  # results by the label of their method, one per seed
NAMES = {"pre": "of personal models", "post": "after local training", "global": "of the global model"}


def results(*sources: Any) -> dict[str, list[Result]]:
    """Results by the label of their method, one per seed. All figures take them, or what this function takes.

    Args:
        *sources: the folder of a run, a comparison, a sweep or a reproduction, or one that has runs in it; a `Result`;
            a `Comparison` or a `Sweep` with a folder; a dictionary like the one that is returned.

    >>> import fedloom
    >>> from fedloom import plots
    >>> list(plots.results(fedloom.run("fedrep", rounds=2, clients=5)))
    ['fedrep']
    """
    if len(sources) == 1 and isinstance(sources[0], Mapping):
        return {str(label): list(found) for label, found in sources[0].items()}
    in_memory = [source for source in sources if isinstance(source, Result) and source.folder is None]
    if not sources:
        raise UserError("Give the folder of a run, a comparison or a sweep.")
    if not in_memory:
        return {label: [run.result for run in runs] for label, runs in _found(list(map(_folder, sources))).items()}
    if len(in_memory) < len(sources):
        raise UserError("Runs in memory and folders cannot be mixed; give results by label: {'ditto': [result], ...}.")
    check_one_task([(Path(f"run {i}"), result) for i, result in enumerate(in_memory)])
    found: dict[str, list[Result]] = {}
    for label, result in zip(distinguished([r.config for r in in_memory]), in_memory, strict=True):
        found.setdefault(label, []).append(result)
    return found


def _folder(source: Any) -> Path:
    if isinstance(source, str | Path):
        return Path(source)
    if isinstance(source, Result | Comparison | Sweep):
        if source.folder is None:
            what = type(source).__name__.lower()
            raise UserError(f"This {what} kept no runs; give it a folder with out=FOLDER.")
        return source.folder
    raise UserError(f"There are no runs in '{shown(source)}'; give a folder, a result or a comparison.")


def _found(folders: Sequence[Path]) -> dict[str, list[FoundRun]]:
    """The runs of folders. Those of one folder are labelled as there, those of several by how their settings differ
    and, where that is not enough, by the name of their folder."""
    each = [find_runs(folder).runs for folder in folders]
    if len(each) == 1:
        return by_label(each[0])
    everything = [run for runs in each for run in runs]
    check_one_task([(run.folder, run.result) for run in everything])
    labels = distinguished([run.result.config for run in everything])
    taken = [(label, run.seed) for label, run in zip(labels, everything, strict=True)]
    homes = [folder for folder, runs in zip(folders, each, strict=True) for _ in runs]
    twice = {label for label, seed in taken if taken.count((label, seed)) > 1}
    return by_label(
        run._replace(label=f"{home.name}: {label}" if label in twice else label)
        for run, label, home in zip(everything, labels, homes, strict=True)
    )


def with_view(runs: Runs, view: str) -> dict[str, list[Result]]:
    """The runs whose methods have the model of a view: pre, post or global."""
    if view not in VIEWS:
        raise UserError(f"view cannot be '{shown(view)}'; known: {', '.join(VIEWS)}.")
    found = {label: list(of) for label, of in runs.items() if all(view in result.views() for result in of)}
    if not found:
        raise UserError(f"None of these methods has scores {NAMES[view]}; use another view.")
    return found


def metric_label(metric: str, view: str) -> str:
    """What an axis with scores says."""
    unit = " (%)" if in_percent(metric) else ""
    return f"{metric.replace('_', ' ')} {NAMES[view]}{unit}"


def metric_of(runs: Runs) -> str:
    """The metric of the runs, which are on one task."""
    return next(iter(runs.values()))[0].metric
