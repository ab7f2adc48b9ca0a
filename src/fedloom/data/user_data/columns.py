"""Samples from tables: finds the columns of the label, the client and the split, and encodes the others as numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedloom.core.errors import UserError, nearest, plural
from fedloom.core.federation import Scaling
from fedloom.data.user_data.categorical import Categorical, encode_classes, encode_clients, encode_splits
from fedloom.data.user_data.images import ImageSource, load_images
from fedloom.data.user_data.issues import Issues, Origin, join_names, shorten
from fedloom.data.user_data.leaks import MAX_SHOWN, LeakDetector, report_leaks
from fedloom.data.user_data.samples import Samples
from fedloom.data.user_data.tables import Sheet

if TYPE_CHECKING:
    from fedloom.data.sets.own import OwnData

LABEL_NAMES = ("label", "labels", "target", "class", "y")
CLIENT_NAMES = ("client", "client_id")
MISSING = ("", "na", "n/a", "#n/a", "nan", "-nan", "null", "none", "?")  # cells without a value
MAX_CATEGORIES = 50  # a column with more different words is not categorical
MANY_ROWS = 20  # with more rows, a column of different whole numbers looks like an id
DECIMAL_COMMA = re.compile(r"[+-]?\d+(\.\d{3})*,\d+")  # 3,14 or 1.234,5


class Table:
    """The tables of several files as one: `table[name]` is a column. `client` and `split` have a value for every row if
    they follow from the files' paths."""

    def __init__(self, sheets: list[Sheet], issues: Issues) -> None:
        first = sheets[0]
        sheets = [sheet for sheet in sheets if _same_columns(first, sheet, issues)]
        self.file, self.names = first.file, first.table.column_names
        self.features = first.features
        self.where = Origin()
        for sheet in sheets:
            self.where.add(sheet.file, sheet.rows, sheet.table.num_rows)
        self._tables = [sheet.table for sheet in sheets]
        sizes = [sheet.table.num_rows for sheet in sheets]
        self.client = _repeat([sheet.client for sheet in sheets], sizes)
        self.split = _repeat([sheet.split for sheet in sheets], sizes)

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        columns = [table[name] for table in self._tables]
        if len(columns) == 1:
            return columns[0]
        types = {column.type for column in columns}
        if len(types) > 1:  # numbers in one file and text in another: as text, from which numbers are parsed later
            common = pa.float64() if all(_is_number(t) for t in types) else pa.string()
            try:
                columns = [column.cast(common) for column in columns]
            except pa.ArrowException:
                kinds = join_names(sorted(str(kind) for kind in types))
                raise UserError(f"Column '{name}' differs in its type between files ({kinds}); give it one.") from None
        return pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)


def _repeat(values: list[str | None], sizes: list[int]) -> np.ndarray | None:
    """values[i] repeated sizes[i] times; None if there are no values."""
    if all(value is None for value in values):
        return None
    return np.repeat(np.array([value or "" for value in values]), sizes)


def _same_columns(first: Sheet, sheet: Sheet, issues: Issues) -> bool:
    """Whether a table has all columns of the first; differences are reported."""
    known = set(sheet.table.column_names)
    a, b = first.table.column_names, sheet.table.column_names
    if missing := [name for name in a if name not in known]:
        hint = nearest(missing[0], b) if len(b) < 30 else "give all files the same columns."
        issues.problem("columns", f"{sheet.file} has no column '{missing[0]}', which {first.file} has; {hint}")
    elif extra := sorted(known.difference(a)):
        issues.problem("columns", f"{sheet.file} has a column '{extra[0]}', which {first.file} has not; remove it.")
    return not missing


def samples_from_tables(sheets: list[Sheet], layout: str, options: OwnData, issues: Issues) -> Samples:
    """Samples from the rows of tables.

    Args:
        sheets: the tables, which must have the same columns.
        layout: description of the files, for the user.
        options: the user's settings, such as the names of columns.
        issues: where problems are reported.
    """
    table = Table(sheets, issues)
    label = _label_column(table, options)
    client = _find_column(table, "client", options.client, CLIENT_NAMES) if options.client != "none" else None
    split = _find_column(table, "split_column", options.split_column, ("split",))
    ignored = [_find_column(table, "ignore", name, ()) for name in options.ignore]
    if options.client == "none":
        ignored += [name for name in table.names if name.lower() in CLIENT_NAMES]
    roles = {label, client, split, *ignored}
    features = [name for name in table.names if name not in roles]
    if not features:
        raise UserError(f"{sheets[0].file} has no column beside {join_names([n for n in table.names if n in roles])}.")
    kind, column_name = _kind(table, features, options)

    where = table.where
    about = table.features.get(label, {})
    names = about.get("names") if isinstance(about, dict) and about.get("_type") == "ClassLabel" else None
    _check_scalar(table[label], f"{sheets[0].file}: the label column '{label}'")
    y, classes = encode_classes(Categorical.from_column(table[label]), where, f"the label '{label}'", issues, names)
    client_index: np.ndarray | None = None
    clients: tuple[str, ...] = ()
    if client is not None:
        _check_scalar(table[client], f"{sheets[0].file}: the client column '{client}'")
        coded = Categorical.from_column(table[client])
        client_index, clients = encode_clients(coded, where, f"the client '{client}'", issues)
        layout = f"{layout}, column '{client}' says whose a row is"
    elif table.client is not None and options.client != "none":
        client_index, clients = encode_clients(Categorical.from_array(table.client), where, "the client", issues)
    split_names = table.split
    if split is not None:
        _check_scalar(table[split], f"{sheets[0].file}: the column '{split}'")
        split_names = encode_splits(Categorical.from_column(table[split]), where, f"'{split}'", issues)
    samples = Samples(kind, y, y, classes, where, layout, client=client_index, clients=clients, split=split_names)
    samples = _add_features(table, features, kind, column_name, options, issues, samples)
    return samples.usable(f"the label '{label}'", issues)


def _add_features(
    table: Table, features: list[str], kind: str, name: str, options: OwnData, issues: Issues, samples: Samples
) -> Samples:
    """The samples with x: from all feature columns of a table, or from the column `name` of images or texts."""
    if kind == "table":
        return _numeric_features(table, features, options, issues, samples)
    if others := [other for other in features if other != name]:
        issues.remark("ignored", f"Columns beside '{name}' are not used: {join_names(others)}.")
    column = table[name]
    if kind == "image":
        images = []
        for i, cell in enumerate(column.to_pylist()):  # a path beside the bytes is that of another machine
            images.append(ImageSource(f"{samples.where(i)}: the picture in '{name}'", (cell or {}).get("bytes") or b""))
        x, readable = load_images(images, options.resize, issues)
        return replace(samples.select(readable), x=x)
    from fedloom.data.user_data.tokenization import token_ids

    if not _is_text(column.type):
        raise UserError(f"Column '{name}' holds {column.type}, not text; say which column does with text=NAME.")
    texts = column.cast(pa.string()).to_pylist()
    for i, text in enumerate(texts):
        if text is None or not text.strip():
            issues.problem(
                "no value", f"{samples.where(i)}: the text '{name}' is empty; fill it in, or leave the row out."
            )
    x, vocab = token_ids([text or "" for text in texts], options.words, options.length)
    return replace(samples, x=x, vocab=vocab, columns=(name,))


# -- roles and kinds of columns


def _label_column(table: Table, options: OwnData) -> str:
    """The column of the label: the one that is set, one with a common name, or Hugging Face's only ClassLabel."""
    name = _find_column(table, "label", options.label, LABEL_NAMES)
    if name is None:
        class_labels = [
            n for n, about in table.features.items() if isinstance(about, dict) and about.get("_type") == "ClassLabel"
        ]
        if len(class_labels) == 1 and class_labels[0] in table.names:
            return class_labels[0]
        raise UserError(
            f"{table.file} has no column 'label'; say which of {join_names(table.names)} is the class with label=NAME."
        )
    return name


def _find_column(table: Table, setting: str, value: str | None, defaults: tuple[str, ...]) -> str | None:
    """The column that a setting's value names; without a value, the first one with a default name, if there is any."""
    if value is None or (value == "auto" and setting == "client"):
        return next((name for default in defaults for name in table.names if name.lower() == default), None)
    if value not in table.names:
        hint = nearest(value, table.names) if len(table.names) < 30 else f"it has {join_names(table.names)}."
        raise UserError(f"{table.file} has no column '{value}' ({setting}={value}); {hint}")
    return value


def _kind(table: Table, features: list[str], options: OwnData) -> tuple[str, str]:
    """The kind of the samples, and the column that holds them ("" for tables, which use all columns)."""
    types = {name: table[name].type for name in features}
    images = [name for name, kind in types.items() if _is_image(kind)]
    texts = [name for name, kind in types.items() if _is_text(kind)]
    if options.kind == "image" or (options.kind == "auto" and images):
        if not images:
            raise UserError(f"kind=image, but no column of {join_names(features)} holds pictures.")
        return "image", images[0]
    if options.kind == "sequence":
        raise UserError("kind=sequence needs arrays (.npz with x of shape samples, steps, values), not a table.")
    column = _find_column(table, "text", options.text, ("text",))
    if options.kind == "text" or options.text is not None:
        if column is None and len(texts) != 1:
            raise UserError(
                f"kind=text, but it is not clear which column is the text; say so with text=NAME ({join_names(texts)})."
            )
        return "text", column or texts[0]
    if options.kind == "auto" and column in texts and not _mostly_numbers(table[str(column)]):
        return "text", str(column)
    if options.kind == "auto" and features == texts and len(features) == 1 and _is_free_text(table[features[0]]):
        return "text", features[0]
    return "table", ""


def _is_free_text(column: pa.ChunkedArray) -> bool:
    """Whether a column of text has too many different values to be categorical, and not mostly numbers."""
    different = len(Categorical.from_column(column).categories)
    return different > min(MAX_CATEGORIES, len(column) // 2) and not _mostly_numbers(column)


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_image(kind: pa.DataType) -> bool:
    """Whether a column has the type of Hugging Face's images."""
    return pa.types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}


def _check_scalar(column: pa.ChunkedArray, what: str) -> None:
    if pa.types.is_nested(column.type):
        raise UserError(f"{what} holds {column.type}, not one value per row.")


# -- numbers


def _numeric_features(table: Table, features: list[str], options: OwnData, issues: Issues, samples: Samples) -> Samples:
    """The samples with a matrix x: numbers as they are, categorical columns one-hot encoded."""
    parts: list[np.ndarray] = []
    names: list[str] = []
    numeric: list[bool] = []
    incomplete = np.zeros(len(table.where), dtype=bool)
    leaks: list[str] = []
    detector = LeakDetector(samples.y, len(features))
    for name in features:
        encoded = _encode_column(name, table[name], table.where, issues)
        if encoded is None:
            continue
        values, words = encoded
        if detector.determines(values[:, 0]):
            leaks.append(name)
        missing = np.isnan(values).any(1) if words is None else values[:, 0] < 0
        if missing.any():
            incomplete |= missing
            _report_missing(name, missing, table.where, options.missing, issues)
        if words is None:
            if options.missing == "zero":
                values = np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
            names.append(name)
        else:
            values = (values == np.arange(len(words))).astype(np.float64)
            names += [f"{name}={shorten(word)}" for word in words]
        parts.append(values)
        numeric += [words is None] * values.shape[1]
    report_leaks(leaks, f"with --set ignore={','.join(leaks[:MAX_SHOWN])}", issues)
    if not parts:
        raise UserError("No column is left that could be used.")
    x = np.concatenate(parts, axis=1)
    scaling = Scaling(np.array(numeric), standardise=options.normalise, fill=options.missing == "mean")
    scaled = options.normalise or scaling.fill
    samples = replace(samples, x=x if scaled else x.astype(np.float32), columns=tuple(names))
    samples = replace(samples, scaling=scaling if scaled else None)
    if options.missing == "drop" and incomplete.any():
        count = plural(int(incomplete.sum()), "row")
        issues.remark("dropped", f"{count} with missing values are left out (missing=drop).")
        samples = samples.select(~incomplete)
    return samples


def _report_missing(name: str, missing: np.ndarray, where: Origin, policy: str, issues: Issues) -> None:
    """Report missing values of a column: a problem if the setting `missing` is "refuse", otherwise a remark."""
    count, first = plural(int(missing.sum()), "row"), where(int(missing.argmax()))
    if policy == "refuse":
        issues.problem(
            "missing", f"Column '{name}' has no value in {count}, first in {first}; fill in what is missing, or set "
            "missing=mean, zero or drop."
        )  # fmt: skip
    else:
        issues.remark("missing", f"Column '{name}' has no value in {count}, first in {first} (missing={policy}).")


def _encode_column(
    name: str, column: pa.ChunkedArray, where: Origin, issues: Issues
) -> tuple[np.ndarray, list[str] | None] | None:
    """The numbers of a column and None, or category indices (-1 for none) and the categories, as [rows, 1]; None if the
    column cannot be used."""
    kind = column.type
    hint = f"leave it out with ignore={name}"
    if pa.types.is_null(kind):
        column = column.cast(pa.float64())
    elif not _is_number(kind) and not _is_text(kind):
        what = "is nested" if pa.types.is_nested(kind) else "holds neither numbers nor words"
        issues.problem("column", f"{where(0).rpartition(', row')[0]}: column '{name}' {what} ({kind}); {hint}.")
        return None
    if _is_text(column.type):
        return _encode_text(name, column, where, issues, hint)
    values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    return _check_finite(name, values, where, issues, whole=pa.types.is_integer(kind))[:, None], None


def _encode_text(
    name: str, column: pa.ChunkedArray, where: Origin, issues: Issues, hint: str
) -> tuple[np.ndarray, list[str] | None] | None:
    """`_encode_column` for a column of text: numbers if at least half of its values are, otherwise categories."""
    parsed = _parse_numbers(column)
    if parsed is not None:
        whole = bool((parsed[np.isfinite(parsed)] % 1 == 0).all())
        return _check_finite(name, parsed, where, issues, whole)[:, None], None
    coded = Categorical.from_column(column)
    words = ["" if word is None or word.strip().lower() in MISSING else word.strip() for word in coded.categories]
    numbers = [_number(word) for word in words]
    counts = np.bincount(coded.codes[coded.codes >= 0], minlength=len(words))
    is_number = np.array([number is not None for number in numbers], dtype=bool)
    present = np.array([bool(word) for word in words], dtype=bool)
    if not present.any() or counts[is_number].sum() * 2 >= counts[present].sum():
        others = np.flatnonzero(present & ~is_number)
        if len(others):
            rows = np.flatnonzero(np.isin(coded.codes, others))
            value = shorten(words[coded.codes[rows[0]]])
            correction = "write a point instead of the comma" if DECIMAL_COMMA.fullmatch(value) else "correct it"
            more = f" ({plural(len(rows), 'such row')})" if len(rows) > 1 else ""
            issues.problem(
                "no number",
                f"{where(int(rows[0]))}: column '{name}' has '{value}' where others have numbers{more}; "
                f"{correction}, or {hint}.",
            )
        table = np.array([np.nan if number is None else number for number in numbers] + [np.nan])
        whole = all(word.lstrip("+-").isdigit() for word in words if word)
        values = table[coded.codes]
        if len(others):  # reported already
            values[rows] = 0.0
        return _check_finite(name, values, where, issues, whole)[:, None], None
    ordered = sorted({word for word in words if word})
    with_comma = [word for word in ordered if DECIMAL_COMMA.fullmatch(word)]
    if len(with_comma) * 2 > len(ordered):
        report = issues.problem if len(ordered) > MAX_CATEGORIES else issues.warn
        report(
            "comma",
            f"Column '{name}' is read as words, but '{shorten(with_comma[0])}' and others look like numbers with a "
            "decimal comma; write them with a point (3.14).",
        )
    elif len(ordered) > MAX_CATEGORIES:
        issues.problem(
            "words",
            f"Column '{name}' has {len(ordered)} different words, such as '{shorten(ordered[0])}', too many for a "
            f"category; {hint}, or set text={name} if it is what should be classified.",
        )
    if len(ordered) > MAX_CATEGORIES:
        return None
    index = {word: i for i, word in enumerate(ordered)}
    return coded.map_categories([index.get(word, -1) for word in words])[:, None].astype(np.float64), ordered


def _parse_numbers(column: pa.ChunkedArray) -> np.ndarray | None:
    """A column of text as numbers, NaN for missing values; None unless all other values are numbers."""
    try:  # fast, and enough for most columns
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    except pa.ArrowException:
        pass
    plain = pc.utf8_trim_whitespace(column.cast(pa.string()))
    plain = pc.if_else(pc.is_in(pc.utf8_lower(plain), pa.array(MISSING)), None, plain)
    try:
        return plain.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    except pa.ArrowInvalid:
        return None


def _number(word: str) -> float | None:
    """A word as a number; None if it is none."""
    if not word or "_" in word:  # Python reads 1_000 as a number
        return None
    try:
        return float(word)
    except ValueError:
        return None


def _mostly_numbers(column: pa.ChunkedArray) -> bool:
    """Whether at least half of the different values of a column of text are numbers, with a point or a comma."""
    words = [
        w for w in Categorical.from_column(column).categories if w is not None and w.strip().lower() not in MISSING
    ]
    numbers = [word for word in words if _number(word.strip()) is not None or DECIMAL_COMMA.fullmatch(word.strip())]
    return len(numbers) * 2 >= len(words)


def _check_finite(name: str, values: np.ndarray, where: Origin, issues: Issues, whole: bool) -> np.ndarray:
    """The values, with 0 for infinite ones, which are reported. Remarks on columns that are constant or, if all numbers
    are `whole`, look like an id."""
    with np.errstate(over="ignore"):
        infinite = np.isinf(values.astype(np.float32))
    if infinite.any():
        first = where(int(infinite.argmax()))
        issues.problem(
            "infinite",
            f"{first}: column '{name}' has {values[infinite][0]:g}, which is too large or not finite; correct it.",
        )
        values = np.where(infinite, 0.0, values)
    known = values[~np.isnan(values)]
    if len(known) > 1 and (known == known[0]).all():
        issues.remark("constant", f"Column '{name}' is {known[0]:g} everywhere, so nothing can be learnt from it.")
    elif whole and len(known) > MANY_ROWS and len(np.unique(known)) == len(values):
        issues.remark("id", f"Column '{name}' is different in every row, like an id; leave it out with ignore={name}.")
    return values
