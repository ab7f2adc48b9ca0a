"""From a pool of samples to a federation: who owns what, what is for training, what belongs to the server."""

from __future__ import annotations

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.federation import Federation, Ragged
from fedloom.core.keys import rng, stream
from fedloom.data.partitions import Iid, Lists, Natural, Partition
from fedloom.data.pool import Pool

Shares = tuple[float, float, float]  # train, validation, test


def divide(
    pool: Pool,
    partition: Partition,
    clients: int,
    *,
    split: Shares = (0.7, 0.1, 0.2),
    source: str = "merged",
    subset: int | None = None,
    server_share: float = 0.0,
    seed: int = 1,
) -> Federation:
    """Divide a pool among clients.

    `source` says what is divided: `merged` all samples; `train` the official training set, the official test set going
    to the server; `separate` both, each client getting the same classes of both and being tested on official test data.
    `server_share` of what is divided goes to the server first; `subset` keeps so many of the clients.
    """
    if min(split) < 0 or split[0] <= 0 or split[2] <= 0 or abs(sum(split) - 1) > 1e-6:
        raise UserError(
            f"split must be shares for train/validation/test that add up to 1, not {'/'.join(f'{s:g}' for s in split)}."
        )
    draw = rng("partition", seed)
    server = np.zeros(0, dtype=np.int64) if pool.server is None else pool.server
    rows = np.setdiff1d(np.arange(len(pool.y)), server)
    if source != "merged":
        if pool.official_test is None:
            raise UserError(f"This data set has no official test set, so pool={source} is impossible; use pool=merged.")
        rows = np.setdiff1d(rows, pool.official_test)
        server = np.union1d(server, pool.official_test) if source == "train" else server
    if server_share:
        rows = draw.permutation(rows)
        take = round(server_share * len(rows))
        server, rows = np.union1d(server, rows[:take]), np.sort(rows[take:])
    test_lists: Lists | None = None
    natural = isinstance(partition, Natural) and source != "separate"
    if natural and pool.natural is not None:
        divided = np.zeros(len(pool.y), dtype=bool)
        divided[rows] = True
        lists = [r[divided[r]] for r in pool.natural]
    else:
        if pool.y.ndim > 1 and not isinstance(partition, Iid):
            raise UserError(
                f"Partition '{partition.name}' divides by class, but these samples have a class at every position; "
                "use partition=natural or partition=iid."
            )
        if clients > len(rows):
            raise UserError(f"{clients} clients are more than the {len(rows)} samples; use fewer clients.")
        if source == "separate":
            assert pool.official_test is not None
            mine, tests = partition.assign_both(pool.y[rows], pool.y[pool.official_test], pool.classes, clients, draw)
            lists, test_lists = [rows[r] for r in mine], [pool.official_test[r] for r in tests]
        else:
            lists = [rows[r] for r in partition.assign(pool.y[rows], pool.classes, clients, draw)]
    if subset is not None:
        if subset > len(lists):
            raise UserError(f"subset={subset} is more than the {len(lists)} clients of the partition.")
        kept = np.sort(rng("partition", seed, subset).choice(len(lists), subset, replace=False))
        lists = [lists[i] for i in kept]
        test_lists = None if test_lists is None else [test_lists[i] for i in kept]
    return _federation(pool, lists, test_lists, server, split, seed, ordered=pool.ordered and natural)


def _federation(
    pool: Pool, lists: Lists, tests: Lists | None, server: np.ndarray, split: Shares, seed: int, ordered: bool
) -> Federation:
    parts: dict[str, Lists] = {"train": [], "val": [], "test": []}
    dropped = 0
    for i, rows in enumerate(lists):
        if len(rows) < 2 or (tests is not None and not len(tests[i])):
            dropped += 1  # nothing to train on, or nothing to test on
            continue
        if not ordered:
            rows = rng("partition", seed, stream("split"), i).permutation(rows)
        if tests is None:
            train, val, _ = split_sizes(len(rows), split)
            pieces = (rows[:train], rows[train : train + val], rows[train + val :])
        else:
            val = min(int(split[1] * len(rows) + 1e-9), len(rows) - 1)
            pieces = (rows[val:], rows[:val], tests[i])
        for name, piece in zip(parts, pieces, strict=True):
            parts[name].append(piece)
    if not parts["train"]:
        raise UserError("The partition leaves no client with enough samples; use fewer clients.")
    notes = pool.notes + (
        (f"{dropped} of {len(lists)} clients had too few samples and were left out",) if dropped else ()
    )
    return Federation(
        x=torch.from_numpy(np.ascontiguousarray(pool.x)),
        y=torch.from_numpy(np.ascontiguousarray(pool.y)),
        classes=pool.classes,
        splits={name: Ragged.of(rows) for name, rows in parts.items()},
        server=torch.from_numpy(np.sort(server)) if len(server) else None,
        shift=pool.shift,
        spread=pool.spread,
        vocab=pool.vocab,
        unscored=pool.unscored,
        notes=notes,
    )


def split_sizes(n: int, split: Shares) -> tuple[int, int, int]:
    """Samples for training, validation, test: shares rounded down, the rest to test, at least one to train and test."""
    train, val = max(1, int(split[0] * n + 1e-9)), int(split[1] * n + 1e-9)
    if train + val >= n:
        train, val = (train, n - 1 - train) if val else (n - 1, 0)
    return train, val, n - train - val
