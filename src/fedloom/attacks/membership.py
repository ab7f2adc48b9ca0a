"""Membership inference: does the loss of a model on a sample tell whether the sample was trained on?

Yeom, Giacomelli, Fredrikson, Jha. Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting. CSF 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedloom.core.keys import rng

FEWEST = 10  # training samples and test samples that a client needs: with fewer, chance decides


class Membership(NamedTuple):
    """How well an attacker tells a client's training samples (members) from its test samples, who knows the loss of its
    model on them. Members and others count equally, however many there are."""

    auc: float  # chance that a member has a smaller loss than another sample: 0.5 for guessing, 1 for certainty
    se: float  # standard error of the AUC
    advantage: float  # share of members that are called members, less that of the others: 0 for guessing, 1 at most
    members: int
    others: int

    @property
    def balanced_accuracy(self) -> float:
        """Share of samples that are told right, in percent, if members and others are equally frequent."""
        return 50 * (1 + self.advantage)


def membership(members: np.ndarray, others: np.ndarray, seed: int = 0) -> Membership:
    """The attack on one model, from the losses of both kinds of samples."""
    wins = _wins(members, others)
    of_members, of_others = wins.mean(1), wins.mean(0)
    # DeLong, DeLong, Clarke-Pearson. Comparing the Areas under Two or More Correlated ROC Curves. Biometrics 1988
    variance = sum(float(v.var(ddof=1)) / len(v) if len(v) > 1 else math.nan for v in (of_members, of_others))
    return Membership(
        float(wins.mean()), math.sqrt(variance), _advantage(members, others, seed), len(members), len(others)
    )


def overall(clients: Sequence[Membership]) -> Membership:
    """The mean over clients, each of which is attacked by itself. A client counts by m n / (m + n), to which the
    precision of its AUC is about proportional, for m members and n others."""
    if not clients:
        return Membership(math.nan, math.nan, math.nan, 0, 0)
    weights = np.array([one.members * one.others / (one.members + one.others) for one in clients])
    weights /= weights.sum()
    auc, se, advantage = (np.array([getattr(one, name) for one in clients]) for name in ("auc", "se", "advantage"))
    return Membership(
        float(weights @ auc),
        float(np.sqrt(weights**2 @ se**2)),
        float(weights @ advantage),
        sum(one.members for one in clients),
        sum(one.others for one in clients),
    )


def _wins(members: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(members, others): 1 where the member has the smaller loss, 1/2 where both are equal."""
    gaps = others[None] - members[:, None]
    return np.where(gaps > 0, 1.0, np.where(gaps == 0, 0.5, 0.0))


def _advantage(members: np.ndarray, others: np.ndarray, seed: int) -> float:
    """The threshold of the loss is chosen on one half of the samples and tried on the other, and the other way round:
    the best threshold on the samples that it is tried on would find an advantage in noise."""
    draw = rng("membership", seed)
    halves = [np.array_split(draw.permutation(v), 2) for v in (members, others)]
    found = []
    for a in (0, 1):
        (known_members, tried_members), (known_others, tried_others) = ((h[a], h[1 - a]) for h in halves)
        t = _threshold(known_members, known_others)
        found.append(float((tried_members <= t).mean() - (tried_others <= t).mean()))
    return float(np.mean(found))


def _threshold(members: np.ndarray, others: np.ndarray) -> float:
    """The loss up to which samples are best called members: halfway between two of these losses."""
    values = np.unique(np.concatenate([members, others]))
    gain = [(members <= v).mean() - (others <= v).mean() for v in values]
    best = int(np.argmax(gain))
    return float(values[best : best + 2].mean())
