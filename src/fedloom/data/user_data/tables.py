"""Reads tables from files: CSV, Parquet, and the Arrow files of Hugging Face data sets."""

import codecs
import gzip
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from fedloom.core.errors import UserError, plural
from fedloom.data.user_data.issues import Issues, error_text, join_names, shorten
from fedloom.data.user_data.layout import SPLITS

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
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
        table = pq.read_table(path, partitioning=None)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is not a complete Parquet file ({error_text(error)}); write it again.") from None
    return _make_sheet(path, table, _huggingface_features(table.schema))


def _make_sheet(path: Path, table: pa.Table, features: dict[str, Any]) -> Sheet:
    """The table as a Sheet, after checking that it has rows and no two columns of one name."""
    if repeated := [name for name in table.column_names if table.column_names.count(name) > 1]:
        raise UserError(f"{path} has two columns '{shorten(repeated[0])}'; rename one.")
    if not table.num_rows:
        raise UserError(f"{path} has no rows.")
    return Sheet(str(path), table, np.arange(1, table.num_rows + 1), features)


def _huggingface_features(schema: pa.Schema) -> dict[str, Any]:
    """The description of the columns that Hugging Face's `datasets` writes into Arrow and Parquet files."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


# -- CSV


def _read_csv(path: Path, delimiter: str | None, issues: Issues) -> Sheet:
    """Read all columns as text; types are decided when all files have been read. The header is row 1."""
    head = _check_text(path)
    separator = DELIMITERS.get(delimiter or "", delimiter) or _guess_delimiter(path, head)
    if len(separator) != 1:
        raise UserError(f"delimiter must be one character, tab, comma, semicolon or space, not '{delimiter}'.")
    invalid: list[pcsv.InvalidRow] = []

    def skip(row: pcsv.InvalidRow) -> str:
        invalid.append(row)
        return "skip"

    parse = pcsv.ParseOptions(
        delimiter=separator, newlines_in_values=True, invalid_row_handler=skip, ignore_empty_lines=False
    )
    try:
        read = pcsv.ReadOptions(use_threads=False)  # with more than one thread, rows have no numbers
        names = pcsv.open_csv(path, read, parse).schema.names
        invalid.clear()
        as_text = pcsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        table = pcsv.read_csv(path, read, parse, as_text)
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} is not a table in CSV ({error_text(error)}).") from None
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
    table = table.rename_columns([name.strip() for name in table.column_names])
    return _make_sheet(path, table, {})._replace(rows=rows)


def _guess_delimiter(path: Path, head: bytes) -> str:
    if path.name.lower().endswith((".tsv", ".tsv.gz")):
        return "\t"
    return next((c for c in ",;\t|" if c.encode() in head), ",")


def _check_text(path: Path) -> bytes:
    """The first line of a file, after checking that all of it is text in UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    head, read_bytes, rows = b"", 0, 1
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while block := file.read(1 << 20):
                head = head or block.partition(b"\n")[0]
                pending = len(decoder.getstate()[0])  # bytes of a character that began in the last block
                decoder.decode(block)
                if b"\x00" in block:
                    row, at = rows + block.count(b"\n", 0, block.index(0)), read_bytes + block.index(0)
                    raise UserError(f"{path}, row {row}: byte {at} is zero; save the file as CSV in UTF-8.")
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
    return head


# -- Hugging Face


def read_huggingface(folder: Path, issues: Issues) -> list[Sheet]:
    """Read a folder that `save_to_disk` of Hugging Face's `datasets` wrote: one data set, or one per split."""
    index = folder / "dataset_dict.json"
    if not index.exists():
        return _read_saved(folder, None, issues)
    splits = _read_json(index).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
        raise UserError(f"{index} does not list splits; write the data set again with save_to_disk.")
    known = [name for name in splits if name.lower() in SPLITS]
    used = known if {"train", "test"} <= {SPLITS[name.lower()] for name in known} else splits
    if len(used) < len(splits):
        ignored = join_names([name for name in splits if name not in used])
        issues.remark("splits", f"Parts that are neither for training nor for test are left out: {ignored}.")
    if used is splits and len(splits) > 1:
        issues.remark("splits", f"The parts {join_names(splits)} are read as one.")
    sheets = []
    for name in used:
        split = SPLITS[name.lower()] if used is known else None
        sheets += _read_saved(folder / Path(name).name, split, issues)
    return sheets


def _read_saved(folder: Path, split: str | None, issues: Issues) -> list[Sheet]:
    """Read one saved data set: the Arrow files that its state.json lists."""
    for name in ("state.json", "dataset_info.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}; write the data set again with save_to_disk.")
    files, features = (
        _read_json(folder / "state.json").get("_data_files"),
        _read_json(folder / "dataset_info.json").get("features"),
    )
    names = [file.get("filename") if isinstance(file, dict) else None for file in files or ()]
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder / 'state.json'} does not list the data's files; write it again with save_to_disk.")
    sheets = []
    for name in map(str, names):
        path = folder / Path(name).name
        try:
            table = _read_arrow(path)
            if table.num_rows:
                about = features if isinstance(features, dict) else _huggingface_features(table.schema)
                sheets.append(_make_sheet(path, table, about)._replace(split=split))
        except UserError as error:
            issues.problem("unreadable", str(error))
    return sheets


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error_text(error)}).") from None
    return value if isinstance(value, dict) else {}


def _read_arrow(path: Path) -> pa.Table:
    """Read a stream of Arrow messages. If the end-of-stream mark is missing, the file has lost its last rows."""
    try:
        with path.open("rb") as file:
            file.seek(-len(END_OF_STREAM), 2)
            if file.read() != END_OF_STREAM:
                raise ValueError("its end is missing")
        with pa.memory_map(str(path)) as source:
            table = ipc.open_stream(source).read_all()
            table.validate(full=True)  # a damaged file may parse, and crash the process when used
            return table
    except FileNotFoundError:
        raise UserError(f"{path} is missing, but state.json lists it; copy the whole folder.") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is not a complete Arrow file ({error_text(error)}); copy or write it again.") from None
