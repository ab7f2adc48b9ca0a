"""Several methods on one task, over seeds: how good they are for whom, and for whom worse than training alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

BASELINE = "local"
METRICS = (
    "acc_mean", "acc_weighted", "acc_low5", "acc_top5", "acc_worst", "client_acc_std", "client_acc_cv_x1e-2",
)  # fmt: skip
UNSEEN = ("new_acc_mean", "new_acc_low5", "new_gap", "joined_acc_mean", "joined_acc_low5", "joined_gap")


class Chosen(NamedTuple):
    """One model view of a run in one round."""

    round: int
    metrics: dict[str, float]
    clients: np.ndarray  # ids, ascending
    acc: np.ndarray  # their accuracies
    unseen: dict[str, float] = {}  # of UNSEEN, where clients were held out


@dataclass(frozen=True)
class Scored:
    """What a leaderboard needs of a run."""

    label: str
    seed: int
    views: dict[str, dict[str, Chosen]]  # view (pre, post, global) -> selection (validation, last)
    trends: dict[str, float]  # by view
    bytes_down: float  # per round
    bytes_up: float
    train_seconds: float
    eval_seconds: float


def leaderboard(runs: Sequence[Scored]) -> list[dict[str, Any]]:
    """A row per method, view and selection, the best mean first; `_std` is the spread over seeds (ddof 1).

    `gain` is the mean over clients of their accuracy less what the same client has with Local, `harmed` the share of
    clients for whom it is less; both in percent, per seed, then averaged. `trend`, of runs that are long enough, tells
    whether accuracy was still rising at the end. `new_` and `joined_` are of clients that were held out, in the round
    of the row, and their gap to those who take part.
    """
    alone = {run.seed: run.views["pre"] for run in runs if run.label == BASELINE}
    rows = []
    for label in dict.fromkeys(run.label for run in runs):
        mine = [run for run in runs if run.label == label]
        for view in mine[0].views:
            for selection in mine[0].views[view]:
                rows.append(_row(label, view, selection, mine, alone))
    return sorted(rows, key=lambda row: -row["acc_mean"])


def _row(
    label: str, view: str, selection: str, runs: list[Scored], alone: dict[int, dict[str, Chosen]]
) -> dict[str, Any]:
    chosen = [run.views[view][selection] for run in runs]
    row: dict[str, Any] = {"method": label, "model": view, "selection": selection, "seeds": len(runs)}
    for metric in METRICS:
        row |= over_seeds(metric, [one.metrics[metric] for one in chosen])
    pairs = [(one, alone[run.seed][selection]) for run, one in zip(runs, chosen, strict=True) if run.seed in alone]
    change = [one.acc - base.acc for one, base in pairs if np.array_equal(one.clients, base.clients)]
    if change:
        row |= over_seeds("gain", [float(np.nanmean(c)) for c in change])
        row |= over_seeds("harmed", [100 * float(np.mean(c[~np.isnan(c)] < 0)) for c in change])
    for metric in chosen[0].unseen:
        row |= over_seeds(metric, [one.unseen[metric] for one in chosen])
    if trends := [run.trends[view] for run in runs if not math.isnan(run.trends[view])]:
        row |= over_seeds("trend", trends)
    row |= over_seeds("round", [float(one.round) for one in chosen])
    for cost in ("bytes_down", "bytes_up", "train_seconds", "eval_seconds"):
        row[cost] = float(np.mean([getattr(run, cost) for run in runs]))
    return row


def over_seeds(name: str, values: list[float]) -> dict[str, float | None]:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {name: float(np.mean(values)), f"{name}_std": None if spread is None or math.isnan(spread) else spread}
