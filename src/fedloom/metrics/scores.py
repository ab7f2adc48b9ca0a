"""Elementary metrics over clients, in percent. Scores are arrays (clients, 3): correct, summed loss, samples."""

from __future__ import annotations

import math

import numpy as np


def accuracies(scores: np.ndarray) -> np.ndarray:
    """acc_i; NaN for a client without samples in the split."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(scores[:, 2] > 0, 100 * scores[:, 0] / scores[:, 2], np.nan)


def summarize(scores: np.ndarray) -> dict[str, float]:
    """The metrics of one model view on one split. Clients without samples in the split do not count."""
    seen = scores[scores[:, 2] > 0]
    if not len(seen):
        return {}
    acc = np.sort(accuracies(seen))
    few = math.ceil(0.05 * len(acc))
    weighted = 100 * seen[:, 0].sum() / seen[:, 2].sum()
    std = float(acc.std())
    return {
        "acc_mean": float(acc.mean()),
        "acc_weighted": float(weighted),
        "acc_low5": float(acc[:few].mean()),
        "acc_top5": float(acc[-few:].mean()),
        "acc_worst": float(acc[0]),
        "client_acc_std": std,
        "client_acc_cv_x1e-2": 100 * std / float(weighted) if weighted else math.nan,
        "loss": float(seen[:, 1].sum() / seen[:, 2].sum()),
    }


def trailing_mean(values: list[float], length: int = 10) -> np.ndarray:
    """Mean of the last `length` values up to each point (of fewer at the start)."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(1, len(values) + 1)
    start = np.maximum(0, at - length)
    return (sums[at] - sums[start]) / (at - start)


def convergence_round(values: list[float], tolerance: float = 0.1) -> int:
    """The first round (1-based) whose trailing mean is within `tolerance` points of the best one."""
    smooth = trailing_mean(values)
    return int(np.argmax(smooth >= smooth.max() - tolerance)) + 1


def trend(rounds: list[int], values: list[float], length: int = 20) -> float:
    """How much higher the mean over the last `length` rounds is than that over as many before; NaN for short runs."""
    at = np.array(rounds)[-1] - np.array(rounds)
    late, early = np.array(values)[at < length], np.array(values)[(length <= at) & (at < 2 * length)]
    return float(late.mean() - early.mean()) if rounds[-1] >= 2 * length and len(early) else math.nan
