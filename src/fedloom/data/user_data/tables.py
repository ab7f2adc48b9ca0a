"""Reads tables from files: CSV, Parquet, and Hugging Face data sets."""

import codecs
import json
import os
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from fedloom.core.errors import UserError, plural
from fedloom.data.limits import BLOCK, JSON_BYTES, check_memory, read_blocks, require_file
from fedloom.data.user_data.arrow import NUMBER_BYTES, check_repeated, read_arrow
from fedloom.data.user_data.issues import Issues, error_text, join_names, name_problem, shorten
from fedloom.data.user_data.layout import SPLITS

LARGEST_BLOCK = (1 << 31) - 1  # that PyArrow can read
DELIMITERS = {"tab": "\t", "comma": ",", "semicolon": ";", "space": " "}


class Sheet(NamedTuple):
    """The table of one file."""

    file: str
    table: pa.Table
    rows: np.ndarray  # number of every row, as an editor counts
    features: dict[str, Any]  # Hugging Face's description of the columns
    client: str | None = None
    split: str | None = None


def read_table(path: Path, delimiter: str | None, issues: Issues) -> Sheet | None:
    """Read a CSV or Parquet file; None if that fails and `issues` collects problems.

    `delimiter` is a character or one of the names in DELIMITERS; by default it is guessed.
    """
    try:
        if path.name.lower().endswith((".parquet", ".pq")):
            return _read_parquet(path)
        return _read_csv(path, delimiter, issues)
    except UserError as error:
        issues.problem("unreadable", str(error))
        return None


def _read_parquet(path: Path) -> Sheet:
    try:
        _check_parquet(path)
        table = pq.read_table(path, partitioning=None)
        table.validate(full=True)
        names = table.column_names
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise UserError(f"{path} is not a complete Parquet file ({error_text(error)}); write it again.") from None
    return make_sheet(path, table, names, _huggingface_features(path, table.schema))


def _check_parquet(path: Path) -> None:
    """Raise a UserError if the contents of a Parquet file, which stores repeated values once, do not fit memory."""
    about = pq.read_metadata(path)
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    columns = [about.schema.column(i) for i in range(about.num_columns)]
    size = about.num_rows * NUMBER_BYTES
    for i, column in enumerate(columns):
        values = max(about.num_rows, sum(group.column(i).num_values for group in groups))
        size += values * max(NUMBER_BYTES, column.length)
    check_memory(path, max(size, sum(group.total_byte_size for group in groups)))
    if texts := [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]:
        with pq.ParquetFile(path, read_dictionary=texts) as file:
            check_repeated(path, (column for batch in file.iter_batches(columns=texts) for column in batch.columns))


def make_sheet(path: Path | str, table: pa.Table, names: list[str], features: dict[str, Any]) -> Sheet:
    """The table as a Sheet, after checking that it has rows and that the names of its columns can be used."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{path} has two columns '{shorten(repeated[0])}'; rename one.")
    for name in names:
        if problem := name_problem(name):
            raise UserError(f"{path} has a column '{shorten(name)}', a name {problem}; rename it.")
    if not table.num_rows:
        raise UserError(f"{path} has no rows.")
    return Sheet(str(path), table, np.arange(1, table.num_rows + 1), features)


def _huggingface_features(path: Path, schema: pa.Schema) -> dict[str, Any]:
    """The description of the columns that Hugging Face's `datasets` writes into Arrow and Parquet files."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    try:
        return _check_features(json.loads(text)["info"]["features"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{path} has a damaged description of its columns (the metadata 'huggingface'); write the file again."
        ) from None


def _check_features(features: Any) -> dict[str, Any]:
    """The description of columns, {} if there is none; a ValueError if it is of a wrong type."""
    if features is None:
        return {}
    if not isinstance(features, dict):
        raise ValueError("features are not described by name")
    for about in features.values():
        if not isinstance(about, dict | list):  # a list is a feature of several values
            raise ValueError("a feature is not described")
        if (label := _class_label(about)) is not None:
            names = label.get("names")
            if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
                raise ValueError("a label has no names of classes")
    return features


def class_names(about: Any) -> list[str] | None:
    """The names of classes, if Hugging Face describes a column as one of classes or of lists of them."""
    label = _class_label(about)
    return None if label is None else label["names"]


def _class_label(about: Any) -> dict[str, Any] | None:
    """The description of the classes of a column, or of lists of them."""
    if isinstance(about, dict) and about.get("_type") in ("Sequence", "List", "LargeList"):
        about = about.get("feature")
    elif isinstance(about, list) and len(about) == 1:
        about = about[0]
    return about if isinstance(about, dict) and about.get("_type") == "ClassLabel" else None


# -- CSV


def _read_csv(path: Path, delimiter: str | None, issues: Issues) -> Sheet:
    """Read all columns as text; types are decided when all files have been read. The header is row 1."""
    head, longest = _check_text(path)
    separator = DELIMITERS.get(delimiter or "", delimiter) or _guess_delimiter(path, head)
    if len(separator) != 1 or not separator.isascii():
        raise UserError(f"delimiter must be one ASCII character, tab, comma, semicolon or space, not '{delimiter}'.")
    invalid: list[pcsv.InvalidRow] = []

    def skip(row: pcsv.InvalidRow) -> str:
        invalid.append(row)
        return "skip"

    parse = pcsv.ParseOptions(
        delimiter=separator, newlines_in_values=True, invalid_row_handler=skip, ignore_empty_lines=False
    )
    block = min(longest, LARGEST_BLOCK)  # which must have room for every row
    try:
        read = pcsv.ReadOptions(use_threads=False, block_size=block)  # with more threads, rows have no numbers
        # the first line is enough for the names, unless one of them has a line break
        header = path if head.count(b'"') % 2 or len(head) >= BLOCK else pa.BufferReader(head + b"\n")
        names = pcsv.open_csv(header, read, parse).schema.names
        invalid.clear()
        as_text = pcsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        table = pcsv.read_csv(path, read, parse, as_text)
    except (pa.ArrowException, OSError, EOFError, ValueError, MemoryError) as error:
        long = f"a row has over {block >> 20} MiB, as if a quote were not closed" if "straddl" in str(error) else ""
        raise UserError(f"{path} is not a table in CSV ({long or error_text(error)}).") from None
    ragged = [row for row in invalid if row.text.strip()]
    for row in ragged[:1]:
        more = f" ({plural(len(ragged), 'such row')})" if len(ragged) > 1 else ""
        issues.problem(
            "ragged",
            f"{path}, row {row.number} has {plural(row.actual_columns, 'value')}, but there are "
            f"{plural(row.expected_columns, 'column')}{more}; correct it.",
        )
    numbers = np.arange(2, table.num_rows + len(invalid) + 2)
    rows = np.setdiff1d(numbers, [row.number for row in invalid])
    blank = np.logical_and.reduce([pc.equal(column, "").to_numpy() for column in table.columns])
    table, rows = table.filter(pa.array(~blank)), rows[~blank]
    if not table.num_rows:
        raise UserError(f"{path} has a header but no rows.")
    if len(names) > 1 and table.num_rows > 1 and not table.column_names[0].strip():
        issues.remark("index", f"{path}: the first column has no name, so it is taken for an index and left out.")
        table = table.remove_column(0)
    names = [" ".join(name.split()) for name in table.column_names]
    return make_sheet(path, table.rename_columns(names), names, {})._replace(rows=rows)


def _guess_delimiter(path: Path, head: bytes) -> str:
    if path.name.lower().endswith((".tsv", ".tsv.gz")):
        return "\t"
    return next((c for c in ",;\t|" if c.encode() in head), ",")


def _check_text(path: Path) -> tuple[bytes, int]:
    """The first line of a file, or a block of it, and the length of the longest line, at least that of a block, after
    checking that all of the file is text in UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    head, read_bytes, rows, line, longest = b"", 0, 1, 0, BLOCK
    try:
        for block in read_blocks(path):
            head = head or block.partition(b"\n")[0]
            pending = len(decoder.getstate()[0])  # bytes of a character that began in the last block
            decoder.decode(block)
            if b"\x00" in block:
                row, at = rows + block.count(b"\n", 0, block.index(0)), read_bytes + block.index(0)
                raise UserError(f"{path}, row {row}: byte {at} is zero; save the file as CSV in UTF-8.")
            first = block.find(b"\n")
            longest = max(longest, line + (len(block) if first < 0 else first + 1))
            line = line + len(block) if first < 0 else len(block) - block.rfind(b"\n") - 1
            read_bytes, rows = read_bytes + len(block), rows + block.count(b"\n")
        block, pending = b"", len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = error.start - pending
        row = rows + block.count(b"\n", 0, max(at, 0))
        raise UserError(
            f"{path}, row {row}: byte {read_bytes + at} is not UTF-8 text; save the file as CSV in UTF-8."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error_text(error).lower()}).") from None
    if not head.strip(b"\xef\xbb\xbf\r\n "):
        raise UserError(f"{path} is empty; a table starts with a row of column names.")
    return head, longest


# -- Hugging Face


def read_huggingface(folder: Path, issues: Issues) -> list[Sheet]:
    """Read a folder that `save_to_disk` of Hugging Face's `datasets` wrote: one data set, or one per split."""
    index = folder / "dataset_dict.json"
    if not os.path.exists(index):
        return _read_saved(folder, None, issues)
    splits = _read_json(index).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
        raise UserError(f"{index} does not list splits; write the data set again with save_to_disk.")
    sheets = []
    for name, split in choose_splits(splits, issues):
        sheets += _read_saved(folder / Path(name).name, split, issues)
    return sheets


def choose_splits(splits: list[str], issues: Issues) -> list[tuple[str, str | None]]:
    """The parts of a data set that are read, each with its split (train, val, test). If none is for training or none
    for test, all parts are read as one, without a split."""
    known = [name for name in splits if name.lower() in SPLITS]
    used = known if {"train", "test"} <= {SPLITS[name.lower()] for name in known} else splits
    if len(used) < len(splits):
        ignored = join_names([name for name in splits if name not in used])
        issues.remark("splits", f"Parts that are neither for training nor for test are left out: {ignored}.")
    if used is splits and len(splits) > 1:
        issues.remark("splits", f"The parts {join_names(splits)} are read as one.")
    return [(name, SPLITS[name.lower()] if used is known else None) for name in used]


def huggingface_sheet(name: str, table: pa.Table, features: Any) -> Sheet:
    """The table of a Hugging Face data set in memory; `features` is its description of the columns, a dictionary."""
    try:
        about = _check_features(features)
    except ValueError as error:
        raise UserError(f"{name} has columns that are not described as Hugging Face does ({error}).") from None
    return make_sheet(name, table, table.column_names, about)


def _read_saved(folder: Path, split: str | None, issues: Issues) -> list[Sheet]:
    """Read one saved data set: the Arrow files that its state.json lists."""
    for name in ("state.json", "dataset_info.json"):
        if not os.path.isfile(folder / name):
            raise UserError(f"{folder} has no {name}; write the data set again with save_to_disk.")
    files = _read_json(folder / "state.json").get("_data_files")
    try:
        features = _check_features(_read_json(folder / "dataset_info.json").get("features"))
    except ValueError as error:
        raise UserError(
            f"{folder / 'dataset_info.json'} is damaged ({error}); write the data set again with save_to_disk."
        ) from None
    files = files if isinstance(files, list) else []
    names = [file.get("filename") if isinstance(file, dict) else None for file in files]
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder / 'state.json'} does not list the data's files; write it again with save_to_disk.")
    sheets = []
    for name in map(str, names):
        path = folder / Path(name).name
        try:
            table = read_arrow(path)
            if table.num_rows:
                about = features or _huggingface_features(path, table.schema)
                sheets.append(make_sheet(path, table, table.column_names, about)._replace(split=split))
        except UserError as error:
            issues.problem("unreadable", str(error))
    return sheets


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    require_file(path)
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(JSON_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error_text(error).lower()}).") from None
    except (ValueError, RecursionError):  # also if it is nested too deeply
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object; write the data set again with save_to_disk.")
    return value
