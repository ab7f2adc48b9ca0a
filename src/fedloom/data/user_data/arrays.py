"""Samples from arrays: `.npz` files, or arrays that are given in Python (`fedloom.federation`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from fedloom.core.errors import UserError, nearest, unknown
from fedloom.core.federation import Federation, Scaling
from fedloom.data.dataset import RawDataset
from fedloom.data.divide import Shares, divide, validated
from fedloom.data.limits import check_npz
from fedloom.data.partitions import PARTITIONS, Natural, Partition
from fedloom.data.user_data.categorical import Categorical, encode_clients, encode_splits
from fedloom.data.user_data.issues import Issues, Origin, SampleOrigin, error_text, join_names
from fedloom.data.user_data.layout import File
from fedloom.data.user_data.leaks import leak_detector, report_leaks
from fedloom.data.user_data.samples import Samples, array_preprocessing
from fedloom.data.user_data.targets import Wanted, check_target, read_target_array

if TYPE_CHECKING:
    from fedloom.data.sets.own import OwnData

ARRAY_NAMES = ("x", "y", "client", "split")
MAX_VOCABULARY = 300_000  # token ids, unless x holds more numbers: every id has a row in the model's embedding


def samples_from_arrays(files: Sequence[File], layout: str, options: OwnData, issues: Issues) -> Samples:
    """Samples from `.npz` files with the arrays x and y, and perhaps client and split.

    Args:
        files: the files, whose samples must have one shape.
        layout: description of the files, for the user.
        options: the user's settings.
        issues: where problems are reported.
    """
    if options.kind == "text":
        raise UserError("kind=text needs a table with a column of texts, not arrays.")
    where = Origin()
    read: dict[str, list[np.ndarray]] = {name: [] for name in ARRAY_NAMES}
    for file in files:
        try:
            arrays = read_arrays(file, ("x", "y"), issues)
            _check_same_shapes(file.path, arrays, read, where)
        except UserError as error:
            issues.problem("unreadable", str(error))
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
    joined = {name: np.concatenate(values) for name, values in read.items() if values}
    if files[0].client is None and "client" in joined and options.client != "none":
        layout = f"{layout}, array 'client' says whose a sample is"
    return join_arrays(joined, where, layout, options, issues)


def join_arrays(
    arrays: Mapping[str, np.ndarray], where: Origin, layout: str, options: OwnData, issues: Issues
) -> Samples:
    """Samples from the arrays x and y, and perhaps client and split, with a value per sample; see
    `samples_from_arrays`."""
    target = read_target_array(arrays["y"], where, "the label in 'y'", options.target, issues)
    attributes: dict[str, Any] = {"layout": layout}
    if "client" in arrays and options.client != "none":
        coded = Categorical.from_array(arrays["client"])
        attributes["client"], attributes["clients"] = encode_clients(coded, where, "the client", issues)
    if "split" in arrays:
        attributes["split"] = encode_splits(Categorical.from_array(arrays["split"]), where, "'split'", issues)
    kind, x, scaling, vocab = _prepare(arrays["x"], options, where, issues)
    if kind == "table":
        detector = leak_detector(target, x.shape[1])
        leaks = [f"x[:, {c}]" for c, values in enumerate(x.T) if detector.determines(values)]
        report_leaks(leaks, target.kind, "of x", issues)
    preprocessing = replace(array_preprocessing(x, target.names, vocab), target=target.kind)
    return Samples(
        kind, x, target.y, target.names, where, preprocessing, scaling=scaling, target=target.kind, **attributes
    ).usable("'y'", issues)


def read_arrays(file: File, needed: tuple[str, ...], issues: Issues) -> dict[str, np.ndarray]:
    """The arrays of a file, with the split of its path and, unless it has an array for it, the client of its path."""
    path = file.path
    arrays: dict[str, np.ndarray] = {}
    try:
        with path.open("rb") as opened:
            check_npz(path, opened)
            npz = np.load(opened, allow_pickle=False)
            if not isinstance(npz, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array")
            names = list(npz.files)
            if missing := [name for name in needed if name not in names]:
                raise UserError(f"{path} has no array '{missing[0]}'; {nearest(missing[0], names)}")
            for name in names:
                if name in ARRAY_NAMES:
                    arrays[name] = npz[name]
                    if not isinstance(arrays[name], np.ndarray):  # but the bytes of a member in another format
                        raise ValueError(f"{name} is not an array")
    except UserError:
        raise
    except Exception as error:  # NumPy and zipfile raise all kinds of exceptions for a damaged file
        if "pickle" in str(error).lower() or "object" in str(error).lower():
            raise UserError(
                f"{path} holds Python objects, which are never loaded; save plain arrays of numbers or words."
            ) from None
        raise UserError(f"{path} is not a complete .npz file ({error_text(error)}); write it again.") from None
    if others := [name for name in names if name not in ARRAY_NAMES]:
        issues.remark("ignored", f"{path}: arrays that are not used: {join_names(others)}.")
    check_shapes(path, arrays)
    n = len(arrays["x"])
    if file.client is not None and "client" not in arrays:
        arrays["client"] = np.full(n, file.client)
    if file.split is not None:
        arrays["split"] = np.full(n, file.split)
    return arrays


def _check_same_shapes(
    path: Path, arrays: dict[str, np.ndarray], read: dict[str, list[np.ndarray]], where: Origin
) -> None:
    """Raise a UserError unless samples and their targets have the shapes of those that were read before."""
    for name, what in (("x", "samples"), ("y", "targets in y")):
        if read[name] and arrays[name].shape[1:] != read[name][0].shape[1:]:
            shapes = arrays[name].shape[1:], read[name][0].shape[1:]
            raise UserError(f"{path}: {what} have the shape {shapes[0]}, but {shapes[1]} in {where(0)}.")


def check_shapes(path: Path | str, arrays: dict[str, np.ndarray]) -> None:
    """Raise a UserError unless x holds numbers, and the other arrays one value per sample, y perhaps several."""
    x, y = arrays["x"], arrays.get("y")
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise UserError(f"{path}: x must hold numbers, a row or more dimensions per sample, not {x.dtype} {x.shape}.")
    for name, values in arrays.items():
        if name != "x" and values.ndim != 1 and not (name == "y" and values.ndim == 2):
            raise UserError(f"{path}: {name} must have one value per sample, not the shape {values.shape}.")
        if len(values) != len(x):
            raise UserError(f"{path} has {len(x)} samples in x, but {len(values)} in {name}.")
    if not len(x) or not x[0].size:
        raise UserError(f"{path} has no samples.")
    if y is not None and y.dtype.kind not in "biufUS":
        raise UserError(f"{path}: y must hold classes, numbers or words, not {y.dtype}.")


def _prepare(
    x: np.ndarray, options: OwnData, where: Origin, issues: Issues
) -> tuple[str, np.ndarray, Scaling | None, int | None]:
    """The kind of the samples, x as models take it, the columns to scale, and the size of the vocabulary."""
    kind = options.kind
    if kind == "auto":
        is_image = x.dtype == np.uint8 and (x.ndim == 4 or (x.ndim == 3 and min(x.shape[1:]) >= 8))
        kind = "image" if is_image or x.ndim == 4 else "table" if x.ndim == 2 else "sequence"
    if kind == "sequence" and x.ndim == 2 and x.dtype.kind in "iu":
        if x.min() < 0:
            row = int((x < 0).any(1).argmax())
            issues.problem("tokens", f"{where(row)}: a token id is {x[row].min()}, below 0; padding is 0.")
        vocab = max(int(x.max()) + 1, options.words or 0)
        if vocab > (limit := max(MAX_VOCABULARY, x.size)):
            raise UserError(
                f"{where(int(x.max(1).argmax()))}: a token id is {x.max()}, so that the vocabulary would have {vocab} "
                f"words, and at most {limit} are possible; number the V words that occur from 0 to V-1."
            )
        return kind, np.maximum(x, 0).astype(np.int64), None, vocab
    if kind == "image":
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and channels_last(x.shape[1:]):
            issues.remark("channels", f"Pictures {x.shape[1:]} have their channels last; they are put first.")
            x = x.transpose(0, 3, 1, 2)
        if x.ndim != 4:
            raise UserError(f"kind=image needs x of shape samples, channels, height, width, not {x.shape}.")
        if x.dtype == np.uint8:
            return kind, np.ascontiguousarray(x), None, None
    values = finite_numbers(x, where, issues)
    axis = 1 if kind == "image" else -1
    if kind == "table":
        values = values.reshape(len(x), -1)
        constant = np.flatnonzero((values == values[0]).all(0))
        if len(constant):
            names = join_names([str(c) for c in constant])
            issues.remark("constant", f"Columns of x that are the same everywhere: {names}.")
    scaling = Scaling(np.ones(values.shape[axis], dtype=bool), axis) if options.normalise else None
    return kind, values if scaling else values.astype(np.float32), scaling, None


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether the last axis of a picture must be its channels, because the first cannot be."""
    return shape[-1] in (1, 3) and shape[0] not in (1, 3)


def finite_numbers(x: np.ndarray, where: Origin, issues: Issues) -> np.ndarray:
    """The samples in float64. One with a number that is not finite is reported, and becomes 0."""
    values = x.astype(np.float64)
    with np.errstate(over="ignore"):
        invalid = ~np.isfinite(values.astype(np.float32)).reshape(len(x), -1).all(1)
    if invalid.any():
        issues.problem(
            "infinite",
            f"{where(int(invalid.argmax()))}: x has a value that is not a finite number; correct it or leave it out.",
        )
        values[invalid] = 0
    return values


def _as_array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except Exception:  # of what cannot be an array, such as rows of different lengths
        raise UserError(f"{name} is not an array of numbers or words; give all samples the same shape.") from None


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
    stratify: bool = False,
    target: Wanted = "auto",
) -> Federation:
    """A federation from arrays, to be given to `fedloom.run`, `compare` or `sweep` as the data set.

    Args:
        x: samples along the first axis: numbers, pixels (uint8) or, with `vocab`, token ids.
        y: the class of every sample, a whole number or a name; or a number, such as a price; or its labels, as a row
            of 0 and 1.
        clients: the client of every sample, numbers or names; without it, a partition divides the samples.
        partition: how samples are divided, a name or a `Partition`; by default by `clients`, else `dirichlet_class`.
        count: number of clients to divide the samples among; not used if they are divided by `clients`.
        split: shares of a client's samples for training, validation and test.
        normalise: standardise columns of numbers to mean 0 and standard deviation 1 over the training samples.
        vocab: number of token ids, if x holds sequences of them.
        seed: random seed of partition and split.
        stratify: a client's classes have the same shares in training, validation and test.
        target: what y is: class, number or labels; by default labels if y has two axes, a number if one of the values
            has a fraction, else classes.

    >>> import fedloom, numpy as np
    >>> x, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 2
    >>> data = fedloom.federation(x, y, ["Berlin", "Paris", "Rome"] * 10)
    >>> data.client_names
    ('Berlin', 'Paris', 'Rome')
    """
    if target not in get_args(Wanted):
        raise unknown("target", target, get_args(Wanted))
    given = {"x": x, "y": y} | ({} if clients is None else {"client": clients})
    arrays = {name: _as_array(name, values) for name, values in given.items()}
    check_shapes("federation(x, y)", arrays)
    where, issues = SampleOrigin(len(arrays["x"])), Issues()
    found = read_target_array(arrays["y"], where, "y", target, issues)
    check_target(found, "y")
    natural: tuple[np.ndarray, ...] | None = None
    names: tuple[str, ...] = ()
    if clients is not None:
        client_index, names = encode_clients(Categorical.from_array(arrays["client"]), where, "its client", issues)
        natural = tuple(np.flatnonzero(client_index == i) for i in range(len(names)))
    values, pixels = arrays["x"], arrays["x"].dtype == np.uint8
    if vocab is not None:
        values = values.astype(np.int64)
        if values.min() < 0 or values.max() >= vocab:
            raise UserError(f"Token ids must be 0 to {vocab - 1}, not {values.min()} to {values.max()}.")
    elif not pixels:
        values = values.astype(np.float64 if normalise else np.float32)
    scaling = Scaling(np.ones(values.shape[-1], dtype=bool)) if normalise and not pixels and vocab is None else None
    preprocessing = replace(array_preprocessing(values, found.names, vocab), target=found.kind)
    raw = RawDataset(
        values, found.y, len(found.names), natural=natural, mean=preprocessing.mean, std=preprocessing.std, vocab=vocab,
        scaling=scaling, class_names=found.names, client_names=names, notes=issues.notes(), preprocessing=preprocessing,
        target=found.kind,
    )  # fmt: skip
    scheme = partition if partition is not None else "dirichlet_class" if clients is None else Natural()
    data = divide(
        raw,
        PARTITIONS[scheme]() if isinstance(scheme, str) else scheme,
        count,
        split=split,
        seed=seed,
        stratify=stratify,
    )
    validated(data)  # raises a mistake now; columns are scaled when it is known which clients are held out
    return data
