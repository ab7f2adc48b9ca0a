"""Columns that determine the label, such as a copy of it or a code of the diagnosis: they may leak it."""

import math

import numpy as np

from fedloom.data.user_data.issues import Issues, join_names

ROWS_PER_VALUE = 5  # with fewer rows per value, a column determines the label because rows differ
CHANCE = 1e-3  # at most, for a table to have a column that determines the label by chance
FIRST_ROWS = 1000  # are looked at before all rows
MAX_SHOWN = 8  # columns that are named


class LeakDetector:
    """Finds columns of which every value comes with one class only.

    Args:
        y: the class of every sample, -1 if it is unknown.
        columns: number of columns that will be looked at.
    """

    def __init__(self, y: np.ndarray, columns: int) -> None:
        self._known = np.flatnonzero(y >= 0)
        self._y = y[self._known]
        counts = np.unique(self._y, return_counts=True)[1].tolist()
        # Of the n! / prod(n_c!) orders of the labels, at most C^v have one class at each of v values.
        orders = math.lgamma(sum(counts) + 1) - sum(math.lgamma(count + 1) for count in counts)
        by_chance = (orders + math.log(CHANCE / columns)) / math.log(len(counts)) if len(counts) > 1 else 0
        self._max_values = min(by_chance, len(self._y) / ROWS_PER_VALUE)

    def determines(self, values: np.ndarray) -> bool:
        """Whether a column, with these values of the samples, determines the label."""
        values = values[self._known]
        return self._one_class_per_value(values[:FIRST_ROWS]) and self._one_class_per_value(values)

    def _one_class_per_value(self, values: np.ndarray) -> bool:
        if len(np.unique(values)) > self._max_values:
            return False
        y = self._y[: len(values)]
        _, first, codes = np.unique(values, return_index=True, return_inverse=True)
        return bool((y[first][codes.reshape(-1)] == y).all())


def report_leaks(columns: list[str], how: str, issues: Issues) -> None:
    """Warn of columns that determine the label; `how` says with what they are left out."""
    if columns:
        one = len(columns) == 1
        noun, it, are, them = ("column", "it", "is", "it") if one else ("columns", "they", "are", "them")
        issues.warn(
            "leak",
            f"Every value of {noun} {join_names(columns, MAX_SHOWN)} comes with one class only, so {it} may leak the "
            f"label; unless {it} {are} known before the label, leave {them} out {how}.",
        )
