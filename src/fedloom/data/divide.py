"""Divides a raw data set among clients, and each client's samples into training, validation and test."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.federation import Federation, Ragged, Scaling
from fedloom.core.keys import rng, stream
from fedloom.core.preprocessing import Numbers
from fedloom.core.targets import TARGETS, Number
from fedloom.data.dataset import RawDataset
from fedloom.data.partitions import Iid, Lists, Natural, Partition

Shares = tuple[float, float, float]  # train, validation, test
SCALED_AT_ONCE = 1 << 22  # values
GROUPS = 10  # of samples with similar targets, by which a partition divides if targets are numbers
LARGEST_TARGET = 1e15  # whose square is far from the largest number of float32


def divide(
    raw: RawDataset,
    partition: Partition,
    clients: int,
    *,
    split: Shares = (0.7, 0.1, 0.2),
    source: str = "merged",
    subset: int | None = None,
    server_share: float = 0.0,
    seed: int = 1,
    stratify: bool = False,
) -> Federation:
    """Divide a raw data set among clients.

    Args:
        raw: the data set.
        partition: decides which client gets which samples.
        clients: number of clients, unless the partition is natural.
        split: shares of a client's samples for training, validation and test.
        source: what is divided. "merged": all samples. "train": the official training set; the official test set goes
            to the server. "separate": both, so that a client is tested on official test data of the classes it trains
            on.
        subset: keep only this many clients, drawn at random.
        server_share: share of the samples that goes to the server before the rest is divided.
        seed: random seed of partition and split.
        stratify: a client's classes have the same shares in training, validation and test.
    """
    if min(split) < 0 or split[0] <= 0 or split[2] <= 0 or abs(sum(split) - 1) > 1e-6:
        raise UserError(
            "split must be shares for train/validation/test that add up to 1, all but validation above 0, not "
            f"{'/'.join(f'{s:g}' for s in split)}."
        )
    draw = rng("partition", seed)
    server = np.zeros(0, dtype=np.int64) if raw.server is None else raw.server
    rows = np.setdiff1d(np.arange(len(raw.y)), server)
    if source != "merged":
        if raw.official_test is None:
            raise UserError(f"This data set has no official test set, so pool={source} is impossible; use pool=merged.")
        rows = np.setdiff1d(rows, raw.official_test)
        server = np.union1d(server, raw.official_test) if source == "train" else server
    if server_share:
        rows = draw.permutation(rows)
        count = round(server_share * len(rows))
        server, rows = np.union1d(server, rows[:count]), np.sort(rows[count:])
    test_lists: Lists | None = None
    names: tuple[str, ...] = ()
    natural = isinstance(partition, Natural) and raw.natural is not None
    if natural:
        assert raw.natural is not None
        lists, names = _restrict(raw.natural, rows, len(raw.y)), raw.client_names
        if source == "separate":
            assert raw.official_test is not None
            test_lists = _restrict(raw.natural, raw.official_test, len(raw.y))
    else:
        classes, count = _classes(raw)
        if classes.ndim > 1 and not isinstance(partition, Iid):
            raise UserError(
                f"Partition '{partition.name}' divides by class, but these samples have a class at every position; "
                "use partition=natural or partition=iid."
            )
        if clients > len(rows):
            raise UserError(f"{clients} clients are more than the {len(rows)} samples; use fewer clients.")
        if source == "separate":
            assert raw.official_test is not None
            train, test = partition.assign_both(classes[rows], classes[raw.official_test], count, clients, draw)
            lists, test_lists = [rows[r] for r in train], [raw.official_test[r] for r in test]
        else:
            lists = [rows[r] for r in partition.assign(classes[rows], count, clients, draw)]
    if subset is not None:
        if subset > len(lists):
            raise UserError(f"subset={subset} is more than the {len(lists)} clients of the partition.")
        chosen = np.sort(rng("partition", seed, subset).choice(len(lists), subset, replace=False))
        lists = [lists[i] for i in chosen]
        test_lists = None if test_lists is None else [test_lists[i] for i in chosen]
        names = tuple(names[i] for i in chosen) if names else ()
    ordered = raw.ordered and natural
    return _federation(raw, lists, test_lists, server, split, seed, ordered=ordered, stratify=stratify, names=names)


def _restrict(lists: Sequence[np.ndarray], rows: np.ndarray, n: int) -> Lists:
    """Every list without the rows that are not in `rows`; n is the number of all samples."""
    allowed = np.zeros(n, dtype=bool)
    allowed[rows] = True
    return [members[allowed[members]] for members in lists]


def hold_out(data: Federation, amount: float, seed: int) -> Federation:
    """Keep clients, drawn at random, out of training: a share of them or, if `amount` is 1 or more, their number.

    They are moved behind the participating clients, which keep their order.
    """
    n = data.clients
    if data.held_out:
        raise UserError(f"This federation holds out {data.held_out} of its clients already; set holdout_clients=0.")
    if amount >= 1 and amount != int(amount):
        raise UserError(f"holdout_clients must be a share below 1 or a whole number of clients, not {amount:g}.")
    count = int(amount) if amount >= 1 else max(1, int(amount * n + 1e-9))
    if n == 1:
        raise UserError("There is only one client, so none can be held out; set holdout_clients=0.")
    if count >= n:
        raise UserError(f"holdout_clients={amount:g} leaves nobody to train, as there are {n} clients; hold out fewer.")
    out = np.sort(rng("partition", seed, stream("holdout")).choice(n, count, replace=False))
    order = np.concatenate([np.setdiff1d(np.arange(n), out), out])
    lists = {name: rows.lists() for name, rows in data.splits.items()}
    splits = {name: Ragged.of([rows[i] for i in order]) for name, rows in lists.items()}
    names = tuple(data.client_names[i] for i in order) if data.client_names else ()
    return replace(data, splits=splits, client_names=names, held_out=count)


def _federation(
    raw: RawDataset,
    lists: Lists,
    tests: Lists | None,
    server: np.ndarray,
    split: Shares,
    seed: int,
    ordered: bool,
    stratify: bool,
    names: tuple[str, ...],
) -> Federation:
    """The federation of clients with these rows, each split into training, validation and test (or with `tests`).

    Clients that have nothing to train on or nothing to test on are left out.
    """
    classes, _ = _classes(raw)
    parts: dict[str, Lists] = {"train": [], "val": [], "test": []}
    used: list[int] = []  # clients
    official_val = np.zeros(len(raw.y), dtype=bool)
    if raw.official_val is not None:
        official_val[raw.official_val] = True
    for i, rows in enumerate(lists):
        is_val = official_val[rows]
        if len(rows) < 2 if tests is None else is_val.all() or not len(tests[i]):
            continue
        used.append(i)
        if not ordered:
            rows = rng("partition", seed, stream("split"), i).permutation(rows)
            rows = _by_shares(rows, classes) if stratify and classes.ndim == 1 else rows
        if tests is None:
            train, val, _ = split_sizes(len(rows), split)
            pieces = (rows[:train], rows[train : train + val], rows[train + val :])
        elif raw.official_val is not None:
            is_val = official_val[rows]
            pieces = (rows[~is_val], rows[is_val], tests[i])
        else:
            val = min(int(split[1] * len(rows) + 1e-9), len(rows) - 1)
            pieces = (rows[val:], rows[:val], tests[i])
        for name, piece in zip(parts, pieces, strict=True):
            parts[name].append(piece)
    if not parts["train"]:
        raise UserError("The partition leaves no client with enough samples; use fewer clients.")
    dropped = len(lists) - len(used)
    notes = raw.notes + (
        (f"{dropped} of {len(lists)} clients had too few samples and were left out",) if dropped else ()
    )
    return Federation(
        x=torch.from_numpy(np.ascontiguousarray(raw.x)),
        y=torch.from_numpy(np.ascontiguousarray(raw.y)),
        classes=raw.classes,
        splits={name: Ragged.of(rows) for name, rows in parts.items()},
        server=torch.from_numpy(np.sort(server)) if len(server) else None,
        mean=raw.mean,
        std=raw.std,
        vocab=raw.vocab,
        unscored=raw.unscored,
        targets=TARGETS[raw.target](),
        class_names=raw.class_names,
        client_names=tuple(names[i] for i in used) if names else (),
        scaling=raw.scaling,
        notes=notes,
        preprocessing=raw.preprocessing,
    )


def _classes(raw: RawDataset) -> tuple[np.ndarray, int]:
    """Classes by which samples are divided, and how many there are: those of the data; for numbers, tenths of the
    samples in the order of their targets; for labels, the rarest label of a sample, one more standing for none."""
    if raw.target == "number":
        groups = min(GROUPS, max(1, len(raw.y)))
        rank = np.empty(len(raw.y), np.int64)
        rank[np.argsort(raw.y, kind="stable")] = np.arange(len(raw.y))
        return rank * groups // max(1, len(raw.y)), groups
    if raw.target == "labels":
        rarest = np.argsort(raw.y.sum(0), kind="stable")
        there = raw.y[:, rarest] > 0
        return np.where(there.any(1), rarest[there.argmax(1)], raw.classes), raw.classes + 1
    return raw.y, raw.classes


def _by_shares(rows: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The rows in an order in which every section has classes in about the same shares; within a class it stays."""
    place = np.empty(len(rows))
    for label in np.unique(y[rows]):
        same = np.flatnonzero(y[rows] == label)
        place[same] = (np.arange(len(same)) + 0.5) / len(same)
    return rows[np.argsort(place, kind="stable")]


def validated(data: Federation) -> Federation:
    """The federation with its columns, and targets that are numbers, scaled. Raises a UserError if a value is not
    finite or a label not a class."""
    if data.scaling is not None:
        numbers = _fit_numbers(data, data.scaling)
        preprocessing = replace(data.preprocessing_or_default(), numbers=numbers)
        x = torch.empty(data.x.shape, dtype=torch.float64)
        for part, scaled in zip(_blocks(data.x), _blocks(x), strict=True):
            scaled.copy_(numbers.scale(part))
        data = replace(data, x=x, scaling=None, preprocessing=preprocessing)
    x, y = data.x, data.y
    if x.is_floating_point() and not all(bool(torch.isfinite(part).all()) for part in _blocks(x)):
        at = int((~torch.isfinite(x.reshape(len(x), -1)).all(1)).nonzero()[0])
        raise UserError(f"Sample {at} of the data has a value that is not a finite number; correct it or leave it out.")
    if data.kind != "classes":
        return _scaled_targets(data)
    low = -1 if y.dim() > 1 else 0  # sequences are padded with -1
    if len(y) and (int(y.min()) < low or int(y.max()) >= data.classes):
        at = int(((y < low) | (y >= data.classes)).reshape(len(y), -1).any(1).nonzero()[0])
        raise UserError(f"Sample {at} of the data has a label outside 0 to {data.classes - 1}; correct it.")
    return data


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The samples in parts, so that what is computed of each takes little memory."""
    return x.split(max(1, SCALED_AT_ONCE * len(x) // max(1, x.numel())))


def _scaled_targets(data: Federation) -> Federation:
    """The federation with numbers as targets scaled by the participants' training samples; they become float64."""
    y, targets = data.y.double(), data.targets
    finite = torch.isfinite(y.reshape(len(y), -1)).all(1)
    if not finite.all():
        at = int((~finite).nonzero()[0])
        raise UserError(f"The target of sample {at} is not a finite number; correct it or leave it out.")
    if not isinstance(targets, Number):
        if wrong := ((y != 0) & (y != 1)).reshape(len(y), -1).any(1).nonzero().flatten().tolist():
            raise UserError(f"A label of sample {wrong[0]} is neither 0 nor 1; correct it.")
        return data
    if (targets.mean, targets.std) != (0.0, 1.0):  # they are scaled already
        return data
    known = y[data.participants().splits["train"].flat]
    mean, std = float(known.mean()), float(known.std(correction=0))
    if std <= 1e-12 * max(abs(mean), 1e-300):
        raise UserError(f"All targets of the training samples are {mean:g}; there is nothing to learn.")
    if max(abs(mean), std) > LARGEST_TARGET:
        raise UserError(f"Targets are as large as {float(known.abs().max()):g}; give them in a larger unit.")
    return replace(data, y=(y - mean) / std, targets=replace(targets, mean=mean, std=std))


def _fit_numbers(data: Federation, scaling: Scaling) -> Numbers:
    """Means and standard deviations of the participants' training samples, where columns are to be scaled by them."""
    x = np.moveaxis(data.x.cpu().numpy(), scaling.axis, -1)
    train = data.participants().splits["train"].flat.cpu().numpy()
    means, stds, fill = np.zeros(x.shape[-1]), np.ones(x.shape[-1]), np.zeros(x.shape[-1])
    for column in np.flatnonzero(scaling.columns):
        known = x[..., column][train].astype(np.float64)
        known = known[~np.isnan(known)]
        mean, std = (known.mean(), known.std()) if len(known) else (0.0, 0.0)
        if scaling.fill == "mean":
            fill[column] = mean
        if scaling.standardise:
            means[column] = mean
            stds[column] = std if std > 1e-12 * abs(mean) else 1.0  # a constant's std is a rounding error
    fills = tuple(fill.tolist()) if scaling.fill else None
    return Numbers(tuple(means.tolist()), tuple(stds.tolist()), fills, scaling.axis)


def hold_out_server(data: Federation, share: float) -> Federation:
    """The federation with a share of the server's samples, drawn once, kept for testing the global model."""
    if not share:
        return data
    if data.server is None:
        raise UserError(f"dcs_holdout={share:g} divides the server's samples, but it has none; set server_share=0.1.")
    if len(data.server) < 2:
        raise UserError("dcs_holdout divides the server's samples, but there is only one; set dcs_holdout=0.")
    order = rng("partition", 0, stream("dcs")).permutation(len(data.server))
    cut = min(max(1, round(share * len(order))), len(order) - 1)
    return replace(data, server_holdout=data.server[torch.from_numpy(np.sort(order[:cut])).to(data.device)])


def split_sizes(n: int, split: Shares) -> tuple[int, int, int]:
    """Numbers of samples for training, validation and test out of n: shares are rounded down, the rest is for test, and
    training and test have at least one each."""
    train, val = max(1, int(split[0] * n + 1e-9)), int(split[1] * n + 1e-9)
    if train + val >= n:
        train, val = (train, n - 1 - train) if val else (n - 1, 0)
    return train, val, n - train - val
