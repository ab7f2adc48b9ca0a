"""Results as data frames of pandas, which is not needed for anything else."""

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from fedloom.core.errors import UserError


def data_frame(table: pa.Table | Iterable[Mapping[str, Any]]) -> Any:
    """A table, or rows, as a `pandas.DataFrame`."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise UserError(
            "to_pandas needs the package 'pandas'; install it with: pip install 'fedloom[pandas]'."
        ) from None
    return table.to_pandas() if isinstance(table, pa.Table) else pandas.DataFrame([dict(row) for row in table])
