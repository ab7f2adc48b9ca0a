"""From the columns of tables to samples: which column is what, and numbers from whatever a column holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedloom.core.errors import UserError, nearest
from fedloom.core.federation import Scaling
from fedloom.data.user_data.findings import Findings, Origin, listed, many, short
from fedloom.data.user_data.names import Coded, classes_of, clients_of, splits_of
from fedloom.data.user_data.pictures import Picture, stacked
from fedloom.data.user_data.samples import Samples
from fedloom.data.user_data.tables import Sheet

if TYPE_CHECKING:
    from fedloom.data.sets.own import OwnData

LABELS = ("label", "labels", "target", "class", "y")
CLIENTS = ("client", "client_id")
EMPTY = ("", "na", "n/a", "#n/a", "nan", "-nan", "null", "none", "?")  # a cell without a value
CATEGORIES = 50  # more different words than this are not a category


class Table:
    """The sheets as one table, and where its rows are from."""

    def __init__(self, sheets: list[Sheet], findings: Findings) -> None:
        first = sheets[0]
        kept = [sheet for sheet in sheets if _same_columns(first, sheet, findings)]
        self.file, self.names = first.file, first.table.column_names
        self.features = first.features
        self.where = Origin()
        for sheet in kept:
            self.where.add(sheet.file, sheet.rows, sheet.table.num_rows)
        self._tables = [sheet.table for sheet in kept]
        sizes = [sheet.table.num_rows for sheet in kept]
        self.client = _repeated([sheet.client for sheet in kept], sizes)
        self.split = _repeated([sheet.split for sheet in kept], sizes)

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        columns = [table[name] for table in self._tables]
        types = {column.type for column in columns}
        if len(types) > 1:  # a column of numbers here and of words there: as words, in which numbers are recognised
            common = pa.float64() if all(_is_number(t) for t in types) else pa.string()
            columns = [column.cast(common) for column in columns]
        return pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)


def _repeated(values: list[str | None], sizes: list[int]) -> np.ndarray | None:
    if all(value is None for value in values):
        return None
    return np.repeat(np.array([value or "" for value in values]), sizes)


def _same_columns(first: Sheet, sheet: Sheet, findings: Findings) -> bool:
    a, b = first.table.column_names, sheet.table.column_names
    if missing := [name for name in a if name not in b]:
        close = nearest(missing[0], b) if len(b) < 30 else "give all files the same columns."
        findings.problem("columns", f"{sheet.file} has no column '{missing[0]}', which {first.file} has; {close}")
    elif extra := [name for name in b if name not in a]:
        findings.problem("columns", f"{sheet.file} has a column '{extra[0]}', which {first.file} has not; remove it.")
    return not missing


def samples_of(sheets: list[Sheet], layout: str, asked: OwnData, findings: Findings) -> Samples:
    table = Table(sheets, findings)
    label = _label(table, asked)
    client = _named(table, "client", asked.client, CLIENTS) if asked.client != "none" else None
    split = _named(table, "split_column", asked.split_column, ("split",))
    ignored = [_named(table, "ignore", name, ()) for name in asked.ignore]
    if asked.client == "none":
        ignored += [name for name in table.names if name.lower() in CLIENTS]
    special = {label, client, split, *ignored}
    rest = [name for name in table.names if name not in special]
    if not rest:
        raise UserError(f"{sheets[0].file} has no column beside {listed([n for n in table.names if n in special])}.")
    kind, of = _kind(table, rest, asked)

    where = table.where
    named = table.features.get(label, {})
    names = named.get("names") if isinstance(named, dict) and named.get("_type") == "ClassLabel" else None
    _check_scalar(table[label], f"{sheets[0].file}: the label column '{label}'")
    y, classes = classes_of(Coded.of_column(table[label]), where, f"the label '{label}'", findings, names)
    owner: np.ndarray | None = None
    clients: tuple[str, ...] = ()
    if client is not None:
        _check_scalar(table[client], f"{sheets[0].file}: the client column '{client}'")
        owner, clients = clients_of(Coded.of_column(table[client]), where, f"the client '{client}'", findings)
        layout = f"{layout}, column '{client}' says whose a row is"
    elif table.client is not None and asked.client != "none":
        owner, clients = clients_of(Coded.of_array(table.client), where, "the client", findings)
    part = table.split
    if split is not None:
        part = splits_of(Coded.of_column(table[split]), where, f"'{split}'", findings)
    facts: dict[str, Any] = {"client": owner, "clients": clients, "split": part, "layout": layout}
    made = _values(table, rest, kind, of, asked, findings, Samples(kind, y, y, classes, where, **facts))
    return made.checked(f"the label '{label}'", findings)


def _values(
    table: Table, rest: list[str], kind: str, of: str, asked: OwnData, findings: Findings, so_far: Samples
) -> Samples:
    if kind == "table":
        return _numbers(table, rest, asked, findings, so_far)
    if others := [name for name in rest if name != of]:
        findings.remark("ignored", f"Columns beside '{of}' are not used: {listed(others)}.")
    if kind == "image":
        pictures = []
        for i, one in enumerate(table[of].to_pylist()):  # a path beside the bytes is that of another machine
            pictures.append(Picture(f"{so_far.where(i)}: the picture in '{of}'", (one or {}).get("bytes") or b""))
        x, good = stacked(pictures, asked.resize, findings)
        return replace(so_far.kept(good), x=x)
    from fedloom.data.user_data.words import tokens

    column = table[of]
    if not _is_words(column.type):
        raise UserError(f"Column '{of}' holds {column.type}, not text; say which column does with text=NAME.")
    words = column.cast(pa.string()).to_pylist()
    for i, text in enumerate(words):
        if text is None or not text.strip():
            findings.problem(
                "no value", f"{so_far.where(i)}: the text '{of}' is empty; fill it in, or leave the row out."
            )
    x, vocab = tokens([text or "" for text in words], asked.words, asked.length)
    return replace(so_far, x=x, vocab=vocab, columns=(of,))


# -- which column is what


def _label(table: Table, asked: OwnData) -> str:
    found = _named(table, "label", asked.label, LABELS)
    if found is None:
        noted = [
            n for n, about in table.features.items() if isinstance(about, dict) and about.get("_type") == "ClassLabel"
        ]
        if len(noted) == 1 and noted[0] in table.names:
            return noted[0]
        raise UserError(
            f"{table.file} has no column 'label'; say which of {listed(table.names)} is the class with label=NAME."
        )
    return found


def _named(table: Table, setting: str, wanted: str | None, usual: tuple[str, ...]) -> str | None:
    """The column that a setting asks for, or the one that has the usual name."""
    if wanted is None or (wanted == "auto" and setting == "client"):
        return next((name for word in usual for name in table.names if name.lower() == word), None)
    if wanted not in table.names:
        close = nearest(wanted, table.names) if len(table.names) < 30 else f"it has {listed(table.names)}."
        raise UserError(f"{table.file} has no column '{wanted}' ({setting}={wanted}); {close}")
    return wanted


def _kind(table: Table, rest: list[str], asked: OwnData) -> tuple[str, str]:
    """What the samples are, and in which column they are (tables: in all)."""
    pictures = [name for name in rest if _is_picture(table[name].type)]
    texts = [name for name in rest if _is_words(table[name].type)]
    if asked.kind == "image" or (asked.kind == "auto" and pictures):
        if not pictures:
            raise UserError(f"kind=image, but no column of {listed(rest)} holds pictures.")
        return "image", pictures[0]
    if asked.kind == "sequence":
        raise UserError("kind=sequence needs arrays (.npz with x of shape samples, steps, values), not a table.")
    named = _named(table, "text", asked.text, ("text",))
    if asked.kind == "text" or asked.text is not None:
        if named is None and len(texts) != 1:
            raise UserError(
                f"kind=text, but it is not clear which column is the text; say so with text=NAME ({listed(texts)})."
            )
        return "text", named or texts[0]
    if asked.kind == "auto" and named in texts and not _mostly_numbers(table[str(named)]):
        return "text", str(named)
    if asked.kind == "auto" and rest == texts and len(rest) == 1 and _wordy(table[rest[0]]):
        return "text", rest[0]
    return "table", ""


def _wordy(column: pa.ChunkedArray) -> bool:
    return pc.count_distinct(column).as_py() > min(CATEGORIES, len(column) // 2) and not _mostly_numbers(column)


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind)


def _is_words(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_words(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_picture(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}


def _check_scalar(column: pa.ChunkedArray, what: str) -> None:
    if pa.types.is_nested(column.type):
        raise UserError(f"{what} holds {column.type}, not one value per row.")


# -- numbers


def _numbers(table: Table, rest: list[str], asked: OwnData, findings: Findings, so_far: Samples) -> Samples:
    """A matrix: numbers as they are, words as a column for each of them."""
    parts: list[np.ndarray] = []
    names: list[str] = []
    measured: list[bool] = []
    gone = np.zeros(len(table.where), dtype=bool)
    for name in rest:
        made = _column(name, table[name], table.where, findings)
        if made is None:
            continue
        values, words = made
        missing = np.isnan(values).any(1) if words is None else values[:, 0] < 0
        if missing.any():
            gone |= missing
            _missing(name, missing, table.where, asked.missing, findings)
        if words is None:
            if asked.missing == "zero":
                values = np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
            names.append(name)
        else:
            values = (values == np.arange(len(words))).astype(np.float64)
            names += [f"{name}={short(word)}" for word in words]
        parts.append(values)
        measured += [words is None] * values.shape[1]
    if not parts:
        raise UserError("No column is left that could be used.")
    x = np.concatenate(parts, axis=1)
    scaling = Scaling(np.array(measured), standardise=asked.normalise, fill=asked.missing == "mean")
    made_ = replace(so_far, x=x if asked.normalise or scaling.fill else x.astype(np.float32), columns=tuple(names))
    made_ = replace(made_, scaling=scaling if asked.normalise or scaling.fill else None)
    if asked.missing == "drop" and gone.any():
        findings.remark("dropped", f"{many(int(gone.sum()), 'row')} with missing values are left out (missing=drop).")
        made_ = made_.kept(~gone)
    return made_


def _missing(name: str, missing: np.ndarray, where: Origin, how: str, findings: Findings) -> None:
    count, first = many(int(missing.sum()), "row"), where(int(missing.argmax()))
    if how == "refuse":
        findings.problem(
            "missing", f"Column '{name}' has no value in {count}, first in {first}; fill in what is missing, or set "
            "missing=mean, zero or drop."
        )  # fmt: skip
    else:
        findings.remark("missing", f"Column '{name}' has no value in {count}, first in {first} (missing={how}).")


def _column(
    name: str, column: pa.ChunkedArray, where: Origin, findings: Findings
) -> tuple[np.ndarray, list[str] | None] | None:
    """Numbers, or which word it is (-1: none) and the words."""
    kind = column.type
    hint = f"leave it out with ignore={name}"
    if pa.types.is_null(kind):
        column = column.cast(pa.float64())
    elif not _is_number(kind) and not _is_words(kind):
        what = "is nested" if pa.types.is_nested(kind) else "holds neither numbers nor words"
        findings.problem("column", f"{where(0).rpartition(', row')[0]}: column '{name}' {what} ({kind}); {hint}.")
        return None
    if _is_words(column.type):
        return _words(name, column, where, findings, hint)
    values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    return _finite(name, values, where, findings, whole=pa.types.is_integer(kind))[:, None], None


def _words(
    name: str, column: pa.ChunkedArray, where: Origin, findings: Findings, hint: str
) -> tuple[np.ndarray, list[str] | None] | None:
    quick = _parsed(column)
    if quick is not None:
        whole = bool((quick[np.isfinite(quick)] % 1 == 0).all())
        return _finite(name, quick, where, findings, whole)[:, None], None
    coded = Coded.of_column(column)
    words = ["" if word is None or word.strip().lower() in EMPTY else word.strip() for word in coded.values]
    numbers = [_number(word) for word in words]
    share = np.bincount(coded.codes[coded.codes >= 0], minlength=len(words))
    is_number = np.array([number is not None for number in numbers], dtype=bool)
    filled = np.array([bool(word) for word in words], dtype=bool)
    if not filled.any() or share[is_number].sum() * 2 >= share[filled].sum():
        wrong = np.flatnonzero(filled & ~is_number)
        if len(wrong):
            rows = np.flatnonzero(np.isin(coded.codes, wrong))
            value = short(words[coded.codes[rows[0]]])
            more = f" ({many(len(rows), 'such row')})" if len(rows) > 1 else ""
            findings.problem(
                "no number",
                f"{where(int(rows[0]))}: column '{name}' has '{value}' where others have numbers{more}; correct it, or "
                f"{hint}.",
            )
        table = np.array([np.nan if number is None else number for number in numbers] + [np.nan])
        whole = all(word.lstrip("+-").isdigit() for word in words if word)
        values = table[coded.codes]
        if len(wrong):  # complained of already
            values[rows] = 0.0
        return _finite(name, values, where, findings, whole)[:, None], None
    order = sorted({word for word in words if word})
    if len(order) > CATEGORIES:
        findings.problem(
            "words",
            f"Column '{name}' has {len(order)} different words, such as '{short(order[0])}', too many for a category; "
            f"{hint}, or set text={name} if it is what should be classified.",
        )
        return None
    place = {word: at for at, word in enumerate(order)}
    return coded.mapped([place.get(word, -1) for word in words])[:, None].astype(np.float64), order


def _parsed(column: pa.ChunkedArray) -> np.ndarray | None:
    """Numbers with NaN where there are none; None unless all words are numbers."""
    plain = pc.utf8_trim_whitespace(column.cast(pa.string()))
    plain = pc.if_else(pc.is_in(pc.utf8_lower(plain), pa.array(EMPTY)), None, plain)
    try:
        return plain.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    except pa.ArrowInvalid:
        return None


def _number(word: str) -> float | None:
    if not word or "_" in word:  # Python reads 1_000 as a number
        return None
    try:
        return float(word)
    except ValueError:
        return None


def _mostly_numbers(column: pa.ChunkedArray) -> bool:
    words = [w for w in Coded.of_column(column).values if w is not None and w.strip().lower() not in EMPTY]
    return sum(_number(word.strip()) is not None for word in words) * 2 >= len(words)


def _finite(name: str, values: np.ndarray, where: Origin, findings: Findings, whole: bool) -> np.ndarray:
    with np.errstate(over="ignore"):
        infinite = np.isinf(values.astype(np.float32))
    if infinite.any():
        first = where(int(infinite.argmax()))
        findings.problem(
            "infinite",
            f"{first}: column '{name}' has {values[infinite][0]:g}, which is too large or not finite; correct it.",
        )
        values = np.where(infinite, 0.0, values)
    here = values[~np.isnan(values)]
    if len(here) > 1 and (here == here[0]).all():
        findings.remark("constant", f"Column '{name}' is {here[0]:g} everywhere, so nothing can be learnt from it.")
    elif whole and len(here) > MANY and len(np.unique(here)) == len(values):
        findings.remark(
            "id", f"Column '{name}' is different in every row, like an id; leave it out with ignore={name}."
        )
    return values


MANY = 20  # rows from which on a column of different whole numbers looks like an id
