"""Elementary metrics over clients, in percent. Scores are arrays (clients, 3): correct, summed loss, samples."""

import math

import numpy as np


def accuracies(scores: np.ndarray) -> np.ndarray:
    """Accuracy of every client in percent; NaN for a client without samples in the split."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(scores[:, 2] > 0, 100 * scores[:, 0] / scores[:, 2], np.nan)


def summarize(scores: np.ndarray) -> dict[str, float]:
    """Metrics over clients, by name, of one model on one split. Clients without samples in the split do not count.

    acc_mean: mean over clients; acc_weighted: over all samples; acc_low5, acc_top5: mean of the worst and best 5 % of
    clients, at least one; acc_worst: the worst client; client_acc_std: standard deviation over clients;
    client_acc_cv_x1e-2: that in percent of acc_weighted; loss: mean over all samples.
    """
    scored = scores[scores[:, 2] > 0]
    if not len(scored):
        return {}
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


def convergence_round(values: list[float], tolerance: float = 0.1) -> int:
    """The first round (1-based) whose trailing mean is within `tolerance` points of the best one."""
    smoothed = trailing_mean(values)
    return int(np.argmax(smoothed >= smoothed.max() - tolerance)) + 1


def trend(rounds: list[int], values: list[float], length: int = 20) -> float:
    """Mean of the values of the last `length` rounds minus that of the `length` rounds before; NaN for shorter runs.

    values[i] belongs to round rounds[i]; not every round needs to have one.
    """
    age = np.array(rounds)[-1] - np.array(rounds)
    late, early = np.array(values)[age < length], np.array(values)[(length <= age) & (age < 2 * length)]
    return float(late.mean() - early.mean()) if rounds[-1] >= 2 * length and len(early) else math.nan
