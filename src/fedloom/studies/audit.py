"""Auditing what clients reveal: attacks on their uploads and on their personal models."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.attacks.inversion import Range, deep_leakage, in_best_order, one_step, problems
from fedloom.attacks.membership import FEWEST, Membership, membership, overall
from fedloom.attacks.scores import RECOVERED, psnr, reference_psnr, ssim
from fedloom.attacks.uploads import Upload, UploadRecorder, View, first_batches, shown, views, why_not
from fedloom.config.keywords import takes_settings
from fedloom.config.resolve import AlgorithmLike, Config, DatasetLike, resolve
from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError, check_path, unknown
from fedloom.core.federation import Federation, Ragged
from fedloom.core.keys import fold, rng, roots
from fedloom.core.task import Task
from fedloom.core.tree import tree_map
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.metrics.registry import column_name
from fedloom.report.recoveries import Recovery, draw_curve, draw_recoveries
from fedloom.runs.directory import AT_SITES, CONFIG
from fedloom.storage.files import json_writer, make_folder, text_writer, write_file
from fedloom.studies.build import make_data, make_task
from fedloom.studies.callbacks import Callback, TrainingRun
from fedloom.studies.compare import configure_methods, label, same_division
from fedloom.studies.execute import execute
from fedloom.studies.frames import data_frame
from fedloom.studies.notebook import with_progress
from fedloom.studies.result import Result, load_run

Row = dict[str, Any]
Say = Callable[[str], None]  # is told what is being done
ATTACKS = ("round", "step", "membership")
STEPS = 5  # of the attack on one step, for each of the iterations of the other
SIZES = (0, 1, 3)  # samples by which a client's batch grows that makes no step with fewer
PICTURES = 8  # of every method and attack that are kept


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What is attacked, and how long."""

    attacks: tuple[str, ...] = ATTACKS
    gap: int | None = None  # rounds between attacked ones, from the first on; None: the first and the last round
    victims: int | None = 4  # clients of a round whose uploads are attacked; None for all
    batches: int = 2  # of each of them that are to be recovered from the upload of a round
    samples: int = 1  # that a client has in the attack on one step
    iterations: int = 100
    every_part: bool = False  # "round" attacks all networks that an upload shows, not only the largest

    def check(self) -> None:
        """Raise UserError for values that mean nothing."""
        for name in self.attacks:
            if name not in ATTACKS:
                raise unknown("attack", name, ATTACKS)
        if not self.attacks:
            raise UserError(f"An audit needs an attack; name one or several of {', '.join(ATTACKS)}.")
        for name in ("gap", "victims", "batches", "samples", "iterations"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (value is None and name in ("gap", "victims")):
                raise UserError(f"{name} must be a whole number of at least 1, not {value}.")

    def rounds(self, total: int) -> list[int]:
        """Numbers, from 0, of the rounds that are attacked."""
        if not {"round", "step"} & set(self.attacks):
            return []
        return sorted({0, total - 1}) if self.gap is None else list(range(0, total, self.gap))


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
                write_file(path / f"{name}.csv", text_writer(_csv(rows)))
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


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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
    if not isinstance(what, str | Path) or not Path(what).is_dir():
        return None
    path = Path(what)
    if (path / AT_SITES).exists():
        raise UserError(f"The samples of {path} are at sites of their own, so no attack could be judged.")
    if not (path / CONFIG).exists():
        raise UserError(f"{path} is not the folder of a run; of a comparison or a sweep, name one of its runs.")
    return load_run(path)


def audit_run(
    result: Result, options: AuditOptions, callbacks: Sequence[Callback] = (), say: Say | None = None
) -> Audit:
    """Audit a finished run."""
    options.check()
    config = resolve(result.config)
    data = make_data(config)
    if data.digest() != result.partition:
        raise UserError("The data are not those that the run was trained with, so its models cannot be audited.")
    total = result.timings[-1]["round"] if result.timings else config.settings.rounds
    found = _Findings(label(config.algorithm), config, options, say)
    if rounds := options.rounds(total):
        less: dict[str, Any] = {"engine": "vectorized", "actors": None, "early_stopping": None, "keep": "none"}
        less |= {"min_delta": 0.0, "eval_every": config.settings.rounds}
        settings = dataclasses.replace(config.settings, **less)
        watcher = _Watcher(options, rounds, stop=True)
        execute(dataclasses.replace(config, settings=settings), callbacks=[*callbacks, watcher], data=data)
        found.attack_uploads(watcher)
    if "membership" in options.attacks:
        found.attack_models(result, make_task(config, data), config.algorithm)
    return found.audit(result)


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
    if noises and configs[0].settings.dp_clip is None:
        raise UserError(f"dp_noise={noises[0]:g} belongs to dp_clip, the norm of updates; set dp_clip=1, for example.")
    entries = same_division({label(config.algorithm): config for config in configs})
    data, parts = make_data(next(iter(entries.values()))), list[Audit]()
    each = [(name, one) for name, config in entries.items() for one in _with_noise(config, noises)]
    tasks = [make_task(config, data) for _, config in each]  # raises UserError before anything is trained
    for (name, config), task in zip(each, tasks, strict=True):
        parts.append(_audit_method(name, config, task, options, callbacks, say))
    return Audit(*([row for part in parts for row in getattr(part, field)] for field in (*TABLES, "pictures")))


def _with_noise(config: Config, noises: Sequence[float]) -> Iterator[Config]:
    """The configuration with each amount of noise."""

    def replaced(**values: Any) -> Config:
        return dataclasses.replace(config, settings=dataclasses.replace(config.settings, **values))

    if len(noises) > 1 or (noises and config.algorithm.no_privacy):
        yield replaced(dp_clip=None, dp_noise=None, dp_delta=None)
    if not noises:
        yield config
    elif not config.algorithm.no_privacy:
        for noise in noises:
            if not (isinstance(noise, int | float) and 0 < noise < math.inf):
                raise UserError(f"dp_noise must be numbers above 0, not {noise}.")
            yield replaced(dp_noise=float(noise))


def _audit_method(
    name: str, config: Config, task: Task, options: AuditOptions, callbacks: Sequence[Callback], say: Say | None
) -> Audit:
    less: dict[str, Any] = {"engine": "vectorized", "actors": None}
    if "membership" in options.attacks:
        less["keep"] = "best"
    config = dataclasses.replace(config, settings=dataclasses.replace(config.settings, **less))
    found = _Findings(name, config, options, say)
    watcher = _Watcher(options, options.rounds(config.settings.rounds))
    result = execute(config, callbacks=[*callbacks, watcher], data=task.data)
    if watcher.rounds:
        found.attack_uploads(watcher)
    if "membership" in options.attacks:
        found.attack_models(result, task, config.algorithm)
    return found.audit(result)


# -- what leaves the clients


class _Watcher(Callback):
    """Keeps what victims upload in the attacked rounds and, for the attack on one step, what they would upload in these
    rounds if they had a few samples only."""

    def __init__(self, options: AuditOptions, rounds: Sequence[int], stop: bool = False) -> None:
        """With `stop`, the run ends after the last attacked round."""
        self.options, self.rounds, self.stop = options, rounds, stop
        self.after_step: list[tuple[Upload, Tensor]] = []  # an upload, and rows of the samples

    def on_start(self, run: TrainingRun) -> None:
        """Begin to watch the clients."""
        self.run: Simulation = run._run.simulation
        self.wanted = {t: self._victims(t) for t in self.rounds}
        local = self.run.local
        self.recorder = UploadRecorder(local.initial.constants, self.wanted)
        local.on_upload = self.recorder
        self._ask_for_one_step()

    def on_round(self, run: TrainingRun) -> None:
        """Ask for uploads after one step with what is sent in the next round, if it is attacked."""
        self._ask_for_one_step()
        if self.stop and run.round > max(self.rounds):
            run.stop("the audit has seen enough")

    def _victims(self, t: int) -> list[int]:
        cohort, most = self.run.driver.sample(t), self.options.victims
        if most is None or most >= len(cohort):
            return cohort.tolist()
        return np.sort(rng("victims", self.run.seed, t).choice(cohort, most, replace=False)).tolist()

    def _ask_for_one_step(self) -> None:
        t = self.run.t
        if t not in self.wanted or "step" not in self.options.attacks or not self.run.alg.uploads:
            return
        for more in SIZES:
            found = self._one_step(self.wanted[t], self.options.samples + more)
            moved = [upload for upload, _ in found if _moves(self.run, upload)]
            if moved or more == SIZES[-1]:
                self.after_step += found
                return

    def _one_step(self, ids: list[int], count: int) -> list[tuple[Upload, Tensor]]:
        """What clients upload that have so many samples, all in one batch."""
        task, alg = self.run.population, self.run.alg
        count = max(count, alg.min_samples(task), 2 if task.network.buffers else 1)
        train = task.data.splits["train"]
        lists = train.lists()
        for i in ids:
            draw = rng("one-step", self.run.seed, self.run.t, i)
            lists[i] = np.sort(draw.choice(lists[i], min(count, len(lists[i])), replace=False))
        few = Ragged.of(lists).to(task.data.device)
        data = dataclasses.replace(task.data, splits={**task.data.splits, "train": few})
        small = dataclasses.replace(task, data=data, batch_size=count, epochs=1)
        fork = Simulation(alg, small, self.run.seed, screening=False)
        fork.restore(self.run.state())
        recorder = UploadRecorder(fork.local.initial.constants, {fork.t: ids}, self.recorder.latest)
        fork.local.on_upload = recorder
        RunGroup([fork], REFERENCE).advance(evaluate=False, cohort=np.array(ids) if alg.partial else None)
        return [(upload, few[upload.client]) for upload in recorder.uploads]


def _moves(run: Simulation, upload: Upload) -> bool:
    """True if the upload shows that the client has trained."""
    seen = shown(run.alg, run.task, upload, run.seed)
    return any(not torch.equal(seen.sent[name], v) for name, v in seen.uploaded.items())


# -- attacks


class _Findings:
    """What the attacks on one run find."""

    def __init__(self, name: str, config: Config, options: AuditOptions, say: Say | None) -> None:
        self.say = say or (lambda text: None)
        self.name, self.options, s = name, options, config.settings
        noise = None if s.dp_clip is None else 1.0 if s.dp_noise is None else s.dp_noise
        self.about: Row = {"method": name, "dp_clip": s.dp_clip, "dp_noise": noise}
        self.metric = s.metric
        self.attacks: list[Row] = []
        self.clients: list[Row] = []
        self.pictures: list[Recovery] = []
        self.why_not = "it was not attacked" if not {"round", "step"} & set(options.attacks) else ""
        self.parts: list[str] = []
        self.membership = overall([])

    def attack_uploads(self, watcher: _Watcher) -> None:
        """Reconstruct samples from the uploads that were kept."""
        run = watcher.run
        alg, task = run.alg, run.population
        first = next(iter(watcher.recorder.uploads), None)
        self.why_not = why_not(alg, task, {} if first is None else first.up)
        if self.why_not or first is None:
            return
        within, mean = sample_range(task.data), mean_sample(task.data)
        found = views(alg, task, shown(alg, task, first, run.seed).uploaded)
        for same in _equal_shapes(self._few(watcher)):  # the smallest network is the easiest: u stands for the rest
            self._attack("step", run, found[0], same, within, mean)
        for view in found if self.options.every_part else found[-1:]:
            self.parts.append(view.name)
            for same in _equal_shapes(self._batches(watcher)):
                self._attack("round", run, view, same, within, mean)

    def _batches(self, watcher: _Watcher) -> list[tuple[Upload, int, Tensor]]:
        """Uploads of whole rounds, with the number and the samples of a batch each."""
        run = watcher.run
        if "round" not in self.options.attacks:
            return []
        return [
            (upload, j, batch.x)
            for upload in watcher.recorder.uploads
            for j, batch in enumerate(
                first_batches(run.population, run.seed, upload.t, upload.client, self.options.batches)
            )
        ]

    def _few(self, watcher: _Watcher) -> list[tuple[Upload, int, Tensor]]:
        """Uploads after one step, with their samples."""
        data = watcher.run.population.data
        return [(upload, 0, data.samples(rows)) for upload, rows in watcher.after_step]

    def _attack(
        self, attack: str, run: Simulation, view: View, uploads: list[tuple[Upload, int, Tensor]], within: Range,
        mean: Tensor,
    ) -> None:  # fmt: skip
        what = "rounds" if attack == "round" else "single steps"
        self.say(f"{self.title}: recovering {len(uploads)} batches from uploads of {what} ({view.name})")
        seen = [shown(run.alg, run.task, upload, run.seed) for upload, _, _ in uploads]
        at = torch.tensor([[upload.t, upload.client, j] for upload, j, _ in uploads], device=mean.device)
        keys = fold(roots([run.seed], f"attack {attack}", mean.device), *at.T)
        given = problems(view, seen, tuple(uploads[0][2].shape), keys)
        if attack == "round":
            found = deep_leakage(given, self.options.iterations)
        else:
            found = one_step(given, within, STEPS * self.options.iterations)
        for (upload, j, x), y, distance in zip(uploads, found.x, found.distance.tolist(), strict=True):
            reference = math.nan
            if attack == "round":
                reference, y = reference_psnr(x, y), within.low + within.width * y
            else:
                y = in_best_order(x, y)
            each = [psnr(a, b, within.width) for a, b in zip(x, y, strict=True)]
            row = {
                **self.about, "attack": attack, "part": view.name, "round": upload.t + 1, "client": upload.client,
                "batch": j, "samples": len(x), "psnr_ref": reference, "psnr": psnr(x, y, within.width),
                "ssim": ssim(x, y, within.width), "guess": psnr(x, mean.expand_as(x), within.width),
                "recovered": float(np.mean([value >= RECOVERED for value in each])), "distance": distance,
            }  # fmt: skip
            self.attacks.append(row)
            if sum(p.method == self.title and p.attack == attack for p in self.pictures) < PICTURES and x.dim() == 4:
                self.pictures.append(
                    Recovery(self.title, attack, upload.client, upload.t + 1, *_pixels(x, y, within, each))
                )

    @property
    def title(self) -> str:
        noise = self.about["dp_noise"]
        return self.name if noise is None else f"{self.name}, noise {noise:g}"

    def attack_models(self, result: Result, task: Task, alg: Algorithm) -> None:
        """Tell training samples from test samples by the loss of their client's model."""
        best = result.best_on_validation("pre")["round"] != result.last()["round"]
        found = []
        for i in range(task.data.clients):
            rows = [task.data.splits[split][i] for split in ("train", "test")]
            if min(map(len, rows)) < FEWEST:
                continue
            model = tree_map(lambda v: v.to(task.data.device), result.models.client(i, best))
            logits = functools.partial(alg.logits, task, model)
            members, others = (sample_losses(task, logits, r) for r in rows)
            if np.isfinite(members).all() and np.isfinite(others).all():
                one = membership(members, others, seed=i)
                found.append(one)
                self.clients.append({**self.about, "client": i, **_membership_row(one)})
        self.membership = overall(found)

    def audit(self, result: Result) -> Audit:
        """All that was found; `result` has accuracy and epsilon."""
        row, name = result.best_on_validation("pre"), f"pre_{column_name(self.metric)}_mean"
        about = {**self.about, "epsilon": result.epsilon, "metric": self.metric, "score": row.get(name)}
        rows = [
            {
                **about, "part": part, "why_not": self.why_not, **self._means(part),
                **{f"membership_{k}": v for k, v in _membership_row(self.membership).items()},
                "membership_clients": len(self.clients),
            }
            for part in self.parts or [""]
        ]  # fmt: skip
        return Audit(rows, self.attacks, self.clients, self.pictures)

    def _means(self, part: str) -> Row:
        """Means over batches; those whose attack ended in NaN are left out and counted."""
        means: Row = {}
        for attack, names in (
            ("round", ("psnr_ref", "psnr", "ssim", "guess")),
            ("step", ("psnr", "ssim", "guess", "recovered")),
        ):
            rows = [
                row for row in self.attacks if row["attack"] == attack and (attack == "step" or row["part"] == part)
            ]
            kept = [row for row in rows if not math.isnan(row["psnr"])]
            means |= {f"{attack}_{name}": _mean([row[name] for row in kept]) for name in names}
            means |= {f"{attack}_batches": len(rows), f"{attack}_failed": len(rows) - len(kept)}
        return means


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _membership_row(found: Membership) -> Row:
    return {**found._asdict(), "balanced_accuracy": found.balanced_accuracy}


def _equal_shapes(uploads: list[tuple[Upload, int, Tensor]]) -> list[list[tuple[Upload, int, Tensor]]]:
    """The same, in groups of batches of equal size, which are attacked at once."""
    groups: dict[tuple[int, ...], list[tuple[Upload, int, Tensor]]] = {}
    for one in uploads:
        groups.setdefault(tuple(one[2].shape), []).append(one)
    return list(groups.values())


def sample_range(data: Federation) -> Range:
    """The range of values of samples as models receive them: for pixels what they can be, else what training samples
    are."""
    if data.x.dtype == torch.uint8:
        ends = data.prepare(
            torch.tensor([0, 255], dtype=torch.uint8, device=data.device).view(2, *[1] * (data.x.dim() - 1))
        )
    else:
        ends = data.x[data.splits["train"].flat]
    low, high = (float(v) for v in ends.aminmax())
    return Range(low, high if high > low else low + 1.0)


def mean_sample(data: Federation) -> Tensor:
    """The mean of all training samples: what somebody would guess who sees no upload."""
    rows = data.splits["train"].flat
    total = sum(data.prepare(data.x[some]).double().sum(0) for some in rows.split(4096))
    return (total / len(rows)).to(data.dtype)  # type: ignore[union-attr]


@torch.no_grad()
def sample_losses(task: Task, logits: Callable[[Tensor], Tensor], rows: Tensor) -> np.ndarray:
    """The loss of a model on every sample; for sequences, its mean over the positions that are not padding."""
    found = []
    for some in rows.split(1024):
        y = task.data.y[some]
        losses = task.losses(logits(task.data.samples(some)), y)
        if task.data.sequences:
            losses = losses.sum(1) / (y >= 0).sum(1).clamp(min=1)
        found.append(losses.double())
    return torch.cat(found).cpu().numpy()


def _pixels(x: Tensor, y: Tensor, within: Range, each: list[float]) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Both kinds of samples as pictures in 0..1, (samples, height, width, channels)."""
    both = [((v.double() - within.low) / within.width).clamp(0, 1).movedim(1, -1).cpu().numpy() for v in (x, y)]
    return both[0], np.nan_to_num(both[1], nan=0.5), each
