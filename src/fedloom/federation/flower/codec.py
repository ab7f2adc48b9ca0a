"""FedLoom's messages as Flower's records: the header as text, every tensor as an array."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedloom.federation.messages import BadMessage, Message, decode_parts, encode_parts

HEADER, TENSORS, BFLOAT16 = "header", "tensors", "bfloat16"
MAX_BYTES = 4 << 30  # of the tensors of a message


def to_records(message: Message) -> RecordDict:
    """A message as records. Flower has no bfloat16, so such tensors travel as int16 and are named."""
    header, tensors = encode_parts(message)
    halves = [k for k, v in enumerate(tensors) if v.dtype == torch.bfloat16]
    arrays = {str(k): Array((v.view(torch.int16) if k in halves else v).numpy()) for k, v in enumerate(tensors)}
    return RecordDict({HEADER: ConfigRecord({HEADER: header, BFLOAT16: halves}), TENSORS: ArrayRecord(arrays)})


def from_records(records: RecordDict) -> Message:
    """The message of some records; raises BadMessage for others."""
    try:
        about, arrays = records.config_records[HEADER], records.array_records[TENSORS]
        header, halves = about[HEADER], about[BFLOAT16]
        if sum(len(array.data) for array in arrays.values()) > MAX_BYTES:
            raise BadMessage(f"it has more than {MAX_BYTES >> 30} GiB of tensors")
        tensors = [_tensor(arrays[str(k)]) for k in range(len(arrays))]
        for k in halves:  # type: ignore[union-attr]
            tensors[int(k)] = tensors[int(k)].view(torch.bfloat16)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, EOFError, OSError) as error:
        raise BadMessage("these records are no message of FedLoom") from error
    if not isinstance(header, str):
        raise BadMessage("the header is not that of a message")
    return decode_parts(header, tensors)


def _tensor(array: Array) -> Tensor:
    found = array.numpy()  # without pickle
    return torch.from_numpy(np.array(found, order="C"))
