"""Samples from tables: finds the columns of the label, the client and the split, and encodes the others as numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from fedloom.core.errors import UserError, nearest, plural
from fedloom.core.federation import Scaling
from fedloom.core.preprocessing import Column, Preprocessing
from fedloom.data.text import TOKENIZERS, encode_tokens, text_preprocessing
from fedloom.data.user_data.categorical import Categorical, encode_clients, encode_splits
from fedloom.data.user_data.cells import (
    MAX_CATEGORIES,
    Cells,
    check_scalar,
    encode_column,
    fit_column,
    is_number_type,
    is_text_type,
    mostly_numbers,
    one_hot,
)
from fedloom.data.user_data.images import ImageSource, load_images
from fedloom.data.user_data.issues import Issues, Origin, join_names
from fedloom.data.user_data.leaks import MAX_SHOWN, leak_detector, report_leaks
from fedloom.data.user_data.samples import Samples, array_preprocessing
from fedloom.data.user_data.tables import Sheet, class_names
from fedloom.data.user_data.targets import Target, read_target
from fedloom.data.user_data.tokenization import fit_vocabulary

if TYPE_CHECKING:
    from fedloom.data.sets.own import OwnData

LABEL_NAMES = ("label", "labels", "target", "class", "y")
CLIENT_NAMES = ("client", "client_id")
MANY_ROWS = 20  # with more rows, a column of different whole numbers looks like an id


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
            common = pa.float64() if all(is_number_type(t) for t in types) else pa.string()
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
    labels = _label_columns(table, options)
    client = _find_column(table, "client", options.client, CLIENT_NAMES) if options.client != "none" else None
    split = _find_column(table, "split_column", options.split_column, ("split",))
    ignored = [_find_column(table, "ignore", name, ()) for name in options.ignore]
    if options.client == "none":
        ignored += [name for name in table.names if name.lower() in CLIENT_NAMES]
    roles = {*labels, client, split, *ignored}
    features = [name for name in table.names if name not in roles]
    if not features:
        raise UserError(f"{sheets[0].file} has no column beside {join_names([n for n in table.names if n in roles])}.")
    kind, column_name = _kind(table, features, options)

    where = table.where
    target = read_target({name: table[name] for name in labels}, table.features, where, options.target, issues)
    client_index: np.ndarray | None = None
    clients: tuple[str, ...] = ()
    if client is not None:
        check_scalar(table[client], f"{sheets[0].file}: the client column '{client}'")
        coded = Categorical.from_column(table[client])
        client_index, clients = encode_clients(coded, where, f"the client '{client}'", issues)
        layout = f"{layout}, column '{client}' says whose a row is"
    elif table.client is not None and options.client != "none":
        client_index, clients = encode_clients(Categorical.from_array(table.client), where, "the client", issues)
    split_names = table.split
    if split is not None:
        check_scalar(table[split], f"{sheets[0].file}: the column '{split}'")
        split_names = encode_splits(Categorical.from_column(table[split]), where, f"'{split}'", issues)
    encoded = _encode_features(table, features, kind, column_name, target, options, issues)
    preprocessing = replace(
        encoded.preprocessing, target=target.kind, label=labels[0] if len(labels) == 1 else None, client=client,
        split=split,
    )  # fmt: skip
    samples = Samples(
        kind, encoded.x, target.y, target.names, where, preprocessing, layout, client=client_index, clients=clients,
        split=split_names, scaling=encoded.scaling, target=target.kind,
    )  # fmt: skip
    return samples.select(encoded.used).usable(f"the label '{labels[0]}'", issues)


class Encoded(NamedTuple):
    """The features of all rows, and how they were made."""

    x: np.ndarray
    used: np.ndarray  # False for rows that are left out
    preprocessing: Preprocessing
    scaling: Scaling | None = None


def _encode_features(
    table: Table,
    features: list[str],
    kind: str,
    name: str,
    target: Target,
    options: OwnData,
    issues: Issues,
) -> Encoded:
    """The features of a table: all of its feature columns, or the column `name` of images or texts."""
    if kind == "table":
        return _encode_columns(table, features, target, options, issues)
    if others := [other for other in features if other != name]:
        issues.remark("ignored", f"Columns beside '{name}' are not used: {join_names(others)}.")
    if kind == "image":
        x, readable = load_images(images_in_column(table, name), options.resize, issues)
        preprocessing = replace(array_preprocessing(x, target.names), resize=options.resize is not None, content=name)
        return Encoded(x, readable, preprocessing)
    tokens = [TOKENIZERS["basic_english"](text) for text in texts_in_column(table, name, issues)]
    vocabulary = fit_vocabulary(tokens, options.words, options.length)
    preprocessing = replace(text_preprocessing(vocabulary, target.names), content=name)
    return Encoded(encode_tokens(tokens, vocabulary), np.ones(len(tokens), dtype=bool), preprocessing)


def images_in_column(table: Table, name: str) -> list[ImageSource]:
    """The images of a column of Hugging Face's type for them. A path beside the bytes is that of another machine."""
    return [
        ImageSource(f"{table.where(i)}: the picture in '{name}'", (cell or {}).get("bytes") or b"")
        for i, cell in enumerate(table[name].to_pylist())
    ]


def texts_in_column(table: Table, name: str, issues: Issues) -> list[str]:
    """The texts of a column; empty ones are reported."""
    column = table[name]
    if not is_text_type(column.type):
        raise UserError(f"Column '{name}' holds {column.type}, not text; say which column does with text=NAME.")
    texts = [text or "" for text in column.cast(pa.string()).to_pylist()]
    report_empty(texts, table.where, f"the text '{name}'", issues)
    return texts


def report_empty(texts: list[str], where: Origin, what: str, issues: Issues) -> None:
    """Report texts that are empty; `what` is what a text is called."""
    for i, text in enumerate(texts):
        if not text.strip():
            issues.problem("no value", f"{where(i)}: {what} is empty; fill it in, or leave the row out.")


# -- roles and kinds of columns


def _label_columns(table: Table, options: OwnData) -> list[str]:
    """The columns of the target: those that are set, one with a common name, or Hugging Face's only ClassLabel."""
    asked = options.label
    if asked is not None and asked not in table.names and "," in asked:
        parts = dict.fromkeys(part.strip() for part in asked.split(",") if part.strip())
        return [str(_find_column(table, "label", part, ())) for part in parts]
    name = _find_column(table, "label", asked, LABEL_NAMES)
    if name is None:
        class_labels = [n for n, about in table.features.items() if class_names(about) is not None]
        if len(class_labels) == 1 and class_labels[0] in table.names:
            return class_labels
        raise UserError(
            f"{table.file} has no column 'label'; say which of {join_names(table.names)} is predicted with label=NAME."
        )
    return [name]


def _find_column(table: Table, setting: str, value: str | None, defaults: tuple[str, ...]) -> str | None:
    """The column that a setting's value names; without a value, the first one with a default name, if there is any."""
    if value is None or (value == "auto" and setting == "client"):
        return next((name for default in defaults for name in table.names if name.lower() == default), None)
    if value not in table.names:
        raise UserError(
            f"{table.file} has no column '{value}' ({setting}={value}); {similar_column(value, table.names)}"
        )
    return value


def similar_column(name: str, names: list[str]) -> str:
    """The end of a message about a column that a table does not have: which one may be meant."""
    return nearest(name, names) if len(names) < 30 else f"it has {join_names(names)}."


def _kind(table: Table, features: list[str], options: OwnData) -> tuple[str, str]:
    """The kind of the samples, and the column that holds them ("" for tables, which use all columns)."""
    types = {name: table[name].type for name in features}
    images = [name for name, kind in types.items() if is_image_type(kind)]
    texts = [name for name, kind in types.items() if is_text_type(kind)]
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
    if options.kind == "auto" and column in texts and not mostly_numbers(table[str(column)]):
        return "text", str(column)
    if options.kind == "auto" and features == texts and len(features) == 1 and _is_free_text(table[features[0]]):
        return "text", features[0]
    return "table", ""


def _is_free_text(column: pa.ChunkedArray) -> bool:
    """Whether a column of text has too many different values to be categorical, and not mostly numbers."""
    different = len(Categorical.from_column(column).categories)
    return different > min(MAX_CATEGORIES, len(column) // 2) and not mostly_numbers(column)


def is_image_type(kind: pa.DataType) -> bool:
    """Whether a column has the type of Hugging Face's images."""
    return pa.types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}


# -- numbers


def _encode_columns(table: Table, features: list[str], target: Target, options: OwnData, issues: Issues) -> Encoded:
    """A matrix of the feature columns: numbers as they are, categorical columns one-hot encoded."""
    parts: list[np.ndarray] = []
    columns: list[Column] = []
    incomplete = np.zeros(len(table.where), dtype=bool)
    leaks: list[str] = []
    detector = leak_detector(target, len(features))
    for name in features:
        cells, remedy = Cells(name, table[name], table.where), f"leave it out with ignore={name}"
        column = fit_column(cells, issues, remedy) if cells.readable(issues, remedy) else None
        if column is None:
            continue
        values = encode_column(cells, column, issues, remedy)
        if column.words is None:
            _remark_on_numbers(name, values, cells.whole, issues)
        if detector.determines(values):
            leaks.append(name)
        missing = np.isnan(values) if column.words is None else values < 0
        if missing.any():
            incomplete |= missing
            _report_missing(name, missing, table.where, options.missing, issues)
        if column.words is None and options.missing == "zero":
            values = np.where(missing, 0.0, values)
        columns.append(column)
        parts.append(one_hot(values, column))
    report_leaks(leaks, target.kind, f"with --set ignore={','.join(leaks[:MAX_SHOWN])}", issues)
    if not parts:
        raise UserError("No column is left that could be used.")
    x = np.concatenate(parts, axis=1)
    numeric = np.repeat([column.words is None for column in columns], [part.shape[1] for part in parts])
    scaling = Scaling(numeric, standardise=options.normalise, fill="zero" if options.missing == "zero" else "mean")
    if not options.normalise and options.missing != "mean":  # then numbers are what they are
        x = x.astype(np.float32)
    if options.missing == "drop" and incomplete.any():
        count = plural(int(incomplete.sum()), "row")
        issues.remark("dropped", f"{count} with missing values are left out (missing=drop).")
    used = ~incomplete if options.missing == "drop" else np.ones(len(x), dtype=bool)
    dtype: Literal["float32", "float64"] = "float32" if x.dtype == np.float32 else "float64"
    preprocessing = Preprocessing(
        "table", x.shape[1:], dtype, target.names, columns=tuple(columns), missing=options.missing
    )
    return Encoded(x, used, preprocessing, scaling)


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


def _remark_on_numbers(name: str, values: np.ndarray, whole: bool, issues: Issues) -> None:
    """Remark on a column of numbers that is constant or, if all of them are `whole`, looks like an id."""
    known = values[~np.isnan(values)]
    if len(known) > 1 and (known == known[0]).all():
        issues.remark("constant", f"Column '{name}' is {known[0]:g} everywhere, so nothing can be learnt from it.")
    elif whole and len(known) > MANY_ROWS and len(np.unique(known)) == len(values):
        issues.remark("id", f"Column '{name}' is different in every row, like an id; leave it out with ignore={name}.")
