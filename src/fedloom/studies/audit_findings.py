"""What the attacks of an audit find in one run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.attacks.inversion import Range, deep_leakage, in_best_order, one_step, problems
from fedloom.attacks.membership import FEWEST, Membership, membership, overall
from fedloom.attacks.scores import RECOVERED, psnr, reference_psnr, ssim
from fedloom.attacks.uploads import MODEL, Upload, View, first_batches, shown, views, why_not
from fedloom.config.settings import Settings
from fedloom.core.algorithm import Algorithm
from fedloom.core.federation import Federation
from fedloom.core.keys import fold, roots
from fedloom.core.task import Task
from fedloom.core.tree import tree_map
from fedloom.engine.simulation import Simulation
from fedloom.metrics.registry import column_name
from fedloom.report.recoveries import Recovery
from fedloom.studies.audited_uploads import RECONSTRUCTIONS, AuditOptions, Watcher
from fedloom.studies.result import Result

Row = dict[str, Any]
Say = Callable[[str], None]  # is told what is being done
STEPS = 5  # of the attack on one step, for each of the iterations of the other
PICTURES = 8  # of every method and attack that are kept


class Victim(NamedTuple):
    """A batch that is to be recovered."""

    upload: Upload
    number: int  # of the batch, among those of its client in the round
    x: Tensor


class Findings:
    """What the attacks on one run find."""

    def __init__(self, name: str, s: Settings, options: AuditOptions, say: Say | None) -> None:
        self.say = say or (lambda text: None)
        self.name, self.options = name, options
        noise = None if s.dp_clip is None else 1.0 if s.dp_noise is None else s.dp_noise
        self.about: Row = {"method": name, "dp_clip": s.dp_clip, "dp_noise": noise}
        self.metric = s.metric
        self.attacks: list[Row] = []
        self.clients: list[Row] = []
        self.pictures: list[Recovery] = []
        self.why_not = "it was not attacked" if not RECONSTRUCTIONS & set(options.attacks) else ""
        self.parts: list[str] = []
        self.membership = overall([])

    def attack_uploads(self, watcher: Watcher) -> None:
        """Reconstruct samples from the uploads that were kept."""
        if not watcher.rounds:
            return
        run, uploads = watcher.run, watcher.recorder.uploads
        alg, task = run.alg, run.population
        self.why_not = why_not(alg, task, uploads[0].up if uploads else {})
        if self.why_not:
            return
        found = views(alg, task, shown(alg, task, uploads[0], run.seed).uploaded)
        few = [Victim(upload, 0, task.data.samples(rows)) for upload, rows in watcher.after_step]
        # the method's own network; further ones, of GPFL, leave out what reaches the body by way of the private head
        whole = next((view for view in found if view.name == MODEL), found[0])
        self._attack("step", run, whole, few)
        if "round" in self.options.attacks:
            batches = [
                Victim(upload, j, batch.x)
                for upload in uploads
                for j, batch in enumerate(first_batches(task, run.seed, upload.t, upload.client, self.options.batches))
            ]
            for view in found if self.options.every_part else found[-1:]:
                self.parts.append(view.name)
                self._attack("round", run, view, batches)

    def _attack(self, attack: str, run: Simulation, view: View, victims: list[Victim]) -> None:
        """Recover batches; those of equal size at once."""
        if not victims:
            return
        what = "rounds" if attack == "round" else "single steps"
        self.say(f"{self.title}: recovering {len(victims)} batches from uploads of {what} ({view.name})")
        data = run.population.data
        within, mean = sample_range(data), mean_sample(data)
        for size in dict.fromkeys(len(one.x) for one in victims):
            some = [one for one in victims if len(one.x) == size]
            at = torch.tensor([[one.upload.t, one.upload.client, one.number] for one in some], device=mean.device)
            keys = fold(roots([run.seed], f"attack {attack}", mean.device), *at.T)
            seen = [shown(run.alg, run.task, one.upload, run.seed) for one in some]
            given = problems(view, seen, tuple(some[0].x.shape), keys)
            if attack == "round":
                found = deep_leakage(given, self.options.iterations)
            else:
                found = one_step(given, within, STEPS * self.options.iterations)
            for one, y, distance in zip(some, found.x, found.distance.tolist(), strict=True):
                about = {"attack": attack, "part": view.name, "distance": distance}
                self._judge(one, y, about, within, mean)

    def _judge(self, one: Victim, y: Tensor, about: Row, within: Range, mean: Tensor) -> None:
        """Compare what was found with the samples of a batch."""
        x, attack, reference = one.x, about["attack"], math.nan
        if attack == "round":
            reference, y = reference_psnr(x, y), within.low + within.width * y
        else:
            y = in_best_order(x, y)
        each = [psnr(a, b, within.width) for a, b in zip(x, y, strict=True)]
        row = {
            **self.about, **about, "round": one.upload.t + 1, "client": one.upload.client, "batch": one.number,
            "samples": len(x), "psnr_ref": reference, "psnr": psnr(x, y, within.width),
            "ssim": ssim(x, y, within.width), "guess": psnr(x, mean.expand_as(x), within.width),
            "recovered": float(np.mean([value >= RECOVERED for value in each])),
        }  # fmt: skip
        self.attacks.append(row)
        if sum(p.method == self.title and p.attack == attack for p in self.pictures) < PICTURES and x.dim() == 4:
            originals, recovered = (_pixels(v, within) for v in (x, y))
            picture = Recovery(self.title, attack, row["client"], row["round"], originals, recovered, each)
            self.pictures.append(picture)

    @property
    def title(self) -> str:
        noise = self.about["dp_noise"]
        return self.name if noise is None else f"{self.name}, noise {noise:g}"

    def attack_models(self, result: Result, task: Task, alg: Algorithm) -> None:
        """Tell training samples from test samples by the loss of their client's model."""
        best_round = result.best_on_validation("pre")["round"]
        best = result.config.get("keep") == "best" and best_round != result.last()["round"]
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

    def summary(self, result: Result) -> list[Row]:
        """A row for each network that was attacked; `result` has accuracy and epsilon."""
        row, name = result.best_on_validation("pre"), f"pre_{column_name(self.metric)}_mean"
        about = {**self.about, "epsilon": result.epsilon, "metric": self.metric, "score": row.get(name)}
        return [
            {
                **about, "part": part, "why_not": self.why_not, **self._means(part),
                **{f"membership_{k}": v for k, v in _membership_row(self.membership).items()},
                "membership_clients": len(self.clients),
            }
            for part in self.parts or [""]
        ]  # fmt: skip

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


def _pixels(x: Tensor, within: Range) -> np.ndarray:
    """Samples as pictures in 0..1, (samples, height, width, channels)."""
    pixels = ((x.double() - within.low) / within.width).clamp(0, 1).movedim(1, -1)
    return np.nan_to_num(pixels.cpu().numpy(), nan=0.5)
