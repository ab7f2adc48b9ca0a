"""Elementary metrics over clients: accuracy in percent or, for numbers, the root mean squared error.

Scores are arrays (clients, 3): correct predictions, summed loss, samples; for numbers, the first column has the sum of
squared errors.
"""

import math

import numpy as np

from fedloom.core.kinds import Kind
from fedloom.metrics.summary import over_clients


def basic_metric(kind: Kind) -> str:
    """The metric that follows from scores, without looking at predictions again: accuracy or, for numbers, rmse."""
    return "rmse" if kind == "number" else "accuracy"


def basic_values(scores: np.ndarray, kind: Kind = "classes") -> np.ndarray:
    """The basic metric of every client; NaN for a client without samples in the split."""
    if kind != "number":
        return accuracies(scores)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(np.where(scores[:, 2] > 0, scores[:, 0] / scores[:, 2], np.nan))


def accuracies(scores: np.ndarray) -> np.ndarray:
    """Accuracy of every client in percent; NaN for a client without samples in the split."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(scores[:, 2] > 0, 100 * scores[:, 0] / scores[:, 2], np.nan)


def summarize(scores: np.ndarray, kind: Kind = "classes") -> dict[str, float]:
    """Metrics over clients, by name, of one model on one split. Clients without samples in the split do not count.

    acc_mean: mean over clients; acc_weighted: over all samples; acc_low5, acc_top5: mean of the worst and best 5 % of
    clients, at least one; acc_worst: the worst client; client_acc_std: standard deviation over clients;
    client_acc_cv_x1e-2: that in percent of acc_weighted; loss: mean over all samples. For numbers, there are rmse_mean
    and so on, see `over_clients`.
    """
    scored = scores[scores[:, 2] > 0]
    if not len(scored):
        return {}
    if kind == "number":
        over = over_clients(basic_values(scored, kind), scored[:, 2], higher_is_better=False)
        loss = float(scored[:, 1].sum() / scored[:, 2].sum())
        return {**{f"rmse_{name}": value for name, value in over.items()}, "loss": loss}
    acc = np.sort(accuracies(scored))
    tail = math.ceil(0.05 * len(acc))
    weighted = 100 * scored[:, 0].sum() / scored[:, 2].sum()
    std = float(acc.std())
    return {
        "acc_mean": float(acc.mean()),
        "acc_weighted": float(weighted),
        "acc_low5": float(acc[:tail].mean()),
        "acc_top5": float(acc[-tail:].mean()),
        "acc_worst": float(acc[0]),
        "client_acc_std": std,
        "client_acc_cv_x1e-2": 100 * std / float(weighted) if weighted else math.nan,
        "loss": float(scored[:, 1].sum() / scored[:, 2].sum()),
    }


def trailing_mean(values: list[float], length: int = 10) -> np.ndarray:
    """For every value, the mean of it and the `length` - 1 values before it (of fewer at the start)."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - length)
    return (sums[end] - sums[start]) / (end - start)


def convergence_round(values: list[float], tolerance: float = 0.1, share: float | None = None) -> int:
    """The first round (1-based) whose trailing mean is within `tolerance` points of the best one, or within `share` of
    its size."""
    smoothed = trailing_mean(values)
    best = smoothed.max()
    return int(np.argmax(smoothed >= best - (tolerance if share is None else share * abs(best)))) + 1


def trend(rounds: list[int], values: list[float], length: int = 20) -> float:
    """Mean of the values of the last `length` rounds minus that of the `length` rounds before; of a shorter run, of its
    second half minus the first. NaN if one of them has no value.

    values[i] belongs to round rounds[i]; not every round needs to have one.
    """
    age, length = np.array(rounds)[-1] - np.array(rounds), min(length, rounds[-1] // 2)
    late, early = np.array(values)[age < length], np.array(values)[(length <= age) & (age < 2 * length)]
    return float(late.mean() - early.mean()) if len(late) and len(early) else math.nan
