"""One metric over all clients."""

import math

import numpy as np


@np.errstate(invalid="ignore")  # the standard deviation of infinite values
def over_clients(values: np.ndarray, sizes: np.ndarray, higher_is_better: bool = True) -> dict[str, float]:
    """Statistics over the clients that have a value; none if nobody has.

    mean: over clients; weighted: the same, weighted by numbers of samples; low5, top5: mean of the worst and best 5 %
    of clients, at least one; worst: the worst client; std: standard deviation over clients; clients: how many there are
    with a value.

    Args:
        values: a metric of every client, NaN where it is undefined.
        sizes: the number of samples of every client.
        higher_is_better: if not, the worst clients are those with the highest values.
    """
    defined = ~np.isnan(values)
    if not defined.any():
        return {}
    ordered = np.sort(values[defined])
    from_worst = ordered if higher_is_better else ordered[::-1]
    tail = math.ceil(0.05 * len(ordered))
    return {
        "mean": float(ordered.mean()),
        "weighted": float(np.average(values[defined], weights=sizes[defined])),
        "low5": float(from_worst[:tail].mean()),
        "top5": float(from_worst[-tail:].mean()),
        "worst": float(from_worst[0]),
        "std": float(ordered.std()),
        "clients": int(defined.sum()),
    }
