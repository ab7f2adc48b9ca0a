"""Whatever stands for a class, a client or a part becomes a number, and the names are kept."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pyarrow as pa

from fedloom.core.errors import UserError, nearest
from fedloom.data.user_data.findings import Findings, Origin, many, short
from fedloom.data.user_data.layout import SPLITS

WHOLE = re.compile(r"[+-]?\d+")
FRACTION = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
MOST_CLASSES = 20  # up to here even a class per two samples is believed


class Coded:
    """Different values, and for every sample which of them it has (-1: none)."""

    def __init__(self, values: list[Any], codes: np.ndarray) -> None:
        self.values, self.codes = values, codes

    @staticmethod
    def of_column(column: pa.ChunkedArray) -> Coded:
        coded = column.combine_chunks()
        if not pa.types.is_dictionary(coded.type):
            coded = coded.dictionary_encode()
        codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return Coded(coded.dictionary.to_pylist(), codes)

    @staticmethod
    def of_array(values: np.ndarray) -> Coded:
        different, codes = np.unique(values, return_inverse=True)
        return Coded(different.tolist(), codes.reshape(-1).astype(np.int64))

    def first(self, code: int) -> int:
        return int(np.flatnonzero(self.codes == code)[0])

    def mapped(self, numbers: list[int]) -> np.ndarray:
        """Every sample's number, given that of every value."""
        return np.append(np.array(numbers, dtype=np.int64), -1)[self.codes]


def classes_of(
    coded: Coded, where: Origin, what: str, findings: Findings, names: list[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class of every sample (-1: none), and the names of the classes. Names are sorted, numbers as numbers."""
    if names is not None:  # the values are numbers of classes already
        numbers = [v if isinstance(v, int) and 0 <= v < len(names) else -1 for v in coded.values]
        ids = coded.mapped(numbers)
        _no_value(ids, where, f"{what} names no class (0 to {len(names) - 1})", findings)
        return ids, tuple(names)
    keys = [_key(value) for value in coded.values]
    _same_but_for(coded, keys, [k.strip() for k in keys], where, "classes", findings)
    keys = [key.strip() for key in keys]
    known: dict[str, Any] = {key: key for key in keys if key}
    if known and all(FRACTION.fullmatch(key) for key in known):
        for code, key in enumerate(keys):
            if key and not WHOLE.fullmatch(key) and not float(key).is_integer():
                raise UserError(
                    f"{where(coded.first(code))}: {what} is {short(key)}, a number with a fraction, but FedLoom learns "
                    "classes; turn it into a few, such as low and high."
                )
        known = {key: int(key) if WHOLE.fullmatch(key) else int(float(key)) for key in known}
    order = sorted(set(known.values()))
    place = {name: at for at, name in enumerate(order)}
    ids = coded.mapped([place[known[key]] if key else -1 for key in keys])
    _no_value(ids, where, f"{what} is empty", findings)
    return ids, tuple(str(name) for name in order)


def check_classes(ids: np.ndarray, names: tuple[str, ...], what: str) -> None:
    n, used = len(ids), np.unique(ids)
    if len(used) < 2:
        raise UserError(f"All samples are of one class, '{short(names[used[0]])}'; there is nothing to learn.")
    if len(used) > max(MOST_CLASSES, n // 2) or (len(used) == n and n > 2):
        raise UserError(
            f"There are {len(used)} classes for {n} samples, as if {what} were an id or a measurement; say which is "
            "the class with label=NAME."
        )


def clients_of(coded: Coded, where: Origin, what: str, findings: Findings) -> tuple[np.ndarray, tuple[str, ...]]:
    keys = [_key(value) for value in coded.values]
    _same_but_for(coded, keys, [k.strip().casefold() for k in keys], where, "clients", findings)
    keys = [key.strip() for key in keys]
    order = sorted(
        {key for key in keys if key}, key=lambda key: (0, int(key), key) if WHOLE.fullmatch(key) else (1, 0, key)
    )
    place = {key: at for at, key in enumerate(order)}
    ids = coded.mapped([place.get(key, -1) for key in keys])
    _no_value(ids, where, f"{what} is empty", findings)
    return ids, tuple(order)


def splits_of(coded: Coded, where: Origin, what: str, findings: Findings) -> np.ndarray:
    """train, val or test for every sample ('': unknown)."""
    words = [SPLITS.get(_key(value).strip().lower(), "") for value in coded.values]
    for code, word in enumerate(words):
        if not word:
            given = short(_key(coded.values[code]))
            findings.problem(
                "split", f"{where(coded.first(code))}: {what} is '{given}', not train, val or test; "
                f"{nearest(given, ('train', 'val', 'test'))}"
            )  # fmt: skip
    if (coded.codes < 0).any():
        findings.problem("split", f"{where(int((coded.codes < 0).argmax()))}: {what} is empty, not train, val or test.")
    return np.array([*words, ""])[coded.codes]


def _key(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return str(value)


def _same_but_for(
    coded: Coded, keys: list[str], plain: list[str], where: Origin, things: str, findings: Findings
) -> None:
    """Names that a person would read as one."""
    seen: dict[str, int] = {}
    for code, name in enumerate(plain):
        other = seen.setdefault(name, code)
        if name and other != code:
            findings.problem(
                "alike",
                f"The {things} '{short(keys[other])}' ({where(coded.first(other))}) and '{short(keys[code])}' "
                f"({where(coded.first(code))}) differ in spaces or capitals only; write them alike.",
            )


def _no_value(ids: np.ndarray, where: Origin, what: str, findings: Findings) -> None:
    rows = np.flatnonzero(ids < 0)
    if len(rows):
        more = f" ({many(len(rows), 'such row')})" if len(rows) > 1 else ""
        findings.problem("no value", f"{where(int(rows[0]))}: {what}{more}; fill it in, or leave the row out.")
