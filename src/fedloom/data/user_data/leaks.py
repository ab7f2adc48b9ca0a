"""Columns that determine the target, such as a copy of it or a code of the diagnosis: they may leak it."""

import math

import numpy as np

from fedloom.core.kinds import Kind
from fedloom.data.user_data.issues import Issues, join_names
from fedloom.data.user_data.targets import Target, known_targets

ROWS_PER_VALUE = 5  # with fewer rows per value, a column determines the label because rows differ
CHANCE = 1e-3  # at most, for a table to have a column that determines the label by chance
FIRST_ROWS = 1000  # are looked at before all rows
MAX_SHOWN = 8  # columns that are named
LINEAR = 1e-9  # a column whose correlation with a number is so close to 1 or -1 is a copy of it
FEW_ROWS = 10  # with fewer, the correlation says little
COPIES = {
    "classes": "Every value of {} comes with one class only",
    "labels": "Every value of {} comes with a label always or never",
    "number": "Up to unit and offset, {} {} a copy of the label",
}


class LeakDetector:
    """Finds columns of which every value comes with one class only or, if samples have labels, with one of them always
    or never.

    Args:
        y: the class or the labels of every sample, -1 or NaN if they are unknown.
        columns: number of columns that will be looked at.
    """

    def __init__(self, y: np.ndarray, columns: int) -> None:
        self._known = np.flatnonzero(known_targets(y))
        self._y = y[self._known] if y.ndim > 1 else y[self._known, None]
        looks = columns * self._y.shape[1]
        self._max_values = np.array([_max_values(values, looks) for values in self._y.T])

    def determines(self, values: np.ndarray) -> bool:
        """Whether a column, with these values of the samples, determines the class or a label."""
        values = values[self._known]
        parts = (values[:FIRST_ROWS], values)
        return len(values) > 0 and all(map(self._one_class_per_value, parts))

    def _one_class_per_value(self, values: np.ndarray) -> bool:
        few = len(np.unique(values)) <= self._max_values
        if not few.any():
            return False
        y = self._y[: len(values), few]
        _, first, codes = np.unique(values, return_index=True, return_inverse=True)
        return bool((y[first][codes.reshape(-1)] == y).all(0).any())


def _max_values(y: np.ndarray, looks: int) -> float:
    """Up to how many different values a column does not determine y by chance, if so many are looked at."""
    counts = np.unique(y, return_counts=True)[1].tolist()
    if len(counts) < 2:
        return 0
    # Of the n! / prod(n_c!) orders of the labels, at most C^v have one class at each of v values.
    orders = math.lgamma(sum(counts) + 1) - sum(math.lgamma(count + 1) for count in counts)
    return min((orders + math.log(CHANCE / looks)) / math.log(len(counts)), len(y) / ROWS_PER_VALUE)


class CopyDetector:
    """Finds columns that equal a number up to a linear map; y is the number of every sample, NaN if it is unknown."""

    def __init__(self, y: np.ndarray) -> None:
        self._y = y

    def determines(self, values: np.ndarray) -> bool:
        """Whether a column has these values of the samples because it is a copy of the number."""
        known = np.isfinite(self._y) & np.isfinite(values)
        if known.sum() < FEW_ROWS:
            return False
        a, b = (_centred(part[known]) for part in (self._y, values))
        return bool(abs(a @ b) > (1 - LINEAR) * math.sqrt((a @ a) * (b @ b)) > 0)


def _centred(values: np.ndarray) -> np.ndarray:
    """Values less their mean, in a unit in which squares are not too large."""
    values = values / max(np.abs(values).max(), 1e-300)
    return values - values.mean()


def leak_detector(target: Target, columns: int) -> LeakDetector | CopyDetector:
    """What finds columns that leak a target among so many columns."""
    return CopyDetector(target.y) if target.kind == "number" else LeakDetector(target.y, columns)


def report_leaks(columns: list[str], kind: Kind, how: str, issues: Issues) -> None:
    """Warn of columns that determine the target; `how` says with what they are left out."""
    if columns:
        one = len(columns) == 1
        noun, it, are, them = ("column", "it", "is", "it") if one else ("columns", "they", "are", "them")
        copies = COPIES[kind].format(f"{noun} {join_names(columns, MAX_SHOWN)}", are)
        issues.warn(
            "leak",
            f"{copies}, so {it} may leak the label; unless {it} {are} known before the label, leave {them} out {how}.",
        )
