"""How the papers measure: which model, which mean over clients, which round.

Every metric is measured three times: as the paper does, which often selects the round on test data; in the round that
is best on validation data; and in the last round.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from fedloom.config.resolve import find_method
from fedloom.runs.records import Row
from fedloom.studies.result import Result

TRAILING = 10  # rounds that PAGE's accuracies are means of
LAST = 30  # rounds that pFedKT's accuracies are means of


@dataclass(frozen=True)
class Protocol:
    """How a metric is measured."""

    about: str  # which number it is, and in which round the paper takes it
    column: Callable[[str], str]  # of the rounds, for a view of the model (pre, post, global)
    paper: Callable[[Result, str, str], float]  # (result, view, column) -> the number as the paper measures it
    view: str | None = None  # of the model, where the metric fixes it


@dataclass(frozen=True)
class Measured:
    """A metric of a run."""

    paper: float
    validation: float
    last: float


def measure(result: Result, how: str, view: str | None) -> Measured | None:
    """A metric of a run, by the name of its protocol; None if the method does not have it (such as a global model)."""
    protocol = find_protocol(how)
    view = protocol.view or view or "pre"
    column = protocol.column(view)
    if result.last().get(column) is None:
        return None
    chosen = result.best_on_validation(view)
    if how.startswith("pct_clients_below_"):
        limit = float(how.rpartition("_")[2])
        best = _best(result, f"{view}_acc_mean")
        return Measured(*(_share_below(result, row, view, limit) for row in (best, chosen, result.last())))
    if how == "convergence_round":
        found = protocol.paper(result, view, column)
        return Measured(found, found, found)
    return Measured(protocol.paper(result, view, column), chosen[column], result.last()[column])


def find_protocol(how: str) -> Protocol:
    """The protocol of a metric."""
    if how.startswith("pct_clients_below_"):
        return SHARES
    return PROTOCOLS[how]


def _best(result: Result, column: str) -> Row:
    return max(result.rounds, key=lambda row: row[column] if math.isfinite(row[column]) else -math.inf)


def _share_below(result: Result, row: Row, view: str, limit: float) -> float:
    clients = result.clients.filter(pc.field("round") == row["round"])
    scores = clients[f"{view}_acc"].to_numpy()
    scores = scores[~np.isnan(scores)]
    return float(100 * (scores < limit).mean())


def _in_round_of(suffix: str) -> Callable[[Result, str, str], float]:
    """The value in the round with the best accuracy on test data, which is the mean of this name."""
    return lambda result, view, column: _best(result, f"{view}_{suffix}")[column]


def _last_rounds(result: Result, view: str, column: str) -> float:
    end = result.last()["round"]
    return float(np.mean([row[column] for row in result.rounds if row["round"] > end - LAST]))


def trailing_mean(rounds: Sequence[Row], column: str, end: int) -> float:
    """The mean over the ten rounds up to one."""
    return float(np.mean([row[column] for row in rounds if end - TRAILING < row["round"] <= end]))


def _convergence(result: Result, view: str, column: str) -> float:
    """PAGE's convergence round: of the global model for methods that train one model, of the personal models for the
    others, and the later of both for PAGE."""
    method = find_method(result.config["algorithm"]["name"])
    if method.name == "page":
        return max(_settled(result, name) for name in ("acc_global", "post_acc_mean"))
    return _settled(result, "acc_global" if method.pre_is_global else "post_acc_mean")


def _settled(result: Result, column: str) -> int:
    """The first evaluated round whose trailing mean is within 0.1 points of the best one."""
    if result.last().get(column) is None:
        column = "post_acc_mean"
    at = [row["round"] for row in result.rounds]
    means = [trailing_mean(result.rounds, column, end) for end in at]
    return next(end for end, mean in zip(at, means, strict=True) if mean >= max(means) - 0.1)


def _at_convergence(result: Result, view: str, column: str) -> float:
    return trailing_mean(result.rounds, column, int(_convergence(result, view, column)))


def _of_view(name: str) -> Callable[[str], str]:
    return lambda view: f"{view}_{name}"


_MEAN, _WEIGHTED = "acc_mean", "acc_weighted"
SHARES = Protocol("share of clients below, best round on test data", _of_view(_MEAN), _in_round_of(_MEAN))
PROTOCOLS = {
    "acc_mean": Protocol("mean over clients, best round on test data", _of_view(_MEAN), _in_round_of(_MEAN)),
    "acc_low5": Protocol("lowest 5 %, in the round of the best mean", _of_view("acc_low5"), _in_round_of(_MEAN)),
    "acc_top5": Protocol("top 5 %, in the round of the best mean", _of_view("acc_top5"), _in_round_of(_MEAN)),
    "acc_best": Protocol(
        "over all test samples, best round on test data", _of_view(_WEIGHTED), _in_round_of(_WEIGHTED)
    ),
    "client_acc_std": Protocol(
        "standard deviation over clients, best round on test data", _of_view("client_acc_std"), _in_round_of(_WEIGHTED)
    ),
    "client_acc_cv_x1e-2": Protocol(
        "coefficient of variation, best round on test data",
        _of_view("client_acc_cv_x1e-2"),
        _in_round_of(_WEIGHTED),
    ),
    "acc_global": Protocol(
        "global model on the server's samples, mean of 10 rounds at convergence",
        lambda view: "acc_global",
        _at_convergence,
        "global",
    ),
    "acc_local": Protocol(
        "trained models, mean over clients and 10 rounds at convergence", _of_view(_MEAN), _at_convergence, "post"
    ),
    "convergence_round": Protocol("first round that is as good as the best", _of_view(_MEAN), _convergence, "post"),
    "best": Protocol("trained models, best round on test data", _of_view(_MEAN), _in_round_of(_MEAN), "post"),
    "last30": Protocol("trained models, mean of the last 30 rounds", _of_view(_MEAN), _last_rounds, "post"),
}
PROTOCOLS["acc_best_implied"] = PROTOCOLS["acc_best"]
