"""`fedloom data check`: statistics of a user's data, and everything that is wrong with them."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from fedloom.core.errors import UserError, plural
from fedloom.data.sets.own import OwnData, cache_samples, default_model
from fedloom.data.user_data.categorical import PLAUSIBLE_CLASSES, WHOLE
from fedloom.data.user_data.issues import Issues, join_names, printable, shorten
from fedloom.data.user_data.layout import short_path
from fedloom.data.user_data.read import read_samples
from fedloom.data.user_data.samples import Samples

FEW_SAMPLES = 10  # a client with fewer has too small a test set
IMBALANCE = 20  # a class with so many times fewer samples than the largest is mentioned


def check(options: OwnData) -> dict[str, Any]:
    """Read a user's data and report on them.

    Returns a dictionary with `ready` (whether a run can use the data), `problems` and `remarks` (a kind and a sentence
    each), `path` and, if the data can be read, statistics. A mistake in the data raises nothing.
    """
    issues = Issues(strict=False)
    report: dict[str, Any] = {"path": printable(str(short_path(options.path)))}
    try:
        samples = read_samples(options, issues)
    except UserError as error:
        if str(error) not in [sentence for _, sentence in issues.problems]:
            issues.problems.append(("fatal", str(error)))
    else:
        report |= _statistics(samples)
        if not issues.problems:
            cache_samples(options, replace(samples, notes=()))  # which are in the report
        _add_remarks(samples, issues)
    return {
        **report,
        "problems": [{"kind": kind, "text": text} for kind, text in issues.problems],
        "remarks": [{"kind": kind, "text": text} for kind, text in issues.remarks],
        "ready": not issues.problems,
    }


def _statistics(samples: Samples) -> dict[str, Any]:
    """What is predicted, by client; samples per split; and the defaults of a run."""
    parts = None
    if samples.split is not None:
        parts = {name: int((samples.split == name).sum()) for name in ("train", "val", "test")}
    return {
        "layout": samples.layout,
        "kind": samples.kind,
        "samples": len(samples.y),
        "shape": list(samples.x.shape[1:]),
        "columns": _feature_names(samples),
        "vocabulary": samples.preprocessing.token_ids,
        "target": samples.target,
        "classes": None if samples.target == "number" else _classes(samples),
        "number": _number(samples) if samples.target == "number" else None,
        "clients": None if samples.client is None else _clients(samples),
        "parts": parts,
        "model": default_model(samples),
        "partition": "dirichlet_class" if samples.client is None else "natural",
    }


def _classes(samples: Samples) -> list[dict[str, Any]]:
    """Samples and clients of every class or label."""
    counts, clients = _counts(samples), samples.client is not None
    return [
        {"class": name, "samples": int(n), "clients": int((counts[:, c] > 0).sum()) if clients else None}
        for c, (name, n) in enumerate(zip(samples.classes, counts.sum(0), strict=True))
    ]


def _number(samples: Samples) -> dict[str, Any]:
    """Statistics of the number that is predicted."""
    y = samples.y
    return {"name": samples.classes[0], "min": float(y.min()), "max": float(y.max()), **_moments(y)}


def _moments(y: np.ndarray) -> dict[str, float | None]:
    return {"mean": float(y.mean()), "std": float(y.std())} if len(y) else {"mean": None, "std": None}


def _clients(samples: Samples) -> list[dict[str, Any]]:
    """Samples of every client, and those of each class or label, or statistics of the number."""
    rows: list[dict[str, Any]] = [
        {"client": name, "samples": int(n)} for name, n in zip(samples.clients, _sizes(samples), strict=True)
    ]
    if samples.target == "number":
        return [row | _moments(samples.y[samples.client == i]) for i, row in enumerate(rows)]
    counts = _counts(samples)
    return [row | {"classes": int((n > 0).sum()), "labels": n.tolist()} for row, n in zip(rows, counts, strict=True)]


def _counts(samples: Samples) -> np.ndarray:
    """Samples per client and class or label; without clients there is one row."""
    client = samples.client if samples.client is not None else np.zeros(len(samples.y), dtype=np.int64)
    counts = np.zeros((max(1, len(samples.clients)), len(samples.classes)), dtype=np.int64)
    if samples.target == "labels":
        np.add.at(counts, client, samples.y.astype(np.int64))
    else:
        np.add.at(counts, (client, samples.y), 1)
    return counts


def _sizes(samples: Samples) -> np.ndarray:
    """Samples per client."""
    assert samples.client is not None
    return np.bincount(samples.client, minlength=len(samples.clients))


def _feature_names(samples: Samples) -> list[str]:
    """Names of the numbers of a row, such as "age" and "sex=f", or of the column of texts."""
    preprocessing = samples.preprocessing
    if preprocessing.vocabulary is not None:
        return [str(preprocessing.content)]
    return [
        name
        for column in preprocessing.columns
        for name in ([column.name] if column.words is None else [f"{column.name}={shorten(w)}" for w in column.words])
    ]


def _add_remarks(samples: Samples, issues: Issues) -> None:
    """Add remarks: rare classes or labels, small clients, duplicates."""
    if samples.target == "classes":
        _remark_on_classes(samples, issues)
    elif samples.target == "labels":
        _remark_on_labels(samples, issues)
    if samples.client is not None:
        _remark_on_clients(samples, issues)
    _remark_on_duplicates(samples, issues)


def _remark_on_classes(samples: Samples, issues: Issues) -> None:
    total = np.bincount(samples.y, minlength=len(samples.classes))
    if absent := [samples.classes[c] for c in np.flatnonzero(total == 0)]:
        issues.remark("absent", f"No sample is of class {join_names(absent)}.")
    rare = [c for c in np.flatnonzero(total) if total[c] * IMBALANCE < total.max()]
    if rare:
        names = join_names([f"{samples.classes[c]} ({total[c]})" for c in rare])
        issues.remark("imbalance", f"Classes with few samples, of {total.max()} in the largest: {names}.")
    if len(samples.classes) > PLAUSIBLE_CLASSES and all(WHOLE.fullmatch(name) for name in samples.classes):
        issues.remark(
            "target",
            f"The {len(samples.classes)} classes are whole numbers; set target=number if they are a measurement.",
        )


def _remark_on_labels(samples: Samples, issues: Issues) -> None:
    n, total, each = len(samples.y), samples.y.sum(0), samples.y.sum(1)
    if absent := [samples.classes[c] for c in np.flatnonzero(total == 0)]:
        issues.remark("absent", f"No sample has label {join_names(absent)}.")
    if always := [samples.classes[c] for c in np.flatnonzero(total == n)]:
        issues.remark("always", f"All samples have label {join_names(always)}.")
    if rare := [f"{samples.classes[c]} ({total[c]:g})" for c in np.flatnonzero(total) if total[c] * IMBALANCE < n]:
        issues.remark("imbalance", f"Labels of few samples, of {n} in all: {join_names(rare)}.")
    if without := int((each == 0).sum()):
        issues.remark("none", f"{plural(without, 'sample')} without any label.")
    if (each == 1).all():
        issues.remark(
            "target", "Every sample has exactly one label; if labels exclude each other, give one column of classes."
        )


def _remark_on_clients(samples: Samples, issues: Issues) -> None:
    """Remark on clients with few samples or one class, and on classes or labels that only one client has."""
    sizes, names = _sizes(samples), samples.clients
    small = [names[i] for i in np.flatnonzero((sizes >= 2) & (sizes < FEW_SAMPLES))]
    if small:
        issues.remark(
            "small",
            f"{plural(len(small), 'client')} with fewer than {FEW_SAMPLES} samples, so that a test says little: "
            f"{join_names(small)}.",
        )
    if samples.target == "number":
        parts = [samples.y[samples.client == i] for i in range(len(names))]
        narrow = [names[i] for i, y in enumerate(parts) if len(y) > 1 and y.min() == y.max()]
    else:
        there = _counts(samples) > 0
        noun = "class" if samples.target == "classes" else "label"
        if single := [samples.classes[c] for c in np.flatnonzero(there.sum(0) == 1)]:
            issues.remark("one client", f"Only one client has {noun} {join_names(single)}.")
        narrow = [names[i] for i in np.flatnonzero(there.sum(1) == 1)] if noun == "class" else []
    if narrow:
        what = "class" if samples.target == "classes" else "value of the label"
        issues.remark("one class", f"{plural(len(narrow), 'client')} with one {what} only: {join_names(narrow)}.")
    if samples.split is not None:
        assert samples.client is not None
        for part in ("train", "test"):
            sizes = np.bincount(samples.client[samples.split == part], minlength=len(names))
            if absent := [names[i] for i in np.flatnonzero(sizes == 0)]:
                issues.remark("split", f"Clients without samples for {part} will be left out: {join_names(absent)}.")


def _remark_on_duplicates(samples: Samples, issues: Issues) -> None:
    """Remark on samples with the same values: in two splits or at two clients, they make results too good."""
    x = np.ascontiguousarray(samples.x).reshape(len(samples.y), -1)
    first_rows: dict[bytes, int] = {}
    across_clients, across_splits, within_client = [], [], []
    complete = np.arange(len(x)) if x.dtype.kind != "f" else np.flatnonzero(~np.isnan(x).any(1))
    for i in complete.tolist():
        first = first_rows.setdefault(hashlib.blake2b(x[i].data, digest_size=16).digest(), i)
        if first == i:
            continue
        if samples.split is not None and samples.split[first] != samples.split[i]:
            across_splits.append((first, i))
        elif samples.client is not None and samples.client[first] != samples.client[i]:
            across_clients.append((first, i))
        else:
            within_client.append((first, i))
    for pairs, text in (
        (across_splits, "Samples in two parts"), (across_clients, "Samples at two clients"), (within_client, "Copies"),
    ):  # fmt: skip
        if pairs:
            a, b = (shorten(samples.where(row), 60) for row in pairs[0])
            issues.remark("copies", f"{text}: {len(pairs)}, such as {a} and {b}; results may be too good.")
