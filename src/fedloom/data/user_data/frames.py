"""Data frames and other tables in memory as Arrow tables, without importing the libraries that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.data.user_data.cells import is_text_type


def is_frame(values: Any) -> bool:
    """Whether an object is a data frame: of pandas, of Polars, an Arrow table, or one of another library like them."""
    if isinstance(values, type | Mapping):
        return False
    return hasattr(values, "columns") and hasattr(values, "__getitem__")


def frame_table(values: Any) -> pa.Table:
    """A data frame as an Arrow table. A column of several kinds of values is one of texts."""
    if isinstance(values, pa.Table | pa.RecordBatch):
        found = pa.table(values)
    elif callable(getattr(values, "to_arrow", None)):  # Polars
        found = values.to_arrow()
    else:
        keys = list(values.columns)
        if len(set(map(text_of, keys))) < len(keys):
            twice = next(key for i, key in enumerate(keys) if text_of(key) in map(text_of, keys[:i]))
            raise UserError(f"The table has two columns '{text_of(twice)}'; rename one.")
        found = pa.Table.from_arrays([_frame_column(values[key]) for key in keys], names=list(map(text_of, keys)))
    return pa.Table.from_arrays(
        [_plain_column(column) for column in found.columns], names=[" ".join(n.split()) for n in found.column_names]
    )


def _frame_column(values: Any) -> pa.Array | pa.ChunkedArray:
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return arrow_column(list(values))


def _plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without views and, unless they are of texts, without dictionaries."""
    kind = column.type
    if pa.types.is_string_view(kind):
        return column.cast(pa.string())
    return column.cast(kind.value_type) if pa.types.is_dictionary(kind) and not is_text_type(kind) else column


def columns_table(names: list[Any], columns: list[list[Any]]) -> pa.Table:
    """A table from lists of values of any kind; a column of several kinds is one of texts."""
    return pa.Table.from_arrays([arrow_column(column) for column in columns], names=list(map(text_of, names)))


def arrow_column(values: list[Any]) -> pa.Array:
    """Values of any kind as a column."""
    values = [value.item() if isinstance(value, np.generic | Tensor) and value.ndim == 0 else value for value in values]
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return pa.array([None if value is None else text_of(value) for value in values], pa.string())


def text_of(value: Any) -> str:
    """A value as text: nothing if it is pandas' mark of a missing one, and without lone surrogates."""
    try:
        text = str(value)
    except ValueError:  # Python does not write integers with more than 4300 digits
        text = f"{type(value).__name__} too long to show"
    return "" if text in ("<NA>", "NaT") else text.encode(errors="surrogatepass").decode(errors="replace")
