"""Tables from files: CSV, Parquet, and the Arrow files of Hugging Face data sets."""

from __future__ import annotations

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

from fedloom.core.errors import UserError
from fedloom.data.user_data.findings import Findings, listed, many, reason, short
from fedloom.data.user_data.layout import SPLITS

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
DELIMITERS = {"tab": "\t", "comma": ",", "semicolon": ";", "space": " "}


class Sheet(NamedTuple):
    file: str
    table: pa.Table
    rows: np.ndarray  # the number by which a reader finds a row
    features: dict[str, Any]  # what Hugging Face notes about columns
    client: str | None = None
    split: str | None = None


def read_table(path: Path, delimiter: str | None, findings: Findings) -> Sheet | None:
    """A file as a table, or nothing where that is impossible and a check goes on."""
    try:
        if path.name.lower().endswith((".parquet", ".pq")):
            return _parquet(path)
        return _csv(path, delimiter, findings)
    except UserError as error:
        findings.problem("unreadable", str(error))
        return None


def _parquet(path: Path) -> Sheet:
    try:
        table = pq.read_table(path, partitioning=None)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is not a complete Parquet file ({reason(error)}); write it again.") from None
    return _sheet(path, table, _features(table.schema))


def _sheet(path: Path, table: pa.Table, features: dict[str, Any]) -> Sheet:
    if twice := [name for name in table.column_names if table.column_names.count(name) > 1]:
        raise UserError(f"{path} has two columns '{short(twice[0])}'; rename one.")
    if not table.num_rows:
        raise UserError(f"{path} has no rows.")
    return Sheet(str(path), table, np.arange(1, table.num_rows + 1), features)


def _features(schema: pa.Schema) -> dict[str, Any]:
    try:
        found = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


# -- CSV


def _csv(path: Path, delimiter: str | None, findings: Findings) -> Sheet:
    """All columns as words: what they mean is decided when all files are read. Row 1 is the header, as in an editor."""
    head = _check_text(path)
    between = DELIMITERS.get(delimiter or "", delimiter) or _delimiter(path, head)
    if len(between) != 1:
        raise UserError(f"delimiter must be one character, tab, comma, semicolon or space, not '{delimiter}'.")
    bad: list[pcsv.InvalidRow] = []

    def handle(row: pcsv.InvalidRow) -> str:
        bad.append(row)
        return "skip"

    parse = pcsv.ParseOptions(
        delimiter=between, newlines_in_values=True, invalid_row_handler=handle, ignore_empty_lines=False
    )
    try:
        read = pcsv.ReadOptions(use_threads=False)  # rows are counted by one thread only
        names = pcsv.open_csv(path, read, parse).schema.names
        bad.clear()
        words = pcsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        table = pcsv.read_csv(path, read, parse, words)
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} is not a table in CSV ({reason(error)}).") from None
    ragged = [row for row in bad if row.text.strip()]
    for row in ragged[:1]:
        more = f" ({many(len(ragged), 'such row')})" if len(ragged) > 1 else ""
        findings.problem(
            "ragged",
            f"{path}, row {row.number} has {many(row.actual_columns, 'value')}, but there are "
            f"{many(row.expected_columns, 'column')}{more}; correct it.",
        )
    total = np.arange(2, table.num_rows + len(bad) + 2)
    rows = np.setdiff1d(total, [row.number for row in bad])
    blank = np.logical_and.reduce([pc.equal(column, "").to_numpy() for column in table.columns])
    table, rows = table.filter(pa.array(~blank)), rows[~blank]
    if not table.num_rows:
        raise UserError(f"{path} has a header but no rows.")
    if len(names) > 1 and table.num_rows > 1 and not table.column_names[0].strip():
        findings.remark("index", f"{path}: the first column has no name, so it is taken for an index and left out.")
        table = table.remove_column(0)
    table = table.rename_columns([name.strip() for name in table.column_names])
    return _sheet(path, table, {})._replace(rows=rows)


def _delimiter(path: Path, head: bytes) -> str:
    if path.name.lower().endswith((".tsv", ".tsv.gz")):
        return "\t"
    return next((c for c in ",;\t|" if c.encode() in head), ",")


def _check_text(path: Path) -> bytes:
    """The file is text in UTF-8. Returns its first line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    head, bytes_, rows = b"", 0, 1
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while block := file.read(1 << 20):
                head = head or block.partition(b"\n")[0]
                waiting = len(decoder.getstate()[0])  # bytes of a character that the last block began
                decoder.decode(block)
                if b"\x00" in block:
                    row, at = rows + block.count(b"\n", 0, block.index(0)), bytes_ + block.index(0)
                    raise UserError(f"{path}, row {row}: byte {at} is zero; save the file as CSV in UTF-8.")
                bytes_, rows = bytes_ + len(block), rows + block.count(b"\n")
            block, waiting = b"", len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as wrong:
        at = wrong.start - waiting
        row = rows + block.count(b"\n", 0, max(at, 0))
        raise UserError(
            f"{path}, row {row}: byte {bytes_ + at} is not UTF-8 text; save the file as CSV in UTF-8."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({reason(error).lower()}).") from None
    if not head.strip(b"\xef\xbb\xbf\r\n "):
        raise UserError(f"{path} is empty; a table starts with a row of column names.")
    return head


# -- Hugging Face


def read_huggingface(folder: Path, findings: Findings) -> list[Sheet]:
    """A folder written by `save_to_disk`: one data set, or one per split."""
    listing = folder / "dataset_dict.json"
    if not listing.exists():
        return _saved(folder, None, findings)
    splits = _json(listing).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
        raise UserError(f"{listing} does not list splits; write the data set again with save_to_disk.")
    known = [name for name in splits if name.lower() in SPLITS]
    used = known if {"train", "test"} <= {SPLITS[name.lower()] for name in known} else splits
    if len(used) < len(splits):
        left = listed([name for name in splits if name not in used])
        findings.remark("splits", f"Parts that are neither for training nor for test are left out: {left}.")
    if used is splits and len(splits) > 1:
        findings.remark("splits", f"The parts {listed(splits)} are read as one.")
    sheets = []
    for name in used:
        split = SPLITS[name.lower()] if used is known else None
        sheets += _saved(folder / Path(name).name, split, findings)
    return sheets


def _saved(folder: Path, split: str | None, findings: Findings) -> list[Sheet]:
    for needed in ("state.json", "dataset_info.json"):
        if not (folder / needed).is_file():
            raise UserError(f"{folder} has no {needed}; write the data set again with save_to_disk.")
    files, features = (
        _json(folder / "state.json").get("_data_files"),
        _json(folder / "dataset_info.json").get("features"),
    )
    names = [file.get("filename") if isinstance(file, dict) else None for file in files or ()]
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder / 'state.json'} does not list the data's files; write it again with save_to_disk.")
    sheets = []
    for name in map(str, names):
        path = folder / Path(name).name
        try:
            table = _arrow(path)
            if table.num_rows:
                notes = features if isinstance(features, dict) else _features(table.schema)
                sheets.append(_sheet(path, table, notes)._replace(split=split))
        except UserError as error:
            findings.problem("unreadable", str(error))
    return sheets


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}).") from None
    return found if isinstance(found, dict) else {}


def _arrow(path: Path) -> pa.Table:
    """A stream of Arrow messages; one that does not end as it should lost its last rows."""
    try:
        with path.open("rb") as file:
            file.seek(-len(END_OF_STREAM), 2)
            if file.read() != END_OF_STREAM:
                raise ValueError("its end is missing")
        with pa.memory_map(str(path)) as source:
            table = ipc.open_stream(source).read_all()
            table.validate(full=True)  # a damaged file may parse and then crash whoever uses it
            return table
    except FileNotFoundError:
        raise UserError(f"{path} is missing, but state.json lists it; copy the whole folder.") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is not a complete Arrow file ({reason(error)}); copy or write it again.") from None
