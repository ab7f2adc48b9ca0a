"""The rows of a leaderboard: several methods on one task, averaged over seeds and compared with local training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedloom.metrics.paired import ranks
from fedloom.metrics.registry import column_name, sign
from fedloom.metrics.summary import over_clients

BASELINE = "local"
MAJORITY = "majority"  # predicts the most frequent class of a client's training samples
MEAN = "mean"  # predicts the mean of their targets, which are numbers
WITHOUT_MODEL = (MAJORITY, MEAN)
STATISTICS = ("mean", "weighted", "low5", "top5", "worst", "std")  # of the metric that ranks, over clients
METRICS = (
    "acc_mean", "acc_weighted", "acc_low5", "acc_top5", "acc_worst", "client_acc_std", "client_acc_cv_x1e-2",
)  # fmt: skip


def unseen_columns(metric: str) -> tuple[str, ...]:
    """Columns about clients that were held out: scores on arrival and after joining, and their gaps."""
    name = column_name(metric)
    return tuple(f"{view}_{column}" for view in ("new", "joined") for column in (f"{name}_mean", f"{name}_low5", "gap"))


class RoundScores(NamedTuple):
    """Scores of one model view (pre, post or global) in one round of a run."""

    round: int
    metrics: dict[str, float]
    clients: np.ndarray  # ids, ascending
    values: np.ndarray  # the metric that ranks, of each of them
    others: dict[str, np.ndarray] = {}  # further metrics of each of them
    sizes: np.ndarray | None = None  # their numbers of test samples, if there are further metrics
    unseen: dict[str, float] = {}  # the columns of `unseen_columns`, if clients were held out


@dataclass(frozen=True)
class RunScores:
    """The numbers of one run that a leaderboard is computed from."""

    label: str
    seed: int
    views: dict[str, dict[str, RoundScores]]  # view (pre, post, global) -> selection (validation, last)
    trends: dict[str, float]  # by view
    bytes_down: float  # per round
    bytes_up: float
    train_seconds: float
    eval_seconds: float
    rounds: int = 0
    per_round: Mapping[str, float] = field(default_factory=dict)  # gradients and samples of a client that takes part
    in_all: Mapping[str, float] = field(default_factory=dict)  # of a client, on average
    epsilon: float | None = None  # differential privacy of what a client uploads


def leaderboard(
    runs: Sequence[RunScores], metric: str = "accuracy", equal_budget: str | None = None
) -> list[dict[str, Any]]:
    """One row per method, model view and selection, sorted by the mean of the metric that ranks, the best first.

    Columns are means over seeds; those that end in `_std` are standard deviations over seeds (ddof 1). `gain` is a
    client's metric minus the same with local training (or the other way round, where lower is better), averaged over
    clients, and `harmed` the share of clients in percent with a negative gain; both are computed per seed. They are
    there if the baseline was run with the same seeds. Personal models have further metrics, each with its mean, its
    lowest 5 %, its worst client and the share harmed. `trend`, for runs that are long enough, is how much the metric
    still rose at the end. `new_*` and `joined_*` are scores of clients that were held out, and their gaps to the
    participating ones. `gradients_*` and `samples_*` are what a client computes (`Result.computed`); if methods have
    the budget of one of them, `equal_budget`, then `of_budget` is what they used of it in percent. `rank` is the same
    for methods that differ by what may be chance, `to_best` the difference to the best method with its confidence
    interval, and `better_than_best` the share of clients in percent whom the method serves better than the best one
    (see `fedloom.metrics.paired`).
    """
    local = {run.seed: run.views["pre"] for run in runs if run.label == BASELINE}
    rows = []
    for label in dict.fromkeys(run.label for run in runs):
        same_method = [run for run in runs if run.label == label]
        for view in same_method[0].views:
            for selection in same_method[0].views[view]:
                rows.append(_row(label, view, selection, same_method, local, metric))
    if budget := next((row.get("samples_in_all") for row in rows if row["method"] == equal_budget), None):
        for row in rows:
            if "samples_in_all" in row:
                row |= {"equal_budget": equal_budget, "of_budget": 100 * row["samples_in_all"] / budget}
    mean, direction = f"{column_name(metric)}_mean", sign(metric)
    rows = sorted(rows, key=lambda row: -direction * row[mean] if row[mean] is not None else math.inf)
    for table in {(row["model"], row["selection"]) for row in rows}:
        _add_ranks([row for row in rows if (row["model"], row["selection"]) == table], runs, metric)
    return rows


def _add_ranks(rows: list[dict[str, Any]], runs: Sequence[RunScores], metric: str) -> None:
    """Add ranks to the rows of one model view and selection, which are sorted; if all methods have the same seeds and
    clients."""
    scores = [[run.views[row["model"]][row["selection"]] for run in runs if run.label == row["method"]] for row in rows]
    first = scores[0]
    same = all(
        len(mine) == len(first) and all(np.array_equal(a.clients, b.clients) for a, b in zip(mine, first, strict=True))
        for mine in scores
    )
    if not same:
        return
    values = [np.stack([score.values for score in mine]) for mine in scores]
    for row, (rank, found) in zip(rows, ranks(values, sign(metric) > 0), strict=True):
        row |= {"rank": rank, "to_best": found.difference, "to_best_low": found.low, "to_best_high": found.high}
        row["better_than_best"] = found.better


def _row(
    label: str,
    view: str,
    selection: str,
    runs: list[RunScores],
    local: dict[int, dict[str, RoundScores]],
    metric: str,
) -> dict[str, Any]:
    """The row of one method; `local` has the scores of local training by seed."""
    scores = [run.views[view][selection] for run in runs]
    row: dict[str, Any] = {"method": label, "model": view, "selection": selection, "seeds": len(runs)}
    if metric != "accuracy":
        row["metric"] = metric
    for name in scores[0].metrics:
        row |= over_seeds(name, [score.metrics.get(name, math.nan) for score in scores])
    pairs = [(score, local[run.seed][selection]) for run, score in zip(runs, scores, strict=True) if run.seed in local]
    pairs = [(score, base) for score, base in pairs if np.array_equal(score.clients, base.clients)]
    gains = [sign(metric) * (score.values - base.values) for score, base in pairs]
    if gains := [gain for gain in gains if not np.isnan(gain).all()]:
        row |= over_seeds("gain", [float(np.nanmean(gain)) for gain in gains])
        row |= over_seeds("harmed", [_harmed(gain) for gain in gains])
    for name in scores[0].others:
        row |= _further(name, scores, [pair for pair in pairs if name in pair[1].others])
    for name in scores[0].unseen:
        row |= over_seeds(name, [score.unseen[name] for score in scores])
    if trends := [run.trends[view] for run in runs if not math.isnan(run.trends.get(view, math.nan))]:
        row |= over_seeds("trend", trends)
    row |= over_seeds("round", [float(score.round) for score in scores])
    for cost in ("bytes_down", "bytes_up", "train_seconds", "eval_seconds"):
        row[cost] = float(np.mean([getattr(run, cost) for run in runs]))
    for name in runs[0].in_all:
        row[f"{name}_per_round"] = float(np.mean([run.per_round[name] for run in runs]))
        row[f"{name}_in_all"] = float(np.mean([run.in_all[name] for run in runs]))
    if epsilons := [run.epsilon for run in runs if run.epsilon is not None]:
        row["epsilon"] = max(epsilons)
    row["rounds"] = max(run.rounds for run in runs)
    return row


def _harmed(gain: np.ndarray) -> float:
    return 100 * float(np.mean(gain[~np.isnan(gain)] < 0))


def _further(name: str, scores: list[RoundScores], pairs: list[tuple[RoundScores, RoundScores]]) -> dict[str, Any]:
    """The columns of a metric that does not rank: mean, lowest 5 %, worst client, share of clients harmed."""
    found: dict[str, Any] = {}
    each = [over_clients(s.others[name], s.sizes, sign(name) > 0) for s in scores if s.sizes is not None]
    for statistic in ("mean", "low5", "worst"):
        if values := [over[statistic] for over in each if over]:
            found |= over_seeds(f"{name}_{statistic}", values)
    gains = [sign(name) * (score.others[name] - base.others[name]) for score, base in pairs]
    if gains := [gain for gain in gains if not np.isnan(gain).all()]:
        found |= over_seeds(f"{name}_harmed", [_harmed(gain) for gain in gains])
    return found


def over_seeds(name: str, values: list[float]) -> dict[str, float | None]:
    """Mean and standard deviation (ddof 1) of one value per seed, as the columns `name` and `name_std`."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {name: float(np.mean(values)), f"{name}_std": None if std is None or math.isnan(std) else std}
