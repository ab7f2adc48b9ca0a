"""Reads streams of Arrow messages, which are the files of Hugging Face data sets."""

import os
import struct
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc

from fedloom.core.errors import UserError
from fedloom.data.limits import check_inflated, check_memory, require_file
from fedloom.data.user_data.issues import error_text

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
WORDS = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
NUMBER_BYTES = 8  # of a value in memory


def read_arrow(path: Path) -> pa.Table:
    """Read a stream of Arrow messages. If the end-of-stream mark is missing, the file has lost its last rows."""
    if os.path.exists(path):
        require_file(path)
    try:
        with path.open("rb") as file:
            file.seek(-len(END_OF_STREAM), 2)
            if file.read() != END_OF_STREAM:
                raise ValueError("its end is missing")
        with pa.memory_map(str(path)) as source:
            size = sum(_inflated_size(message) for message in ipc.MessageReader.open_stream(source))
            check_inflated(path, size, path.stat().st_size, "write it without compression")
            source.seek(0)
            reader = ipc.open_stream(source)
            if view := next(filter(None, map(_find_view, reader.schema.types)), None):
                raise UserError(
                    f"{path} has a column of {view}, which is not read; write it as a plain list or string."
                )
            table = reader.read_all()
            check_memory(
                path, table.num_rows * table.num_columns * NUMBER_BYTES
            )  # columns without values take no bytes
            check_repeated(path, (chunk for column in table.columns for chunk in column.chunks))
            table.validate(full=True)  # a damaged file may parse, and crash the process when used
            _ = table.column_names  # which may not be UTF-8
            return table
    except FileNotFoundError:
        raise UserError(f"{path} is missing, but state.json lists it; copy the whole folder.") from None
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        raise UserError(f"{path} is not a complete Arrow file ({error_text(error)}); copy or write it again.") from None


def _find_view(kind: pa.DataType) -> pa.DataType | None:
    """A type of views in a type: many rows of them can have one long value, which validation would read each time."""
    t = pa.types
    if t.is_string_view(kind) or t.is_binary_view(kind) or t.is_list_view(kind) or t.is_large_list_view(kind):
        return kind
    inner = [kind.value_type] if t.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    return next(filter(None, map(_find_view, inner)), None)


def check_repeated(path: Path, columns: Iterable[pa.Array]) -> None:
    """Raise a UserError if columns with dictionaries, in which a word is stored once, are too long with every word in
    its place."""
    size, stored = 0, path.stat().st_size
    for column in columns:
        size += _repeated_bytes(column)
        check_inflated(path, size, stored, "write it without dictionaries")


def _repeated_bytes(values: pa.Array) -> int:
    """The length of the words of dictionaries, each as often as it occurs."""
    kind = values.type
    if pa.types.is_dictionary(kind) and kind.value_type in WORDS:
        return pc.sum(pc.binary_length(values.dictionary).take(values.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(_repeated_bytes(values.field(i)) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _repeated_bytes(values.values)
    return 0


def _inflated_size(message: ipc.Message) -> int:
    """The bytes of a message's columns after inflation. PyArrow does not tell, so this reads the message's description,
    a FlatBuffer, which PyArrow has verified; names are those of Arrow's Message.fbs."""
    about, body = memoryview(message.metadata), memoryview(message.body or b"")

    def follow(at: int) -> int:
        return at + int(struct.unpack_from("<I", about, at)[0])

    def field(table: int, index: int) -> int:
        """The position of a field of a table; 0 if it is absent."""
        offsets = table - int(struct.unpack_from("<i", about, table)[0])
        (end,) = struct.unpack_from("<H", about, offsets)
        (offset,) = struct.unpack_from("<H", about, offsets + 4 + 2 * index) if 4 + 2 * index < end else (0,)
        return table + offset if offset else 0

    if message.type not in ("record batch", "dictionary"):
        return 0
    batch = follow(field(follow(0), 2))  # Message.header
    if message.type == "dictionary":
        batch = follow(field(batch, 1))  # DictionaryBatch.data
    if not field(batch, 3):  # RecordBatch.compression
        return len(body)
    buffers = follow(field(batch, 2))  # RecordBatch.buffers: their number, then the offset and the length of each
    size = 0
    for i in range(struct.unpack_from("<I", about, buffers)[0]):
        offset, length = struct.unpack_from("<qq", about, buffers + 4 + 16 * i)
        inflated = struct.unpack_from("<q", body, offset)[0] if length else 0  # -1 if it is not compressed
        size += max(length, inflated)
    return size
