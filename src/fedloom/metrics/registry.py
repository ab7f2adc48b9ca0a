"""All metrics by name, and metrics that users write."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.core.errors import UserError, plural, reason, shown, unknown
from fedloom.core.kinds import Kind
from fedloom.metrics import classification, multilabel, regression
from fedloom.metrics.predictions import Predictions

PerClient = Callable[[Predictions], np.ndarray]
TARGETS = {"classes": "classes", "labels": "labels", "number": "numbers"}  # as a message calls them

OTHER_NAMES = {
    "acc": "accuracy",
    "ap": "auprc",
    "auc": "auroc",
    "average_precision": "auprc",
    "average_precision_score": "auprc",
    "cross_entropy": "log_loss",
    "ece": "calibration_error",
    "f1": "macro_f1",
    "f1_score": "macro_f1",
    "mean_absolute_error": "mae",
    "mean_squared_error": "rmse",
    "mse": "rmse",
    "nll": "log_loss",
    "pr_auc": "auprc",
    "r2_score": "r2",
    "roc_auc": "auroc",
    "roc_auc_score": "auroc",
    "subset_accuracy": "exact_match",
}


@dataclass(frozen=True)
class Metric:
    """How good predictions are, by client. Metrics for different kinds of targets may have the same name."""

    name: str
    kind: Kind | None  # what the targets are; None if that does not matter
    about: str  # one line
    per_client: PerClient  # NaN where the metric is undefined for a client
    higher_is_better: bool = True
    percent: bool = True  # values are in percent


METRICS = (
    Metric("accuracy", "classes", "share of samples whose class is predicted", classification.accuracy),
    Metric("balanced_accuracy", "classes", "mean recall of the classes a client has", classification.balanced_accuracy),
    Metric("macro_f1", "classes", "mean F1 score of the classes a client has or predicts", classification.macro_f1),
    Metric(
        "auroc", "classes", "area under the ROC curve; with several classes, mean of one-vs-rest", classification.auroc
    ),
    Metric("auprc", "classes", "average precision; with several classes, mean of one-vs-rest", classification.auprc),
    Metric(
        "log_loss", "classes", "mean negative log-likelihood of the true class", classification.log_loss, False, False
    ),
    Metric(
        "calibration_error",
        "classes",
        f"expected calibration error, {classification.BINS} bins",
        classification.calibration_error,
        False,
    ),
    Metric("accuracy", "labels", "share of labels, present or not, that are right", multilabel.accuracy),
    Metric("exact_match", "labels", "share of samples whose labels are all right", multilabel.exact_match),
    Metric("macro_f1", "labels", "mean F1 score of the labels a client has or predicts", multilabel.macro_f1),
    Metric("auroc", "labels", "mean area under the ROC curve of the labels", multilabel.auroc),
    Metric("auprc", "labels", "mean average precision of the labels", multilabel.auprc),
    Metric("log_loss", "labels", "mean binary log loss of the labels", multilabel.log_loss, False, False),
    Metric("rmse", "number", "root of the mean squared error", regression.rmse, False, False),
    Metric("mae", "number", "mean absolute error", regression.mae, False, False),
    Metric("r2", "number", "coefficient of determination", regression.r2, True, False),
)


def column_name(metric: str) -> str:
    """What the columns of a metric are called in records, as in `pre_auprc_mean`; those of accuracy begin with acc."""
    return "acc" if metric == "accuracy" else metric


def metrics_of(kind: Kind) -> tuple[Metric, ...]:
    """All metrics for a kind of target, without those of users."""
    return tuple(metric for metric in METRICS if metric.kind == kind)


def usual_metric(kind: Kind) -> str:
    """The metric that ranks unless a user names another. For labels it is not accuracy, because most are absent."""
    return {"classes": "accuracy", "labels": "auprc", "number": "rmse"}[kind]


def sign(metric: str) -> float:
    """1 if higher values of a metric are better, else -1. Of a metric that is not known here, higher ones are."""
    found = [m for m in METRICS if m.name == metric]
    return -1.0 if found and not found[0].higher_is_better else 1.0


def in_percent(metric: str) -> bool:
    """True if values of a metric are in percent."""
    return any(m.name == metric and m.percent for m in METRICS)


def find_metric(name: str, kind: Kind) -> Metric:
    """The metric of that name for a kind of target; UserError if there is none."""
    known = {metric.name: metric for metric in (*METRICS, *OWN.values()) if metric.kind in (kind, None)}
    if name in known:
        return known[name]
    others = [TARGETS[metric.kind] for metric in METRICS if metric.name == name and metric.kind is not None]
    if others:
        raise UserError(
            f"The metric '{name}' is for targets that are {' or '.join(others)}, and these are {TARGETS[kind]}; "
            f"known for them: {', '.join(sorted(known))}."
        )
    usual = OTHER_NAMES.get(str(name).lower())
    if usual in known:
        raise UserError(f"Unknown metric '{shown(name)}'; did you mean '{usual}'?")
    raise unknown("metric", name, known)


OWN: dict[str, Metric] = {}  # metrics of users, by name


def add_metric(function: Callable[[np.ndarray, np.ndarray], Any]) -> str:
    """Register a user's function of the targets and predictions of one client's samples; returns its name."""
    made = own_metric(function)
    if any(metric.name == made.name for metric in METRICS):
        raise UserError(f"There is a metric '{made.name}' already; call your function otherwise.")
    if not made.higher_is_better:
        raise UserError(f"Of the metric '{made.name}' lower values are better; let it return the negative.")
    OWN[made.name] = made
    return made.name


def own_metric(function: Callable[[np.ndarray, np.ndarray], Any]) -> Metric:
    """A metric from a user's function of the targets and predictions of one client: y_true, prediction -> number.

    The arrays are those of `Predictions` for the samples of the client: for classes, the prediction has probabilities
    (samples, classes). Results that are not finite numbers count as undefined. Higher is better unless the function has
    an attribute `higher_is_better` that is False.
    """
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise UserError(f"The metric {shown(name or function)} has no name; define it as a function with def.")

    def per_client(predictions: Predictions) -> np.ndarray:
        y, p, starts = predictions.y, predictions.p, predictions.starts
        found = np.full(len(starts) - 1, np.nan)
        for i in np.flatnonzero(predictions.sizes):
            rows = slice(starts[i], starts[i + 1])
            try:
                value = function(y[rows], p[rows])
            except Exception as error:
                samples = plural(int(predictions.sizes[i]), "sample")
                raise UserError(
                    f"The metric '{name}' raised {type(error).__name__} ({shown(reason(error))}) for a client with "
                    f"{samples}; return NaN for clients for which it is undefined."
                ) from error
            found[i] = _finite(value)
        return found

    about = (function.__doc__ or "").strip().partition("\n")[0] or "a metric of your own"
    return Metric(name, None, about, per_client, bool(getattr(function, "higher_is_better", True)), percent=False)


def _finite(value: Any) -> float:
    """A value as a float; NaN if it is not a finite number."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan
