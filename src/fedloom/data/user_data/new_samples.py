"""New samples for a trained model, from values in Python or from files, encoded as its training data were."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from torch import Tensor

from fedloom.core.errors import UserError, plural
from fedloom.core.preprocessing import Column, Preprocessing
from fedloom.data.limits import require_file
from fedloom.data.text import TOKENIZERS, encode_tokens, read_text
from fedloom.data.user_data.arrays import channels_last, finite_numbers, read_arrays
from fedloom.data.user_data.categorical import Categorical, class_indices, client_names, match_classes
from fedloom.data.user_data.cells import Cells, encode_column, is_text_type, one_hot
from fedloom.data.user_data.columns import (
    CLIENT_NAMES,
    LABEL_NAMES,
    Table,
    check_scalar,
    images_in_column,
    is_image_type,
    report_empty,
    similar_column,
    texts_in_column,
)
from fedloom.data.user_data.images import ImageSource, decode_images, read_header
from fedloom.data.user_data.issues import Issues, Origin, SampleOrigin, join_names, shorten
from fedloom.data.user_data.layout import File, Layout, detect_layout, short_path
from fedloom.data.user_data.tables import Sheet, make_sheet, read_huggingface, read_table

log = logging.getLogger("fedloom")

NOUNS = {"table": "rows of a table", "image": "pictures", "text": "texts", "array": "arrays of numbers"}


@dataclass(frozen=True, eq=False)
class NewSamples:
    """New samples from files, and what the files say about them."""

    x: np.ndarray  # encoded, before they are scaled
    y: np.ndarray | None  # index of the class, -1 if it is unknown; None if the files name no classes
    client: np.ndarray | None  # name of the client, "" if it is unknown; None if the files name no clients
    where: Origin  # file and row of every sample
    warnings: tuple[str, ...]  # sentences about what is probably a mistake
    remarks: tuple[str, ...]  # sentences about what is worth knowing; warnings are among them


def encode(preprocessing: Preprocessing, values: Any, issues: Issues | None = None) -> np.ndarray:
    """Encode values in Python: numbers (NaN if one is missing), pixels or token ids, with samples along the first axis.
    `preprocessing.scale` makes of them what the model receives.

    Args:
        preprocessing: how the training data were encoded.
        values: one sample, or several. A row of a table is a dictionary, or a sequence with the values in the order of
            the columns; rows are a list of these, a data frame or a PyArrow table. A picture is a PIL image, a path or
            an array of bytes (height x width, with channels first, last or none). A text is a string. Arrays and
            tensors of encoded samples are taken for all models.
        issues: where warnings are reported; by default they are logged.
    """
    found, values = Issues() if issues is None else issues, _without_tensors(values)
    if isinstance(values, list) and not values:
        raise UserError("There are no samples; give one at least.")
    x = ENCODERS[preprocessing.kind](preprocessing, values, found)
    if issues is None:
        for _, sentence in found.warnings:
            log.warning("%s", sentence)
    return x


def read_new_samples(
    preprocessing: Preprocessing,
    path: str | os.PathLike[str],
    *,
    label: str | None = None,
    client: str | None = None,
    delimiter: str | None = None,
) -> NewSamples:
    """Read samples from a file or a folder of any layout that training data may have; classes may be missing.

    Pictures may also be a single file, or lie in folders of their clients only or in no folders; texts may be the lines
    of a `.txt` file.

    Args:
        preprocessing: how the training data were encoded.
        path: the file or folder.
        label: column of the class; by default as in training.
        client: column of the client; by default as in training, or client or client_id.
        delimiter: between the values of a CSV row; by default it is guessed.
    """
    issues, location = Issues(), short_path(os.path.abspath(os.path.expanduser(path)))
    if preprocessing.kind == "text" and location.suffix.lower() == ".txt":
        x, y, clients, where = _read_lines(preprocessing, location, issues)
    else:
        layout = detect_layout(location, issues, labelled=False)
        if layout.kind == "image":
            x, y, clients, where = _read_pictures(preprocessing, layout, location, issues)
        elif layout.kind == "array":
            x, y, clients, where = _read_arrays(preprocessing, layout, issues)
        else:
            sheets = _read_sheets(layout, location, delimiter, issues)
            x, y, clients, where = _read_rows(preprocessing, sheets, label, client, issues)
    warnings, remarks = (tuple(sentence for _, sentence in kind) for kind in (issues.warnings, issues.remarks))
    return NewSamples(x, y, clients, where, warnings, remarks)


Contents = tuple[np.ndarray, np.ndarray | None, np.ndarray | None, Origin]  # x, y, client, where of NewSamples


def _without_tensors(values: Any) -> Any:
    """The values, with arrays in place of tensors, and lists in place of tuples."""
    if isinstance(values, list | tuple):
        return [_without_tensors(value) for value in values]
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


# -- arrays


def _encode_array(made: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> np.ndarray:
    """Encoded samples of the right shape: one, or several along the first axis; if `where` is given, always several."""
    x = _number_array(made, values)
    batch = _as_batch(x, made.shape, single=where is None)
    if batch is None:
        raise UserError(
            f"The model takes samples of the shape {_shown(made.shape)}, one or several along a first axis, not "
            f"{_shown(x.shape)}."
        )
    if not len(batch):
        raise UserError("There are no samples; give one at least.")
    where = SampleOrigin(len(batch)) if where is None else where
    if made.dtype in ("uint8", "int64"):
        what, end = ("pixel", 256) if made.dtype == "uint8" else ("token id", made.token_ids or np.iinfo(np.int64).max)
        with np.errstate(invalid="ignore"):
            wrong = ~((batch >= 0) & (batch < end) & (batch % 1 == 0))
        if wrong.any():
            row = int(wrong.reshape(len(batch), -1).any(1).argmax())
            value = batch[row][wrong[row]][0]
            raise UserError(f"{where(row)}: a {what} is {value:g}, but it must be a whole number from 0 to {end - 1}.")
        return np.ascontiguousarray(batch, dtype=made.dtype)
    return finite_numbers(batch, where, issues).astype(made.dtype)


def _number_array(made: Preprocessing, values: Any) -> np.ndarray:
    """The values as an array of numbers."""
    try:
        x = np.asarray(values)
    except Exception:  # of what cannot be an array, such as rows of different lengths
        x = np.array(None)
    if x.dtype.kind not in "biuf":
        raise UserError(f"The model takes {NOUNS[made.kind]}, not '{shorten(type(values).__name__)}'; {_usage(made)}.")
    return x


def _usage(made: Preprocessing) -> str:
    """How a sample is given, as the end of a message."""
    if made.kind == "table":
        return f"give a dictionary with {join_names([column.name for column in made.columns])}, or a list of them"
    return {
        "image": "give a PIL image, a path or an array of bytes, or a list of them",
        "text": "give a string or a list of them",
    }.get(made.kind, f"give an array of the shape {_shown(made.shape)}")


def _as_batch(x: np.ndarray, shape: tuple[int, ...], single: bool) -> np.ndarray | None:
    """Samples with a batch axis and, if they are pictures, with their channels first; None if the shape is wrong."""
    batches = [x[None], x] if single else [x]
    for batch in batches:
        if batch.shape[1:] == shape:
            return batch
    if len(shape) == 3 and shape[0] in (1, 3):
        for batch in batches:
            if batch.shape[1:] == (*shape[1:], shape[0]):
                return np.moveaxis(batch, -1, 1)
            if shape[0] == 1 and batch.shape[1:] == shape[1:]:
                return batch[:, None]
    return None


def _read_arrays(made: Preprocessing, layout: Layout, issues: Issues) -> Contents:
    """The samples of `.npz` files with an array x, and perhaps y and client."""
    where, parts, read = Origin(), list[np.ndarray](), {"y": list[np.ndarray](), "client": list[np.ndarray]()}
    for file in layout.files:
        arrays = read_arrays(file, ("x",), issues)
        here, n = Origin(), len(arrays["x"])
        for origin in (here, where):
            origin.add(str(file.path), np.arange(n), n)
        x = list(arrays["x"]) if made.kind == "image" else arrays["x"]
        parts.append(ENCODERS[made.kind](made, x, issues, here))
        for name in read:
            if name in arrays:
                read[name].append(arrays[name])
    for name, values in read.items():
        if values and len(values) < len(parts):
            raise UserError(f"Some files have an array '{name}' and some have not; give it to all or to none.")
    y, client = (Categorical.from_array(np.concatenate(values)) if values else None for values in read.values())
    return (
        np.concatenate(parts),
        None if y is None else match_classes(y, made.classes, where, "the label in 'y'", issues),
        None if client is None else client_names(client),
        where,
    )


# -- tables


def _encode_rows(made: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> np.ndarray:
    """Rows of a table."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.ndim in (1, 2):
        rows, width = np.atleast_2d(values), values.shape[-1]
        if width == made.shape[0] != len(made.columns):  # words are one-hot encoded already
            return _encode_array(made, values, issues, where)
        if width == len(made.columns) and len(rows):
            columns = [pa.array(column, from_pandas=True) for column in rows.T]
            values = pa.Table.from_arrays(columns, names=[column.name for column in made.columns])
    return _encode_table(made, _python_table(made, values, issues, where), issues)


def _python_table(made: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> Table:
    """Values in Python as a table with the columns that the model needs."""
    arrow = values if isinstance(values, pa.Table) else _arrow_table(made, values)
    arrow = arrow.rename_columns([" ".join(name.split()) for name in arrow.column_names])
    table = _join(made, [make_sheet("The table", arrow, arrow.column_names, {})], [], issues)
    table.where = SampleOrigin(arrow.num_rows) if where is None else where
    return table


def _arrow_table(made: Preprocessing, values: Any) -> pa.Table:
    """Rows as a table: a dictionary, a sequence in the order of the columns, a list of these, or a data frame."""
    if hasattr(values, "columns") and hasattr(values, "__getitem__"):  # pandas, or another library's data frame
        keys = list(values.columns)
        return _columns_table(keys, [list(values[key]) for key in keys])
    if not isinstance(values, Mapping) and callable(getattr(values, "to_dict", None)):  # a row of such a data frame
        values = values.to_dict()
    values = values.tolist() if isinstance(values, np.ndarray) else values
    rows = values if isinstance(values, list) and _are_rows(values) else [values]
    if all(isinstance(row, Mapping) for row in rows):
        keys = list(dict.fromkeys(key for row in rows for key in row))
        return _columns_table(keys, [[row.get(key) for row in rows] for key in keys])
    rows = [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]
    names = [column.name for column in made.columns]
    for i, row in enumerate(rows):
        if not isinstance(row, list):
            raise UserError(f"Sample {i} is not a row but '{shorten(type(row).__name__)}'; {_usage(made)}.")
        if len(row) != len(names):
            raise UserError(
                f"Sample {i} has {plural(len(row), 'value')}, but the model takes {plural(len(names), 'column')}: "
                f"{join_names(names)}."
            )
    return _columns_table(names, [list(column) for column in zip(*rows, strict=True)])


def _are_rows(values: list[Any]) -> bool:
    """Whether a list has rows, and is not a row itself."""
    return all(isinstance(row, Mapping | list | np.ndarray) for row in values)


def _columns_table(names: list[Any], columns: list[list[Any]]) -> pa.Table:
    """A table from lists of values of any kind; a column of several kinds is one of texts."""
    return pa.Table.from_arrays([_arrow_column(column) for column in columns], names=list(map(_text, names)))


def _arrow_column(values: list[Any]) -> pa.Array:
    values = [value.item() if isinstance(value, np.generic | Tensor) and value.ndim == 0 else value for value in values]
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    """A value as text: nothing if it is pandas' mark of a missing one, question marks for what is not Unicode."""
    try:
        text = str(value)
    except ValueError:  # Python does not write integers with more than 4300 digits
        text = f"{type(value).__name__} too long to show"
    return "" if text in ("<NA>", "NaT") else text.encode(errors="replace").decode()


def _join(made: Preprocessing, sheets: list[Sheet], roles: list[str], issues: Issues) -> Table:
    """The tables of all files as one, with the columns that the model needs and those of `roles` that all files have.
    Others are not used, which is remarked on."""
    needed = [column.name for column in made.columns] or [_content_column(made, sheets[0])]
    for sheet in sheets:
        names = sheet.table.column_names
        if missing := [name for name in needed if name not in names]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"{sheet.file} has no column '{missing[0]}'{more}, with which the model was trained; "
                f"{similar_column(missing[0], names)}"
            )
    names = list(dict.fromkeys(name for sheet in sheets for name in sheet.table.column_names))
    known = {*needed, *roles, made.label, made.client, made.split}
    if extra := [name for name in names if name not in known]:
        issues.remark("ignored", f"Columns that the model does not use: {join_names(extra)}.")
    there = [name for name in roles if all(name in sheet.table.column_names for sheet in sheets)]
    used = list(dict.fromkeys([*needed, *there]))
    return Table([sheet._replace(table=sheet.table.select(used)) for sheet in sheets], issues)


def _content_column(made: Preprocessing, sheet: Sheet) -> str:
    """The column of the texts or pictures: that of the training data, one called text, or the only one of its type."""
    names = sheet.table.column_names
    if made.kind not in ("text", "image"):
        raise UserError(f"{sheet.file} is a table, but the model takes {NOUNS[made.kind]}; {_usage(made)}.")
    if made.content is not None:
        return made.content
    fits = is_text_type if made.kind == "text" else is_image_type
    candidates = [name for name in names if fits(sheet.table[name].type)]
    if made.kind in candidates:
        return made.kind
    if len(candidates) != 1:
        raise UserError(
            f"{sheet.file} has no column '{made.kind}', and {len(candidates)} columns could be the {NOUNS[made.kind]}; "
            f"call one '{made.kind}'."
        )
    return candidates[0]


def _encode_table(made: Preprocessing, table: Table, issues: Issues) -> np.ndarray:
    """The rows of a table that has the columns that the model needs."""
    if made.kind == "image":
        if not is_image_type(table[table.names[0]].type):
            raise UserError(f"Column '{table.names[0]}' holds {table[table.names[0]].type}, not pictures.")
        return _decode(made, images_in_column(table, table.names[0]), issues)
    if made.kind == "text":
        return _encode_tokens(made, texts_in_column(table, table.names[0], issues), table.where, issues)
    parts: list[np.ndarray] = []
    width = 0
    for column in made.columns:
        cells = Cells(column.name, table[column.name], table.where)
        cells.readable(issues, "give one number or word per row")
        values = encode_column(cells, column, issues)
        if column.words is None:
            _warn_of_missing_numbers(made, cells, values, width, issues)
        else:
            _warn_of_words(column, cells, values, issues)
        parts.append(one_hot(values, column))
        width += parts[-1].shape[1]
    return np.concatenate(parts, axis=1).astype(made.dtype)


def _warn_of_missing_numbers(made: Preprocessing, cells: Cells, values: np.ndarray, at: int, issues: Issues) -> None:
    """Warn of missing numbers, which are filled when samples are scaled; `at` is the column's index in a sample."""
    missing = np.isnan(values)
    if not missing.any():
        return
    fill = made.numbers.fill if made.numbers is not None else None
    sentence = _missing_values(cells, missing)
    if fill is None:
        issues.problem("missing", f"{sentence}; fill in what is missing.")
    elif made.missing == "zero":
        issues.warn("missing", f"{sentence}; 0 is used, as in training (missing=zero).")
    else:
        issues.warn("missing", f"{sentence}; the mean of the training data, {fill[at]:.6g}, is used.")


def _warn_of_words(column: Column, cells: Cells, values: np.ndarray, issues: Issues) -> None:
    """Warn of words that are missing or that the training data do not have."""
    coded = cells.coded
    missing = np.array([*(not word for word in coded.categories), True])[coded.codes]
    if missing.any():
        issues.warn("missing", f"{_missing_values(cells, missing)}; it counts as none of its words.")
    unknown = np.flatnonzero((values < 0) & ~missing)
    if len(unknown):
        words = list(dict.fromkeys(coded.categories[coded.codes[row]] for row in unknown))
        issues.warn(
            "word",
            f"Column '{cells.name}' has {join_names(words)} in {plural(len(unknown), 'row')}, first in "
            f"{cells.where(int(unknown[0]))}, which counts as none of the words that it had in training, "
            f"{join_names(column.words or ())}.",
        )


def _missing_values(cells: Cells, missing: np.ndarray) -> str:
    first = cells.where(int(missing.argmax()))
    return f"Column '{cells.name}' has no value in {plural(int(missing.sum()), 'row')}, first in {first}"


def _read_sheets(layout: Layout, path: Path, delimiter: str | None, issues: Issues) -> list[Sheet]:
    """The tables of a layout."""
    if layout.kind == "huggingface":
        return read_huggingface(path, issues)
    read = ((file, read_table(file.path, delimiter, issues)) for file in layout.files)
    return [sheet._replace(client=file.client, split=file.split) for file, sheet in read if sheet is not None]


def _read_rows(
    made: Preprocessing, sheets: list[Sheet], label: str | None, client: str | None, issues: Issues
) -> Contents:
    """The rows of tables."""
    if not sheets:
        raise UserError("There is no table that can be read.")
    first = sheets[0]
    features = {column.name for column in made.columns} | {made.content}
    label = _role(first, features, "label", label, made.label, LABEL_NAMES)
    client = _role(first, features, "client", client, made.client, CLIENT_NAMES)
    table = _join(made, sheets, [name for name in (label, client) if name is not None], issues)
    x = _encode_table(made, table, issues)
    y: np.ndarray | None = None
    if label is not None and label in table.names:
        check_scalar(table[label], f"{first.file}: the label column '{label}'")
        coded, about = Categorical.from_column(table[label]), first.features.get(label, {})
        if isinstance(about, dict) and about.get("_type") == "ClassLabel":
            names = dict(enumerate(about["names"]))
            coded = Categorical([names.get(value, value) for value in coded.categories], coded.codes)
        y = match_classes(coded, made.classes, table.where, f"the label '{label}'", issues)
    clients = table.client
    if client is not None and client in table.names:
        check_scalar(table[client], f"{first.file}: the client column '{client}'")
        clients = client_names(Categorical.from_column(table[client]))
    return x, y, clients, table.where


def _role(
    sheet: Sheet,
    features: set[str | None],
    setting: str,
    asked: str | None,
    trained: str | None,
    usual: tuple[str, ...],
) -> str | None:
    """The column of the label or the client: the one that is asked for, that of the training data if it is there, or
    one with a usual name if they had none."""
    names = sheet.table.column_names
    if asked is not None and asked not in names:
        raise UserError(f"{sheet.file} has no column '{asked}' ({setting}={asked}); {similar_column(asked, names)}")
    if asked is not None or trained is not None:
        return asked or trained
    others = [name for name in names if name not in features]
    return next((name for default in usual for name in others if name.lower() == default), None)


# -- pictures


def _encode_pictures(made: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> np.ndarray:
    """Pictures; if `where` is given, it names them."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind in "biuf" and _as_batch(values, made.shape, single=True) is not None:
            return _encode_array(made, values, issues)
        grey = values.ndim == 3 and made.shape[0] == 1 and not {1, 3} & {values.shape[0], values.shape[2]}
        values = list(values) if values.ndim == 4 or grey else values  # several pictures
    items = values if isinstance(values, list) else [values]
    if not all(isinstance(item, str | bytes | os.PathLike | Image.Image | np.ndarray) for item in items):
        return _encode_array(made, values, issues)
    names = [f"Picture {i}" if where is None else where(i) for i in range(len(items))]
    return _decode(made, [_picture(name, item) for name, item in zip(names, items, strict=True)], issues)


def _picture(name: str, item: Any) -> ImageSource:
    """A picture in Python as an image to decode."""
    if isinstance(item, bytes | Image.Image):
        return ImageSource(name, item)
    if not isinstance(item, np.ndarray):
        path = os.fspath(item)
        require_file(Path(path))
        return ImageSource(str(path), str(path))
    pixels = item
    if item.ndim == 3:
        pixels = item if channels_last(item.shape) else item.transpose(1, 2, 0)
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)) or not pixels.size:
        raise UserError(
            f"{name} has the shape {_shown(item.shape)}; give height x width, with 1 or 3 channels first or last."
        )
    if pixels.dtype != np.uint8:
        raise UserError(f"{name} has pixels of the type {pixels.dtype}; give whole numbers from 0 to 255 as uint8.")
    return ImageSource(name, Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels))


def _decode(made: Preprocessing, images: list[ImageSource], issues: Issues) -> np.ndarray:
    """Pictures with the channels and the size of the training data."""
    channels, height, width = made.shape
    headers = [read_header(image, issues) for image in images]
    coloured = [image.name for image, header in zip(images, headers, strict=True) if header and not header.grey]
    others = [i for i, header in enumerate(headers) if header and header.size != (width, height)]
    if coloured and channels == 1:
        issues.warn(
            "channels",
            f"{plural(len(coloured), 'picture')} in colour, first {coloured[0]}: the model was trained on grey ones, so "
            "colours are left out.",
        )
    if others and not made.resize:
        size = "x".join(map(str, headers[others[0]].size))  # type: ignore[union-attr]
        issues.warn(
            "sizes",
            f"{plural(len(others), 'picture')} of another size than those of the training data, {width}x{height}, first "
            f"{images[others[0]].name} with {size}; it is resized.",
        )
    readable = np.array([header is not None for header in headers])
    return decode_images(images, readable, (channels, height, width), issues)[0]


def _read_pictures(made: Preprocessing, layout: Layout, root: Path, issues: Issues) -> Contents:
    """Pictures in folders CLIENT/CLASS, CLASS or CLIENT, or in no folder."""
    if made.kind != "image":
        raise UserError(f"{root} holds pictures, but the model takes {NOUNS[made.kind]}; {_usage(made)}.")
    where = Origin()
    for file in layout.files:
        where.add(str(file.path), None, 1)
    x = _decode(made, [ImageSource(str(file.path), str(file.path)) for file in layout.files], issues)
    labels, clients = _folder_roles(layout.files, made.classes)
    y: np.ndarray | None = None
    if (labels != "").any():
        y = match_classes(Categorical.from_array(labels), made.classes, where, "the folder", issues)
    return x, y, clients if (clients != "").any() else None, where


def _folder_roles(files: tuple[File, ...], classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The names of the class and the client of every picture, "" for none. Single folders are those of classes if one
    of them has the name of a class."""
    single = sorted({file.parts[0] for file in files if len(file.parts) == 1})
    by_class = max(class_indices(single, classes), default=-1) >= 0
    labels, clients = [], []
    for file in files:
        if len(file.parts) > 2:
            raise UserError(f"{file.path} does not lie in a folder CLIENT/CLASS, CLASS or CLIENT; move it.")
        both = len(file.parts) == 2
        labels.append(file.parts[-1] if both or (file.parts and by_class) else "")
        clients.append(file.parts[0] if both or (file.parts and not by_class) else "")
    return np.array(labels), np.array(clients)


# -- texts


def _encode_texts(made: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> np.ndarray:
    """Texts, a table with texts, or token ids."""
    texts = [values] if isinstance(values, str | Mapping) else values
    if hasattr(values, "tolist") and not hasattr(values, "columns"):  # an array, or a column of a data frame
        texts = values.tolist()
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        texts, origin = [_text(text) for text in texts], SampleOrigin(len(texts))
        report_empty(texts, origin, "the text", issues)
        return _encode_tokens(made, texts, origin, issues)
    if isinstance(values, pa.Table) or hasattr(values, "columns") or _are_mappings(texts):
        return _encode_table(made, _python_table(made, values, issues), issues)
    return _encode_array(made, values, issues, where)


def _are_mappings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, Mapping) for value in values)


def _encode_tokens(made: Preprocessing, texts: list[str], where: Origin, issues: Issues) -> np.ndarray:
    """Texts as token ids. Warns of those without a known word."""
    vocabulary = made.vocabulary
    assert vocabulary is not None
    tokens = [TOKENIZERS[vocabulary.tokenizer](text) for text in texts]
    short = [i for i, text in enumerate(tokens) if len(text) < vocabulary.length]
    if short and vocabulary.padding is None:
        raise UserError(
            f"{where(short[0])}: the text has {plural(len(tokens[short[0]]), 'character')}, but the model reads the "
            f"last {vocabulary.length}; give a longer one."
        )
    known = set(vocabulary.words)
    if unknown := [i for i, text in enumerate(tokens) if known.isdisjoint(text)]:
        issues.warn(
            "unknown",
            f"{plural(len(unknown), 'text')} without any word of the training data, first {where(unknown[0])}: "
            f"'{shorten(texts[unknown[0]])}'.",
        )
    return encode_tokens(tokens, vocabulary)


def _read_lines(made: Preprocessing, path: Path, issues: Issues) -> Contents:
    """The lines of a text file; those without text are left out."""
    lines = read_text(path, "save it as text in UTF-8").removeprefix("\ufeff").split("\n")
    rows = [number for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} has no texts; write one on each line.")
    where = Origin()
    where.add(str(path), rows, len(rows))
    return _encode_tokens(made, [lines[row - 1].strip() for row in rows], where, issues), None, None, where


def _shown(shape: tuple[int, ...]) -> str:
    """A shape in words, such as 3x32x32."""
    return "x".join(map(str, shape)) or "a single number"


Encoder = Callable[..., np.ndarray]  # of (preprocessing, values, issues, where)
ENCODERS: dict[str, Encoder] = {
    "table": _encode_rows, "image": _encode_pictures, "text": _encode_texts, "array": _encode_array,
}  # fmt: skip
