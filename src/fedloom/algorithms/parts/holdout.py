"""Training samples that a client keeps from its training, for judging models."""

from collections.abc import Callable

import numpy as np

from fedloom.core.algorithm import Draw

Select = Callable[[int, Draw], np.ndarray]


def divided(share: float, stream: str) -> tuple[Select, Select]:
    """Which samples to train on, and which to hold out: for each client one division for all rounds. The first part is
    rounded down but never empty, so a client of one sample holds out none."""

    def cut(n: int, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        order, first = draw.rng(stream, draw.i).permutation(n), max(1, int((1 - share) * n + 1e-9))
        return order[:first], order[first:]

    return lambda n, draw: cut(n, draw)[0], lambda n, draw: cut(n, draw)[1]
