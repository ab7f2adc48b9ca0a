"""FedLoom's messages as Flower's records: the header as text, and the tensors as one array of bytes.

Clients that are sent the same tensors are sent the same array, which Flower then stores once.
"""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

HEADER, BODY = "header", "body"
MAX_BYTES = 4 << 30  # of the tensors of a message


class NotAMessage(Exception):
    """Records that hold no message of FedLoom; says why."""


def to_records(header: str, body: bytes) -> RecordDict:
    """A message as records."""
    array = Array(np.frombuffer(body, np.uint8))
    return RecordDict({HEADER: ConfigRecord({HEADER: header}), BODY: ArrayRecord({BODY: array})})


def from_records(records: RecordDict) -> tuple[str, bytes]:
    """The header and body of some records; raises NotAMessage for others."""
    try:
        header, array = records.config_records[HEADER][HEADER], records.array_records[BODY][BODY]
        if len(array.data) > MAX_BYTES:
            raise NotAMessage(f"it has more than {MAX_BYTES >> 30} GiB of tensors")
        body = array.numpy()  # without pickle
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, EOFError, OSError) as error:
        raise NotAMessage("these records are no message of FedLoom") from error
    if not isinstance(header, str) or body.dtype != np.uint8 or body.ndim != 1:
        raise NotAMessage("these records are no message of FedLoom")
    return header, body.tobytes()
