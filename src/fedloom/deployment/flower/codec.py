"""FedLoom's messages as Flower's records: the header as text, and the tensors as one array of bytes.

Clients that are sent the same tensors are sent the same array, which Flower then stores once. The array is not in
NumPy's format, so nothing of it is interpreted before FedLoom's own checks.
"""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

HEADER, BODY = "header", "body"
NONCE = "nonce"
FORMAT = "fedloom.bytes"
MAX_BYTES = 4 << 30  # of the tensors of a message
PART_BYTES = 5 << 20  # of an array, which Flower sends in parts of this size
MAX_OBJECTS = MAX_BYTES // PART_BYTES + 16  # of a message: parts, and what holds them together


class NotAMessage(Exception):
    """Records that hold no message of FedLoom; says why."""


def to_records(header: str, body: bytes, nonce: str = "") -> RecordDict:
    """A message as records. With a nonce, nobody can guess the number under which Flower knows the message."""
    array = Array(dtype="uint8", shape=(len(body),), stype=FORMAT, data=body)
    about = ConfigRecord({HEADER: header})
    if nonce:
        about[NONCE] = nonce
    return RecordDict({HEADER: about, BODY: ArrayRecord({BODY: array})})


def from_records(records: RecordDict) -> tuple[str, bytes]:
    """The header and body of some records; raises NotAMessage for others."""
    try:
        header, array = records.config_records[HEADER][HEADER], records.array_records[BODY][BODY]
    except KeyError:
        raise NotAMessage("these records are no message of FedLoom") from None
    if not isinstance(header, str) or array.stype != FORMAT or not isinstance(array.data, bytes):
        raise NotAMessage("these records are no message of FedLoom")
    if len(array.data) > MAX_BYTES:
        raise NotAMessage(f"it has more than {MAX_BYTES >> 30} GiB of tensors")
    return header, array.data
