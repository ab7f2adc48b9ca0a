"""`fedloom data check`: statistics of a user's data, and everything that is wrong with them."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from fedloom.core.errors import UserError, plural
from fedloom.data.sets.own import OwnData, cache_samples, default_model
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
    """Counts of samples per class, client and split, and the defaults of a run."""
    classes = len(samples.classes)
    client = samples.client if samples.client is not None else np.zeros(len(samples.y), dtype=np.int64)
    names = samples.clients if samples.client is not None else ()
    counts = np.zeros((max(1, len(names)), classes), dtype=np.int64)
    np.add.at(counts, (client, samples.y), 1)
    clients = [
        {"client": name, "samples": int(row.sum()), "classes": int((row > 0).sum()), "labels": row.tolist()}
        for name, row in zip(names, counts, strict=False)
    ]
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
        "classes": [
            {"class": name, "samples": int(n), "clients": int((counts[:, c] > 0).sum()) if names else None}
            for c, (name, n) in enumerate(zip(samples.classes, counts.sum(0), strict=True))
        ],
        "clients": clients if names else None,
        "parts": parts,
        "model": default_model(samples),
        "partition": "natural" if names else "dirichlet_class",
    }


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
    """Add remarks: rare classes, small clients, duplicates."""
    total = np.bincount(samples.y, minlength=len(samples.classes))
    if absent := [samples.classes[c] for c in np.flatnonzero(total == 0)]:
        issues.remark("absent", f"No sample is of class {join_names(absent)}.")
    rare = [c for c in np.flatnonzero(total) if total[c] * IMBALANCE < total.max()]
    if rare:
        names = join_names([f"{samples.classes[c]} ({total[c]})" for c in rare])
        issues.remark("imbalance", f"Classes with few samples, of {total.max()} in the largest: {names}.")
    if samples.client is not None:
        _remark_on_clients(samples, issues)
    _remark_on_duplicates(samples, issues)


def _remark_on_clients(samples: Samples, issues: Issues) -> None:
    """Remark on clients with few samples or classes, and on classes that only one client has."""
    assert samples.client is not None
    counts = np.zeros((len(samples.clients), len(samples.classes)), dtype=np.int64)
    np.add.at(counts, (samples.client, samples.y), 1)
    sizes = counts.sum(1)
    small = [samples.clients[i] for i in np.flatnonzero((sizes >= 2) & (sizes < FEW_SAMPLES))]
    if small:
        issues.remark(
            "small",
            f"{plural(len(small), 'client')} with fewer than {FEW_SAMPLES} samples, so that a test says little: "
            f"{join_names(small)}.",
        )
    if single := [samples.classes[c] for c in np.flatnonzero((counts > 0).sum(0) == 1)]:
        issues.remark("one client", f"Only one client has class {join_names(single)}.")
    if narrow := [samples.clients[i] for i in np.flatnonzero((counts > 0).sum(1) == 1)]:
        issues.remark("one class", f"{plural(len(narrow), 'client')} with one class only: {join_names(narrow)}.")
    if samples.split is not None:
        for part in ("train", "test"):
            sizes = np.bincount(samples.client[samples.split == part], minlength=len(samples.clients))
            if absent := [samples.clients[i] for i in np.flatnonzero(sizes == 0)]:
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
