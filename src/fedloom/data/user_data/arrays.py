"""Arrays: from `.npz` files, or given in Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.core.errors import UserError, nearest
from fedloom.core.federation import Federation, Scaling
from fedloom.data.dataset import RawDataset
from fedloom.data.divide import Shares, divide, validated
from fedloom.data.partitions import PARTITIONS, Natural, Partition
from fedloom.data.user_data.findings import Findings, Origin, listed, reason
from fedloom.data.user_data.layout import File
from fedloom.data.user_data.names import Coded, check_classes, classes_of, clients_of, splits_of
from fedloom.data.user_data.samples import Samples

if TYPE_CHECKING:
    from fedloom.data.sets.own import OwnData

KNOWN = ("x", "y", "client", "split")


def samples_of(files: Sequence[File], layout: str, asked: OwnData, findings: Findings) -> Samples:
    if asked.kind == "text":
        raise UserError("kind=text needs a table with a column of texts, not arrays.")
    where = Origin()
    read: dict[str, list[np.ndarray]] = {name: [] for name in KNOWN}
    for file in files:
        try:
            arrays = _read(file, asked, findings)
            if read["x"] and arrays["x"].shape[1:] != read["x"][0].shape[1:]:
                shapes = arrays["x"].shape[1:], read["x"][0].shape[1:]
                raise UserError(f"{file.path}: samples have the shape {shapes[0]}, but {shapes[1]} in {where(0)}.")
        except UserError as error:
            findings.problem("unreadable", str(error))
            continue
        n = len(arrays["y"])
        where.add(str(file.path), np.arange(n), n)
        for name, values in arrays.items():
            read[name].append(values)
    if not read["x"]:
        raise UserError("No file of arrays can be read.")
    for name in ("client", "split"):
        if read[name] and len(read[name]) < len(read["x"]):
            raise UserError(f"Some files have an array '{name}' and some have not; give it to all or to none.")
    x = np.concatenate(read["x"])
    y, classes = classes_of(Coded.of_array(np.concatenate(read["y"])), where, "the label in 'y'", findings)
    facts: dict[str, Any] = {"layout": layout}
    if read["client"] and asked.client != "none":
        coded = Coded.of_array(np.concatenate(read["client"]))
        facts["client"], facts["clients"] = clients_of(coded, where, "the client", findings)
        if files[0].client is None:
            facts["layout"] = f"{layout}, array 'client' says whose a sample is"
    if read["split"]:
        facts["split"] = splits_of(Coded.of_array(np.concatenate(read["split"])), where, "'split'", findings)
    kind, x, scaling, vocab = _shaped(x, asked, where, findings)
    made = Samples(kind, x, y, classes, where, scaling=scaling, vocab=vocab, **facts)
    return made.checked("'y'", findings)


def _read(file: File, asked: OwnData, findings: Findings) -> dict[str, np.ndarray]:
    path = file.path
    arrays: dict[str, np.ndarray] = {}
    try:
        with path.open("rb") as file_, np.load(file_, allow_pickle=False) as found:
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array")
            names = list(found.files)
            if missing := [name for name in ("x", "y") if name not in names]:
                raise UserError(f"{path} has no array '{missing[0]}'; {nearest(missing[0], names)}")
            for name in names:
                if name in KNOWN:
                    arrays[name] = found[name]
    except UserError:
        raise
    except Exception as error:  # whatever is raised by numpy or by zipfile is about this file
        if "pickle" in str(error).lower() or "object" in str(error).lower():
            raise UserError(
                f"{path} holds Python objects, which are never loaded; save plain arrays of numbers or words."
            ) from None
        raise UserError(f"{path} is not a complete .npz file ({reason(error)}); write it again.") from None
    if others := [name for name in names if name not in KNOWN]:
        findings.remark("ignored", f"{path}: arrays that are not used: {listed(others)}.")
    _check_shapes(path, arrays)
    n = len(arrays["y"])
    if file.client is not None and "client" not in arrays:
        arrays["client"] = np.full(n, file.client)
    if file.split is not None:
        arrays["split"] = np.full(n, file.split)
    return arrays


def _check_shapes(path: Path | str, arrays: dict[str, np.ndarray]) -> None:
    x, y = arrays["x"], arrays["y"]
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise UserError(f"{path}: x must hold numbers, a row or more dimensions per sample, not {x.dtype} {x.shape}.")
    for name, values in arrays.items():
        if len(values) != len(x):
            raise UserError(f"{path} has {len(x)} samples in x, but {len(values)} in {name}.")
        if name != "x" and values.ndim != 1:
            raise UserError(f"{path}: {name} must have one value per sample, not the shape {values.shape}.")
    if not len(x) or not x[0].size:
        raise UserError(f"{path} has no samples.")
    if y.dtype.kind not in "biufUS":
        raise UserError(f"{path}: y must hold classes, numbers or words, not {y.dtype}.")


def _shaped(
    x: np.ndarray, asked: OwnData, where: Origin, findings: Findings
) -> tuple[str, np.ndarray, Scaling | None, int | None]:
    """Kind, samples as models take them, what is to be scaled, vocabulary."""
    kind = asked.kind
    if kind == "auto":
        picture = x.dtype == np.uint8 and (x.ndim == 4 or (x.ndim == 3 and min(x.shape[1:]) >= 8))
        kind = "image" if picture or x.ndim == 4 else "table" if x.ndim == 2 else "sequence"
    if kind == "sequence" and x.ndim == 2 and x.dtype.kind in "iu":
        if x.min() < 0:
            at = int((x < 0).any(1).argmax())
            findings.problem("tokens", f"{where(at)}: a token id is {x[at].min()}, below 0; padding is 0.")
        x = np.maximum(x, 0).astype(np.int64)
        return kind, x, None, max(int(x.max()) + 1, asked.words or 0)
    if kind == "image":
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
            findings.remark("channels", f"Pictures {x.shape[1:]} have their channels last; they are put first.")
            x = x.transpose(0, 3, 1, 2)
        if x.ndim != 4:
            raise UserError(f"kind=image needs x of shape samples, channels, height, width, not {x.shape}.")
        if x.dtype == np.uint8:
            return kind, np.ascontiguousarray(x), None, None
    values = x.astype(np.float64)
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(values.astype(np.float32)).reshape(len(x), -1).all(1)
    if bad.any():
        findings.problem(
            "infinite",
            f"{where(int(bad.argmax()))}: x has a value that is not a finite number; correct it or leave it out.",
        )
        values[bad] = 0
    axis = 1 if kind == "image" else -1
    if kind == "table":
        values = values.reshape(len(x), -1)
        same = np.flatnonzero((values == values[0]).all(0))
        if len(same):
            findings.remark("constant", f"Columns of x that are the same everywhere: {listed([str(c) for c in same])}.")
    scaling = Scaling(np.ones(values.shape[axis], dtype=bool), axis) if asked.normalise else None
    return kind, values if scaling else values.astype(np.float32), scaling, None


def federation(
    x: Any,
    y: Any,
    clients: Any = None,
    *,
    partition: str | Partition | None = None,
    count: int = 20,
    split: Shares = (0.7, 0.1, 0.2),
    normalise: bool = False,
    vocab: int | None = None,
    seed: int = 1,
) -> Federation:
    """A federation from arrays: samples, their classes, and whose they are (numbers or names).

    Without `clients`, a partition divides the samples among `count` clients. `x` holds numbers, pixels (uint8) or, with
    `vocab`, token ids; `normalise` brings columns of numbers to mean 0 and spread 1 over the training samples.

    >>> import fedloom, numpy as np
    >>> x, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 2
    >>> data = fedloom.federation(x, y, ["Berlin", "Paris", "Rome"] * 10)
    >>> data.client_names
    ('Berlin', 'Paris', 'Rome')
    """
    arrays = {"x": np.asarray(x), "y": np.asarray(y)}
    if clients is not None:
        arrays["client"] = np.asarray(clients)
    _check_shapes("federation(x, y)", arrays)
    named, findings = _Numbered(len(arrays["x"])), Findings()
    ids, classes = classes_of(Coded.of_array(arrays["y"]), named, "its class", findings)
    check_classes(ids, classes, "y")
    natural: tuple[np.ndarray, ...] | None = None
    names: tuple[str, ...] = ()
    if clients is not None:
        owner, names = clients_of(Coded.of_array(arrays["client"]), named, "its client", findings)
        natural = tuple(np.flatnonzero(owner == i) for i in range(len(names)))
    values, pixels = arrays["x"], arrays["x"].dtype == np.uint8
    if vocab is not None:
        values = values.astype(np.int64)
        if values.min() < 0 or values.max() >= vocab:
            raise UserError(f"Token ids must be 0 to {vocab - 1}, not {values.min()} to {values.max()}.")
    elif not pixels:
        values = values.astype(np.float64 if normalise else np.float32)
    scaling = Scaling(np.ones(values.shape[-1], dtype=bool)) if normalise and not pixels and vocab is None else None
    pool = RawDataset(
        values, ids, len(classes), natural=natural, mean=(0.5,) if pixels else (0.0,),
        std=(0.5,) if pixels else (1.0,), vocab=vocab, scaling=scaling, class_names=classes, client_names=names,
    )  # fmt: skip
    scheme = partition if partition is not None else "dirichlet_class" if clients is None else Natural()
    made = divide(pool, PARTITIONS[scheme]() if isinstance(scheme, str) else scheme, count, split=split, seed=seed)
    validated(made)  # a mistake shows here; scaling waits until it is known who takes part
    return made


class _Numbered(Origin):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.add("sample", np.arange(n), n)

    def __call__(self, i: int) -> str:
        return f"Sample {i}"
