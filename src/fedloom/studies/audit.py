"""Auditing what clients reveal: attacks on their uploads and on their personal models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedloom.attacks.uploads import WORDS
from fedloom.config.keywords import takes_settings
from fedloom.config.resolve import AlgorithmLike, Config, DatasetLike, resolve
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.errors import UserError, check_path, shown, unknown
from fedloom.core.federation import Federation
from fedloom.core.task import Task
from fedloom.report.leaderboard import to_csv
from fedloom.report.recoveries import Recovery, draw_curve, draw_recoveries
from fedloom.runs.directory import AT_SITES, CONFIG, RunDirectory
from fedloom.storage.files import json_writer, make_folder, text_writer, write_file
from fedloom.studies.audit_findings import Findings, Row, Say
from fedloom.studies.audited_uploads import ATTACKS, AuditOptions, Watcher
from fedloom.studies.build import make_data, make_task
from fedloom.studies.callbacks import Callback
from fedloom.studies.compare import configure_methods, label, same_division
from fedloom.studies.execute import execute
from fedloom.studies.frames import data_frame
from fedloom.studies.notebook import with_progress
from fedloom.studies.result import Result, load_run


@dataclass(repr=False)
class Audit:
    """What attacks have found.

    Attributes:
        summary: a row per method, amount of noise, and network that is attacked.
        attacks: a row per batch that was to be recovered.
        clients: a row per client, about membership.
        pictures: samples, and what the attacks recovered.
    """

    summary: list[Row]
    attacks: list[Row]
    clients: list[Row]
    pictures: list[Recovery]

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(row["method"] for row in self.summary))
        return f"Audit({methods}: {len(self.attacks)} batches attacked, {len(self.clients)} clients tested)"

    def to_pandas(self, table: str = "summary") -> Any:
        """One of the tables (summary, attacks, clients) as a `pandas.DataFrame`. Needs pandas: `pip install
        'fedloom[pandas]'`."""
        if table not in TABLES:
            raise unknown("table", table, TABLES)
        return data_frame(getattr(self, table))

    def to_json(self) -> dict[str, list[Row]]:
        """All tables, with None in place of numbers that are not finite."""
        return {name: [_plain(row) for row in getattr(self, name)] for name in TABLES}

    def save(self, folder: str | Path) -> list[Path]:
        """Write audit.json, a CSV file per table, recoveries.png with samples and what was recovered of them, and, if
        there are several amounts of noise, epsilon.png. Returns the paths."""
        check_path(folder)
        path = Path(folder)
        make_folder(path)
        write_file(path / "audit.json", json_writer(self.to_json()))
        made = ["audit.json"]
        for name in TABLES:
            if rows := getattr(self, name):
                write_file(path / f"{name}.csv", text_writer(to_csv(rows)))
                made.append(f"{name}.csv")
        if self.pictures:
            draw_recoveries(self.pictures, path / "recoveries.png")
            made.append("recoveries.png")
        if len({row["epsilon"] for row in self.summary} - {None}) > 1:
            draw_curve(self.summary, path / "epsilon.png")
            made.append("epsilon.png")
        return [path / name for name in made]


TABLES = ("summary", "attacks", "clients")


def _plain(row: Row) -> Row:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


@takes_settings("dp_noise")
def audit(
    what: Result | str | Path | AlgorithmLike | Iterable[AlgorithmLike],
    dataset: DatasetLike = "digits",
    *,
    attacks: Sequence[str] = ATTACKS,
    gap: int | None = None,
    victims: int | None = 4,
    batches: int = 2,
    samples: int = 1,
    iterations: int = 100,
    every_part: bool = False,
    dp_noise: float | Sequence[float] = (),
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Audit:
    """Attack what clients upload, and their personal models. That an attack fails shows that *this* attack fails, not
    that anything is private; see docs/audit.md.

    Methods are trained first. Of a finished run, the saved models are attacked, and it is trained once more up to the
    last attacked round for its uploads.

    Args:
        what: one or several methods (as for `fedloom.compare`), or a finished run: its `Result` or its folder.
        dataset: a data set's name, a path to your own data, a `Federation` or a `Dataset`; not for a finished run.
        attacks: "round" (deep leakage from the upload of a whole round), "step" (gradient inversion of the upload after
            one step on a few samples), "membership" (was a sample used in training?).
        gap: rounds between those that are attacked, from the first on [the first and the last round]
        victims: clients of each of these rounds that are attacked; None for all.
        batches: of each of them that "round" is to recover.
        samples: that a client has in "step".
        iterations: of the attacks; "round" makes so many steps of L-BFGS with 20 iterations each.
        every_part: let "round" attack every network that an upload shows, such as the body alone, not only the largest.
        dp_noise: one or several amounts of noise of differential privacy, with `dp_clip`; several are compared with
            each other and with none.
        out: folder for tables and pictures; without it, nothing is written.
        callbacks: as for `fedloom.run`.
        **settings: the keyword arguments below, and settings of the methods, the data set, the partition or the model.

    >>> import fedloom
    >>> found = fedloom.audit("fedrep", rounds=2, clients=5, attacks=["membership"])
    >>> 0 <= found.summary[0]["membership_auc"] <= 1
    True
    """
    options = AuditOptions(
        attacks=(attacks,) if isinstance(attacks, str) else tuple(attacks), gap=gap, victims=victims, batches=batches,
        samples=samples, iterations=iterations, every_part=every_part,
    )  # fmt: skip
    if out is not None:
        check_path(out)
    if (result := finished_run(what)) is not None:
        if settings or dp_noise:
            name = next(iter(settings), "dp_noise")
            raise UserError(
                f"A finished run has its settings; leave out {name}, or audit its method instead of the run."
            )
        found = audit_run(result, options, with_progress(callbacks))
    else:
        configs = configure_methods(what, dataset, settings)  # type: ignore[arg-type]
        noises = [dp_noise] if isinstance(dp_noise, int | float) else list(dp_noise)
        found = audit_methods(configs, options, noises, with_progress(callbacks))
    if out is not None:
        found.save(out)
    return found


def finished_run(what: Any) -> Result | None:
    """The run, if it is one or the folder of one; None for a method."""
    if isinstance(what, Result):
        return what
    if not isinstance(what, str | Path) or what in ALGORITHMS.names() or Path(what).suffix == ".py":
        return None
    path = Path(what)
    if not path.is_dir():
        if len(path.parts) == 1 or ":" in str(what):
            return None
        raise UserError(f"There is no folder {path}; name a finished run, or methods such as 'fedavg'.")
    if (path / AT_SITES).exists():
        raise UserError(f"The samples of {path} are at sites of their own, so no attack could be judged.")
    if not (path / CONFIG).exists():
        raise UserError(f"{path} is not the folder of a run; of a comparison or a sweep, name one of its runs.")
    if not RunDirectory(path).finished:
        raise UserError(f"{path} is not finished; continue the run with --resume {path}.")
    return load_run(path)


def audit_run(
    result: Result, options: AuditOptions, callbacks: Sequence[Callback] = (), say: Say | None = None
) -> Audit:
    """Audit a finished run."""
    options.check()
    for section in ("algorithm", "dataset", "partition", "model"):
        if isinstance(part := result.config.get(section), dict) and part.get("own"):
            raise UserError(
                f"The {section} of this run was made in Python; audit the method instead: fedloom.audit(METHOD, DATA)."
            )
    config = resolve(result.config)
    data = make_data(config)
    if data.digest() != result.partition:
        raise UserError("The data are not those that the run was trained with, so its models cannot be audited.")
    _check_samples(data, options)
    found = Findings(label(config.algorithm), config.settings, options, say)
    if "membership" in options.attacks:
        found.attack_models(result, make_task(config, data), config.algorithm)
    if rounds := options.rounds(result.timings[-1]["round"]):
        less: dict[str, Any] = {"engine": "vectorized", "actors": None, "early_stopping": None, "keep": "none"}
        less |= {"min_delta": 0.0, "eval_every": config.settings.rounds}
        settings = dataclasses.replace(config.settings, **less)
        watcher = Watcher(options, rounds, stop=True)
        execute(dataclasses.replace(config, settings=settings), callbacks=[*callbacks, watcher], data=data)
        found.attack_uploads(watcher)
    return _audit(found, result)


def audit_methods(
    configs: Sequence[Config],
    options: AuditOptions,
    noises: Sequence[float] = (),
    callbacks: Sequence[Callback] = (),
    say: Say | None = None,
) -> Audit:
    """Train and audit methods, each with every amount of noise; of several, also without noise."""
    options.check()
    if not configs:
        raise UserError("An audit needs a method or a run; name one, such as 'fedavg'.")
    _check_noises(noises, configs[0])
    entries = same_division({label(config.algorithm): config for config in configs})
    data = make_data(next(iter(entries.values())))
    _check_samples(data, options)
    each = [(name, one) for name, config in entries.items() for one in _with_noise(config, noises)]
    tasks = [make_task(config, data) for _, config in each]  # raises UserError before anything is trained
    parts = [
        _audit_method(name, config, task, options, callbacks, say)
        for (name, config), task in zip(each, tasks, strict=True)
    ]
    return Audit(*([row for part in parts for row in getattr(part, field)] for field in (*TABLES, "pictures")))


def _check_noises(noises: Sequence[float], config: Config) -> None:
    for noise in noises:
        if isinstance(noise, bool) or not (isinstance(noise, int | float) and 0 < noise < math.inf):
            raise UserError(f"dp_noise must be numbers above 0, such as 0.5 or 1, not {shown(noise)}.")
    if noises and config.settings.dp_clip is None:
        raise UserError(f"dp_noise={noises[0]:g} belongs to dp_clip, the norm of updates; set dp_clip=1, for example.")


def _check_samples(data: Federation, options: AuditOptions) -> None:
    """Raise UserError if nothing that is asked for can be done with these samples."""
    if data.x.dtype == torch.int64 and "membership" not in options.attacks:
        raise UserError(f"There is nothing to attack: {WORDS}; add membership to the attacks.")


def _with_noise(config: Config, noises: Sequence[float]) -> Iterator[Config]:
    """The configuration with each amount of noise."""

    def replaced(**values: Any) -> Config:
        return dataclasses.replace(config, settings=dataclasses.replace(config.settings, **values))

    if not noises:
        yield config
        return
    if len(noises) > 1 or config.algorithm.no_privacy:
        yield replaced(dp_clip=None, dp_noise=None, dp_delta=None)
    if not config.algorithm.no_privacy:
        for noise in noises:
            yield replaced(dp_noise=float(noise))


def _audit_method(
    name: str, config: Config, task: Task, options: AuditOptions, callbacks: Sequence[Callback], say: Say | None
) -> Audit:
    less: dict[str, Any] = {"engine": "vectorized", "actors": None}
    if "membership" in options.attacks:
        less["keep"] = "best"
    config = dataclasses.replace(config, settings=dataclasses.replace(config.settings, **less))
    found = Findings(name, config.settings, options, say)
    watcher = Watcher(options, options.rounds(config.settings.rounds))
    result = execute(config, callbacks=[*callbacks, watcher], data=task.data)
    found.attack_uploads(watcher)
    if "membership" in options.attacks:
        found.attack_models(result, task, config.algorithm)
    return _audit(found, result)


def _audit(found: Findings, result: Result) -> Audit:
    return Audit(found.summary(result), found.attacks, found.clients, found.pictures)
