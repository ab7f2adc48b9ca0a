"""A set of runs on one task, in one folder: the common part of comparisons and sweeps."""

import operator
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.cluster.actors import session
from fedloom.config.files import ConfigDict, read_config, to_yaml
from fedloom.config.resolve import Config, describe, flat
from fedloom.core.errors import UserError, check_path, oserror_as_user_error, shown
from fedloom.core.federation import Federation
from fedloom.core.settings import LARGEST_INT
from fedloom.data.dataset import Dataset
from fedloom.engine.stacked_settings import numeric_settings
from fedloom.models.zoo import Model
from fedloom.runs.directory import CONFIG, RunDirectory
from fedloom.runs.folders import KINDS, check_empty, check_same, exclusive_lock, is_empty
from fedloom.storage.files import text_writer
from fedloom.storage.manifest import Manifest
from fedloom.studies.build import check_more_rounds, make_data, make_task
from fedloom.studies.callbacks import Callback
from fedloom.studies.devices import OnProgress, WorkItem, execute_on_devices, on_cpu
from fedloom.studies.execute import execute_group
from fedloom.studies.result import Result, load_run

LONGEST_NAME = 255  # bytes, of a folder
MOST_RUNS = 100_000
TOO_MANY = f"{{}} runs are more than the {MOST_RUNS} that a study can have; use fewer seeds or settings."


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs that are carried out group by group; the runs of a group are stacked where that can be done."""

    file: str  # that describes the study in its folder
    read: Callable[[Path], ConfigDict]  # reads that description
    config: ConfigDict  # the description
    names: Sequence[str]  # of the runs, without their seeds; runs of one name have different seeds
    runs: Sequence[Config]
    groups: Sequence[Sequence[int]]  # positions of runs
    check_data: Callable[[Federation], None] = lambda data: None  # raises UserError for data that do not fit
    data: Federation | None = None  # if they were already divided
    devices: Sequence[str] = ()  # on each of which a process of its own carries out groups; none: this process does

    @contextmanager
    def opened(self, out: str | Path | None, resume: bool) -> Iterator[tuple[Path | None, Federation]]:
        """The folder of the study, locked, and its data; every mistake is found before the folder is written."""
        if out is not None:
            check_path(out)
        folder = None if out is None else Path(out)
        if folder is None and resume:
            raise UserError(f"resume needs out, the folder of the {KINDS[self.file][0]}.")
        self._check(folder, resume)
        first = on_cpu(self.runs[0], self.devices) if self.devices else self.runs[0]
        data = self.data if self.data is not None else make_data(first)
        self.check_data(data)
        for place, config in enumerate(self.runs):
            if config.settings.seed == self.runs[0].settings.seed:
                path = self.path(folder, place)
                task = make_task(config, data)
                if path is not None and (path / CONFIG).exists():
                    check_more_rounds(config.algorithm, task, read_config(path / CONFIG).get("rounds"), path)
        if folder is not None:
            with oserror_as_user_error(folder):
                folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder) if folder is not None else nullcontext(), session():
            self._check(folder, resume)  # another process may have been faster
            if folder is not None:
                self.write(folder, {self.file: to_yaml(self.config)})
            yield folder, data

    def write(self, folder: Path, texts: Mapping[str, str]) -> None:
        """Replace files of the folder, which must be locked."""
        manifest = Manifest(folder)
        if (folder / self.file).exists() and manifest.exists():
            manifest.load()
        manifest.write({name: text_writer(text) for name, text in texts.items()})

    def _check(self, folder: Path | None, resume: bool) -> None:
        if folder is None:
            return
        if not resume:
            check_empty(folder)
        elif not is_empty(folder):
            check_same(self.read(folder), self.config, folder)

    def path(self, folder: Path | None, place: int) -> Path | None:
        """The directory of a run."""
        return None if folder is None else self._run_folder(folder, place)

    def _run_folder(self, folder: Path, place: int) -> Path:
        return run_folder(folder, self.names[place], self.runs[place].settings.seed)

    def _work(self, folder: Path) -> list[WorkItem]:
        """The groups as items for several devices. If there are fewer groups than devices, each is split into as many
        parts as there are devices for it."""
        items = []
        for group in self.groups:
            parts = max(1, len(self.devices) // len(self.groups))
            for places in np.array_split(np.array(group), min(parts, len(group))):
                configs, folders = [self.runs[i] for i in places], [self._run_folder(folder, i) for i in places]
                alone = len(places) == 1 < len(group)
                name = self.names[places[0]] + (f", seed {configs[0].settings.seed}" if alone else "")
                item = WorkItem(name, configs, folders)
                each = zip(configs, folders, strict=True)
                done = [RunDirectory(path).check(describe(config), True) for config, path in each]
                item.finished = all(done)  # every one is checked before anything is trained
                item.done = item.total if item.finished else 0
                items.append(item)
        return items

    def execute(
        self,
        folder: Path | None,
        data: Federation,
        callbacks: Sequence[Callback] = (),
        on_progress: OnProgress | None = None,
    ) -> Iterator[tuple[int, Result]]:
        """Carry out all runs that are not done yet; yields the position and the result of every run. `on_progress` is
        for several devices, which know no callbacks."""
        if self.devices:
            assert folder is not None
            execute_on_devices(self._work(folder), self.devices, self.runs[0], folder, on_progress)
            for group in self.groups:
                for place in group:
                    yield place, load_run(self._run_folder(folder, place))
            return
        for count, group in enumerate(self.groups):
            results = execute_group(
                [self.runs[place] for place in group],
                out=[self.path(folder, place) for place in group],
                resume=folder is not None,
                callbacks=callbacks,
                names=[self.names[place] for place in group],
                number=(count + 1, len(self.groups)),
                data=data,
            )
            yield from zip(group, results, strict=True)


def run_folder(study: Path, name: str, seed: int) -> Path:
    """The directory of a run of a study."""
    short = re.sub(r"[^\w.,=+-]", "_", name)
    if len(short.encode()) > LONGEST_NAME:
        short = f"{short[:50]}-{zlib.crc32(name.encode()):08x}"
    return study / "runs" / short / f"seed-{seed}"


def stackable_groups(configs: Sequence[Config]) -> list[list[int]]:
    """Positions of configurations that differ in nothing but seeds and plain numbers, so that they can be stacked."""
    found: dict[Any, list[int]] = {}
    for place, config in enumerate(configs):
        described = flat(describe(config)) | {"seed": 0}
        for owner, name in numeric_settings(config.algorithm, config.settings):
            described[f"algorithm.{name}" if owner == "algorithm" else name] = "a number"
        objects = [id(thing) for thing in (config.dataset, config.model) if not isinstance(thing, Dataset | Model)]
        key = type(config.algorithm), *objects, repr(sorted(described.items()))
        found.setdefault(key, []).append(place)
    return list(found.values())


def refuse_seed(keys: Any, what: str) -> None:
    """A study has several seeds, so a single one is a mistake."""
    if "seed" in keys:
        raise UserError(f"A {what} has seeds instead of a seed; say how many (3) or which (4,7,9).")


def parse_seeds(seeds: Any) -> list[int]:
    """A number of seeds, or the seeds themselves (`3`, `4,7,9`, `5,`)."""
    wrong = UserError(f"seeds must be how many (3) or which ones (4,7,9), not '{shown(seeds)}'.")
    try:
        if isinstance(seeds, str):
            parts = [int(part) for part in seeds.rstrip(", ").split(",")]
            found: Sequence[int] = parts if "," in seeds else range(parts[0])
        elif isinstance(seeds, bool):
            raise wrong
        else:
            found = range(operator.index(seeds)) if np.ndim(seeds) == 0 else [operator.index(s) for s in seeds]
        check_size(len(found))
    except (TypeError, ValueError):
        raise wrong from None
    except OverflowError:  # more than a list can have
        raise UserError(TOO_MANY.format(shown(seeds))) from None
    if not found or min(found) < 0 or max(found) > LARGEST_INT or len(set(found)) < len(found):
        raise wrong
    return list(found)


def check_size(runs: int) -> None:
    """Raise UserError for more runs than a study can have."""
    if runs > MOST_RUNS:
        raise UserError(TOO_MANY.format(runs))
