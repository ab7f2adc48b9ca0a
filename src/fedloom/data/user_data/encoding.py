"""Values in Python, encoded as the training data of a model were."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from torch import Tensor

from fedloom.core.errors import UserError, plural
from fedloom.core.preprocessing import Column, Preprocessing
from fedloom.data.limits import require_file
from fedloom.data.text import TOKENIZERS, encode_tokens
from fedloom.data.user_data.arrays import channels_last, finite_numbers
from fedloom.data.user_data.cells import Cells, encode_column, is_text_type, one_hot
from fedloom.data.user_data.columns import (
    Table,
    images_in_column,
    is_image_type,
    report_empty,
    similar_column,
    texts_in_column,
)
from fedloom.data.user_data.frames import columns_table, frame_table, is_frame, text_of
from fedloom.data.user_data.images import ImageSource, decode_images, read_header
from fedloom.data.user_data.issues import Issues, Origin, SampleOrigin, join_names, shorten
from fedloom.data.user_data.tables import Sheet, make_sheet

NOUNS = {"table": "rows of a table", "image": "pictures", "text": "texts", "array": "arrays of numbers"}


def encode_values(training: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> np.ndarray:
    """Encode values, see `fedloom.data.user_data.new_samples.encode`.

    Args:
        training: how the training data were encoded.
        values: one sample, or several.
        issues: where warnings are reported; problems are raised.
        where: origin of the samples if they are from a file; then `values` are several ones.
    """
    values = _without_tensors(values)
    if isinstance(values, list) and not values:
        raise UserError("There are no samples; give one at least.")
    return ENCODERS[training.kind](training, values, issues, where)


def _without_tensors(values: Any) -> Any:
    """The values, with arrays in place of tensors, and lists in place of tuples."""
    if isinstance(values, list | tuple):
        return [_without_tensors(value) for value in values]
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


# -- arrays


def _encode_array(training: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> np.ndarray:
    """Encoded samples of the right shape: one, or several along the first axis; if `where` is given, always several."""
    x = _number_array(training, values)
    batch = _as_batch(x, training.shape, single=where is None)
    if batch is None:
        given, shape = "The array" if where is None else f"{where.file(0)}: x", _shown(training.shape)
        raise UserError(
            f"{given} has the shape {_shown(x.shape)}, but the model takes samples of the shape {shape}, several along "
            "a first axis."
        )
    if not len(batch):
        raise UserError("There are no samples; give one at least.")
    where = SampleOrigin(len(batch)) if where is None else where
    if training.dtype == "uint8":
        return _whole_numbers(batch, "pixel", 256, where).astype(np.uint8)
    if training.dtype == "int64":
        return _whole_numbers(batch, "token id", training.token_ids or 1 << 62, where).astype(np.int64)
    return finite_numbers(batch, where, issues).astype(training.dtype)


def _whole_numbers(batch: np.ndarray, noun: str, end: int, where: Origin) -> np.ndarray:
    """The samples, after checking that their numbers are whole and below `end`."""
    with np.errstate(invalid="ignore"):
        wrong = ~((batch >= 0) & (batch < end) & (batch % 1 == 0))
    if wrong.any():
        row = int(wrong.reshape(len(batch), -1).any(1).argmax())
        value = batch[row][wrong[row]][0]
        raise UserError(f"{where(row)}: a {noun} is {value:g}, but it must be a whole number from 0 to {end - 1}.")
    return batch


def _number_array(training: Preprocessing, values: Any) -> np.ndarray:
    """The values as an array of numbers."""
    try:
        x = np.asarray(values)
    except Exception:  # of what cannot be an array, such as rows of different lengths
        x = np.array(None)
    if x.dtype.kind not in "biuf":
        given = shorten(type(values).__name__)
        raise UserError(f"The model takes {NOUNS[training.kind]}, not '{given}'; {usage(training)}.")
    return x


def usage(training: Preprocessing) -> str:
    """How a sample is given, as the end of a message."""
    if training.kind == "table":
        return f"give a dictionary with {join_names([column.name for column in training.columns])}, or a list of them"
    return {
        "image": "give a PIL image, a path or an array of bytes, or a list of them",
        "text": "give a string or a list of them",
    }.get(training.kind, f"give an array of the shape {_shown(training.shape)}")


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


# -- tables


def _encode_rows(training: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> np.ndarray:
    """Rows of a table."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.ndim in (1, 2):
        rows, width = np.atleast_2d(values), values.shape[-1]
        if width == training.shape[0] != len(training.columns):  # words are one-hot encoded already
            return _encode_array(training, values, issues, where)
        if width == len(training.columns) and len(rows):
            columns = [pa.array(column, from_pandas=True) for column in rows.T]
            values = pa.Table.from_arrays(columns, names=[column.name for column in training.columns])
    return encode_table(training, _python_table(training, values, issues, where), issues)


def _python_table(training: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> Table:
    """Values in Python as a table with the columns that the model needs."""
    arrow = values if isinstance(values, pa.Table) else _arrow_table(training, values, where)
    arrow = arrow.rename_columns([" ".join(name.split()) for name in arrow.column_names])
    table = join_sheets(training, [make_sheet("The table", arrow, arrow.column_names, {})], [], issues)
    table.where = SampleOrigin(arrow.num_rows) if where is None else where
    return table


def _arrow_table(training: Preprocessing, values: Any, where: Origin | None) -> pa.Table:
    """Rows as a table: a dictionary, a sequence in the order of the columns, a list of these, or a data frame."""
    if is_frame(values):
        return frame_table(values)
    if not isinstance(values, Mapping) and callable(getattr(values, "to_dict", None)):  # a row of such a data frame
        values = values.to_dict()
    values = values.tolist() if isinstance(values, np.ndarray) else values
    rows = values if isinstance(values, list) and _are_rows(values) else [values]
    if all(isinstance(row, Mapping) for row in rows):
        keys = list(dict.fromkeys(key for row in rows for key in row))
        return columns_table(keys, [[row.get(key) for row in rows] for key in keys])
    rows = [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]
    names, where = [column.name for column in training.columns], where or SampleOrigin(len(rows))
    for i, row in enumerate(rows):
        if not isinstance(row, list):
            raise UserError(f"{where(i)} is not a row but '{shorten(type(row).__name__)}'; {usage(training)}.")
        if len(row) != len(names):
            raise UserError(
                f"{where(i)} has {plural(len(row), 'value')}, but the model takes {plural(len(names), 'column')}: "
                f"{join_names(names)}."
            )
    return columns_table(names, [list(column) for column in zip(*rows, strict=True)])


def _are_rows(values: list[Any]) -> bool:
    """Whether a list has rows, and is not a row itself."""
    return all(isinstance(row, Mapping | list | np.ndarray) for row in values)


def join_sheets(training: Preprocessing, sheets: list[Sheet], roles: list[str], issues: Issues) -> Table:
    """The tables of all files as one, with the columns that the model needs and those of `roles` that all files have.
    Others are not used, which is remarked on."""
    needed = [column.name for column in training.columns] or [_content_column(training, sheets[0])]
    for sheet in sheets:
        names = sheet.table.column_names
        if missing := [name for name in needed if name not in names]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"{sheet.file} has no column '{missing[0]}'{more}, with which the model was trained; "
                f"{similar_column(missing[0], names)}"
            )
    names = list(dict.fromkeys(name for sheet in sheets for name in sheet.table.column_names))
    known = {*needed, *roles, *label_columns(training), training.client, training.split}
    if extra := [name for name in names if name not in known]:
        issues.remark("ignored", f"Columns that the model does not use: {join_names(extra)}.")
    there = [name for name in roles if all(name in sheet.table.column_names for sheet in sheets)]
    used = list(dict.fromkeys([*needed, *there]))
    return Table([sheet._replace(table=sheet.table.select(used)) for sheet in sheets], issues)


def label_columns(training: Preprocessing) -> tuple[str, ...]:
    """The columns of the target in the training data."""
    if training.label is None:
        return training.classes if training.target == "labels" else ()
    return (training.label,)


def _content_column(training: Preprocessing, sheet: Sheet) -> str:
    """The column of the texts or pictures: that of the training data, one called text, or the only one of its type."""
    names = sheet.table.column_names
    if training.kind not in ("text", "image"):
        raise UserError(f"{sheet.file} is a table, but the model takes {NOUNS[training.kind]}; {usage(training)}.")
    if training.content is not None:
        return training.content
    usual, fits = ("text", is_text_type) if training.kind == "text" else ("image", is_image_type)
    candidates = [name for name in names if fits(sheet.table[name].type)]
    if usual not in candidates and len(candidates) != 1:
        count = plural(len(candidates), "column")
        raise UserError(f"{sheet.file} has {count} that may be the {NOUNS[training.kind]}; call one '{usual}'.")
    return usual if usual in candidates else candidates[0]


def encode_table(training: Preprocessing, table: Table, issues: Issues) -> np.ndarray:
    """The rows of a table that has the columns that the model needs."""
    content = table.names[0]
    if training.kind == "image":
        if not is_image_type(kind := table[content].type):
            raise UserError(f"Column '{content}' holds {kind}, not pictures; give a Hugging Face data set, or files.")
        return decode_pictures(training, images_in_column(table, content), issues)
    if training.kind == "text":
        return encode_texts(training, texts_in_column(table, content, issues), table.where, issues)
    fill = training.numbers.fill if training.numbers is not None else None
    parts: list[np.ndarray] = []
    for column in training.columns:
        cells = Cells(column.name, table[column.name], table.where)
        cells.readable(issues, "give one number or word per row")
        values = encode_column(cells, column, issues)
        if column.words is not None:
            _warn_of_words(column, cells, values, issues)
        elif np.isnan(values).any():
            sentence = _missing_values(cells, np.isnan(values))
            if fill is None:
                raise UserError(f"{sentence}; fill in what is missing.")
            value = fill[sum(part.shape[1] for part in parts)]  # with which `Preprocessing.scale` fills it
            what = "0" if training.missing == "zero" else f"the mean of the training data, {value:.6g},"
            issues.warn("missing", f"{sentence}; {what} is used.")
        parts.append(one_hot(values, column))
    return np.concatenate(parts, axis=1).astype(training.dtype)


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


# -- pictures


def _encode_pictures(training: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> np.ndarray:
    """Pictures; if `where` is given, it names them."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind in "biuf" and _as_batch(values, training.shape, single=True) is not None:
            return _encode_array(training, values, issues)
        grey = values.ndim == 3 and training.shape[0] == 1 and not {1, 3} & {values.shape[0], values.shape[2]}
        values = list(values) if values.ndim == 4 or grey else values  # several pictures
    items = values if isinstance(values, list) else [values]
    if not all(isinstance(item, str | bytes | os.PathLike | Image.Image | np.ndarray) for item in items):
        return _encode_array(training, values, issues)
    names = [f"Picture {i}" if where is None else where(i) for i in range(len(items))]
    return decode_pictures(training, [_picture(name, item) for name, item in zip(names, items, strict=True)], issues)


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


def decode_pictures(training: Preprocessing, images: list[ImageSource], issues: Issues) -> np.ndarray:
    """Pictures with the channels and the size of the training data."""
    channels, height, width = training.shape
    headers = [read_header(image, issues) for image in images]
    coloured = [image.name for image, header in zip(images, headers, strict=True) if header and not header.grey]
    others = [i for i, header in enumerate(headers) if header and header.size != (width, height)]
    if coloured and channels == 1:
        issues.warn(
            "channels",
            f"{plural(len(coloured), 'picture')} in colour, first {coloured[0]}: the model was trained on grey ones, "
            "so colours are left out.",
        )
    if others and not training.resize:
        size = "x".join(map(str, headers[others[0]].size))  # type: ignore[union-attr]
        issues.warn(
            "sizes",
            f"{plural(len(others), 'picture')} of another size than those of the training data, {width}x{height}, "
            f"first {images[others[0]].name} with {size}; it is resized.",
        )
    readable = np.array([header is not None for header in headers])
    return decode_images(images, readable, (channels, height, width), issues)[0]


# -- texts


def _encode_strings(training: Preprocessing, values: Any, issues: Issues, where: Origin | None = None) -> np.ndarray:
    """Texts, a table with texts, or token ids."""
    is_table = hasattr(values, "columns")  # a data frame, or a table of PyArrow
    listed = values.tolist() if hasattr(values, "tolist") and not is_table else values
    items = listed if isinstance(listed, list) else [listed]
    if all(isinstance(item, str) for item in items):
        texts, origin = [text_of(item) for item in items], SampleOrigin(len(items))
        report_empty(texts, origin, "the text", issues)
        return encode_texts(training, texts, origin, issues)
    if is_table or all(isinstance(item, Mapping) for item in items):
        return encode_table(training, _python_table(training, values, issues), issues)
    return _encode_array(training, values, issues, where)


def encode_texts(training: Preprocessing, texts: list[str], where: Origin, issues: Issues) -> np.ndarray:
    """Texts as token ids. Warns of those without a known word."""
    vocabulary = training.vocabulary
    assert vocabulary is not None
    tokens = [TOKENIZERS[vocabulary.tokenizer](text) for text in texts]
    short = [i for i, text in enumerate(tokens) if len(text) < vocabulary.length]
    if short and vocabulary.padding is None:
        raise UserError(
            f"{where(short[0])}: the text has {plural(len(tokens[short[0]]), 'character')}, but the model reads the "
            f"last {vocabulary.length}; give a longer one."
        )
    if unknown := [i for i, text in enumerate(tokens) if vocabulary.ids.keys().isdisjoint(text)]:
        issues.warn(
            "unknown",
            f"{plural(len(unknown), 'text')} without any word of the training data, first {where(unknown[0])}: "
            f"'{shorten(texts[unknown[0]])}'.",
        )
    return encode_tokens(tokens, vocabulary)


def _shown(shape: tuple[int, ...]) -> str:
    """A shape in words, such as 3x32x32."""
    return "x".join(map(str, shape)) or "a single number"


Encoder = Callable[..., np.ndarray]  # of (preprocessing, values, issues, where)
ENCODERS: dict[str, Encoder] = {
    "table": _encode_rows, "image": _encode_pictures, "text": _encode_strings, "array": _encode_array,
}  # fmt: skip
