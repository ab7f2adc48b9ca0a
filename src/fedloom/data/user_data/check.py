"""What can be said about data before any training: counts, and all that is wrong with them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from fedloom.core.errors import UserError
from fedloom.data.sets.own import OwnData, default_model, keep
from fedloom.data.user_data.findings import Findings, listed, many, short
from fedloom.data.user_data.layout import near
from fedloom.data.user_data.read import read
from fedloom.data.user_data.samples import Samples

FEW = 10  # samples of a client, below which its own test says little
RARE = 20  # times fewer samples than the largest class


def check(asked: OwnData) -> dict[str, Any]:
    """Never raises for what is wrong with the data: `problems` has it, a sentence each."""
    findings = Findings(strict=False)
    facts: dict[str, Any] = {"path": str(near(asked.path))}
    try:
        samples = read(asked, findings)
    except UserError as error:
        if str(error) not in [sentence for _, sentence in findings.problems]:
            findings.problems.append(("fatal", str(error)))
    else:
        facts |= _facts(samples)
        if not findings.problems:
            keep(asked, samples)
        _look_closer(samples, findings)
    return {
        **facts,
        "problems": [{"kind": kind, "text": text} for kind, text in findings.problems],
        "remarks": [{"kind": kind, "text": text} for kind, text in findings.remarks],
        "ready": not findings.problems,
    }


def _facts(samples: Samples) -> dict[str, Any]:
    classes = len(samples.classes)
    owner = samples.client if samples.client is not None else np.zeros(len(samples.y), dtype=np.int64)
    names = samples.clients if samples.client is not None else ()
    counts = np.zeros((max(1, len(names)), classes), dtype=np.int64)
    np.add.at(counts, (owner, samples.y), 1)
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
        "columns": list(samples.columns),
        "vocabulary": samples.vocab,
        "classes": [
            {"class": name, "samples": int(n), "clients": int((counts[:, c] > 0).sum()) if names else None}
            for c, (name, n) in enumerate(zip(samples.classes, counts.sum(0), strict=True))
        ],
        "clients": clients if names else None,
        "parts": parts,
        "model": default_model(samples),
        "partition": "natural" if names else "dirichlet_class",
    }


def _look_closer(samples: Samples, findings: Findings) -> None:
    """What is not wrong, but worth knowing."""
    total = np.bincount(samples.y, minlength=len(samples.classes))
    if absent := [samples.classes[c] for c in np.flatnonzero(total == 0)]:
        findings.remark("absent", f"No sample is of class {listed(absent)}.")
    rare = [c for c in np.flatnonzero(total) if total[c] * RARE < total.max()]
    if rare:
        names = listed([f"{samples.classes[c]} ({total[c]})" for c in rare])
        findings.remark("imbalance", f"Classes with few samples, of {total.max()} in the largest: {names}.")
    if samples.client is not None:
        _look_at_clients(samples, findings)
    _look_for_copies(samples, findings)


def _look_at_clients(samples: Samples, findings: Findings) -> None:
    assert samples.client is not None
    counts = np.zeros((len(samples.clients), len(samples.classes)), dtype=np.int64)
    np.add.at(counts, (samples.client, samples.y), 1)
    sizes = counts.sum(1)
    small = [samples.clients[i] for i in np.flatnonzero((sizes >= 2) & (sizes < FEW))]
    if small:
        findings.remark(
            "small",
            f"{many(len(small), 'client')} with fewer than {FEW} samples, so that a test says little: {listed(small)}.",
        )
    if single := [samples.classes[c] for c in np.flatnonzero((counts > 0).sum(0) == 1)]:
        findings.remark("one client", f"Only one client has class {listed(single)}.")
    if narrow := [samples.clients[i] for i in np.flatnonzero((counts > 0).sum(1) == 1)]:
        findings.remark("one class", f"{many(len(narrow), 'client')} with one class only: {listed(narrow)}.")
    if samples.split is not None:
        for part in ("train", "test"):
            have = np.bincount(samples.client[samples.split == part], minlength=len(samples.clients))
            if without := [samples.clients[i] for i in np.flatnonzero(have == 0)]:
                findings.remark("split", f"Clients without samples for {part} will be left out: {listed(without)}.")


def _look_for_copies(samples: Samples, findings: Findings) -> None:
    """The same values twice: at two clients, or in training and test, they make results too good."""
    x = np.ascontiguousarray(samples.x).reshape(len(samples.y), -1)
    seen: dict[bytes, int] = {}
    between, parts, inside = [], [], []
    whole = np.arange(len(x)) if x.dtype.kind != "f" else np.flatnonzero(~np.isnan(x).any(1))
    for i in whole.tolist():
        first = seen.setdefault(hashlib.blake2b(x[i].data, digest_size=16).digest(), i)
        if first == i:
            continue
        if samples.split is not None and samples.split[first] != samples.split[i]:
            parts.append((first, i))
        elif samples.client is not None and samples.client[first] != samples.client[i]:
            between.append((first, i))
        else:
            inside.append((first, i))
    for pairs, text in ((parts, "Samples in two parts"), (between, "Samples at two clients"), (inside, "Copies")):
        if pairs:
            a, b = (short(samples.where(row), 60) for row in pairs[0])
            findings.remark("copies", f"{text}: {len(pairs)}, such as {a} and {b}; results may be too good.")
