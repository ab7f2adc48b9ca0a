"""Messages between a server and its sites: plain fields and trees of tensors, without pickle.

A message has a header and a body. The header, JSON, has the fields, and a skeleton of every tree: nested dictionaries
and tuples in which each tensor is the number under which it is stored. The body has the tensors, in safetensors'
format. A tensor that occurs several times is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedloom.core.errors import shown
from fedloom.core.tree import Tree

MAX_DEPTH = 16  # of a tree
MAX_HEADER = 16 << 20  # characters; as Python's objects they take ten times as many bytes
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)

Skeleton = Any  # JSON: a number for a tensor, an object for a dictionary, a list for a tuple


class BadMessage(Exception):
    """Bytes that are no message, or a message that is not what was asked for; says why."""


@dataclass(frozen=True)
class Message:
    """What a server and a site send each other."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # of JSON's types
    trees: Mapping[str, Tree] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise BadMessage(f"'{name}' is missing") from None

    def tree(self, name: str) -> Tree:
        """A tree of tensors by its name."""
        try:
            return self.trees[name]
        except KeyError:
            raise BadMessage(f"'{name}' is missing") from None


def whole_number(message: Message, name: str, low: int, high: int = 10**8) -> int:
    """A field that is a whole number in this range; raises BadMessage for any other value."""
    value = message[name]
    if type(value) is not int or not low <= value <= high:
        raise BadMessage(f"'{name}' cannot be {shown(value)}")
    return value


# -- trees as skeletons and lists of tensors ------------------------------------------------------------------------


def flatten(trees: Mapping[str, Tree]) -> tuple[dict[str, Skeleton], list[Tensor]]:
    """Skeletons of some trees, and the tensors that they refer to by number, each once."""
    tensors: list[Tensor] = []
    known: dict[tuple[Any, ...], int] = {}

    def skeleton(tree: Tree) -> Skeleton:
        if isinstance(tree, Tensor):
            same = tree.data_ptr(), tuple(tree.shape), tree.stride(), tree.dtype, tree.device
            if not tree.numel() or same not in known:  # tensors without elements have no address
                known[same] = len(tensors)
                tensors.append(tree)
            return known[same]
        if type(tree) is dict:
            if not all(type(name) is str for name in tree):
                raise TypeError(f"A message cannot have a dictionary with keys other than text: {list(tree)}.")
            return {name: skeleton(value) for name, value in tree.items()}
        if type(tree) is tuple:
            return [skeleton(value) for value in tree]
        raise TypeError(f"A message consists of dictionaries, tuples and tensors; this is a {type(tree).__name__}.")

    return {name: skeleton(tree) for name, tree in trees.items()}, tensors


def unflatten(skeleton: Skeleton, tensors: list[Tensor], depth: int = 0) -> Tree:
    """The tree of a skeleton."""
    if depth > MAX_DEPTH:
        raise BadMessage("a tree is nested too deeply")
    if type(skeleton) is int:
        if not 0 <= skeleton < len(tensors):
            raise BadMessage(f"tensor {skeleton} is missing")
        return tensors[skeleton]
    if type(skeleton) is dict:
        return {name: unflatten(part, tensors, depth + 1) for name, part in skeleton.items()}
    if type(skeleton) is list:
        return tuple(unflatten(part, tensors, depth + 1) for part in skeleton)
    raise BadMessage("a tree has something in it that is neither a tensor, nor a dictionary, nor a tuple")


# -- bytes ----------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    header, body = encode_parts(message)
    about = header.encode()
    return len(about).to_bytes(8, "little") + about + body


def decode(data: bytes) -> Message:
    """The message that bytes hold; raises BadMessage for anything else."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        header = data[8:end].decode()
    except UnicodeDecodeError as error:
        raise BadMessage("these bytes are no message of FedLoom") from error
    return decode_parts(header, data[end:])


def encode_parts(message: Message) -> tuple[str, bytes]:
    """A message in two parts, of which the second has all tensors, in safetensors' format. Where several clients are
    sent the same tensors, it is the same for all of them."""
    skeletons, tensors = flatten(message.trees)
    header = json.dumps({"kind": message.kind, "fields": dict(message.fields), "trees": skeletons})
    sent: dict[str, Tensor] = {}
    memory: set[int] = set()
    for k, v in enumerate(tensors):
        v = v.detach().cpu().contiguous()
        place = v.untyped_storage()
        # a view of a part is copied, so that the whole is not sent; safetensors takes no memory twice
        if place.nbytes() != v.numel() * v.element_size() or place.data_ptr() in memory:
            v = v.clone()
        memory.add(v.untyped_storage().data_ptr())
        sent[str(k)] = v
    return header, save(sent) if sent else b""


def decode_parts(header: str, body: bytes) -> Message:
    """The opposite of `encode_parts`."""
    if len(header) > MAX_HEADER:
        raise BadMessage(f"its header has more than {MAX_HEADER >> 20} MiB")
    try:
        found = load(body) if body else {}
        tensors = [found[str(k)] for k in range(len(found))]
        content = json.loads(header)
        kind, fields, skeletons = content["kind"], content["fields"], content["trees"]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadMessage("these bytes are no message of FedLoom") from error
    if type(kind) is not str or type(fields) is not dict or type(skeletons) is not dict:
        raise BadMessage("these bytes are no message of FedLoom")
    if wrong := {v.dtype for v in tensors} - set(DTYPES):
        raise BadMessage(f"tensors cannot be of type {wrong.pop()}")
    return Message(kind, fields, {name: unflatten(part, tensors) for name, part in skeletons.items()})


# -- what a tree must look like ---------------------------------------------------------------------------------------


def paths(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor | None]]:
    """Names of everything in a tree, such as `w/head.weight`, with the tensor, or None for a dictionary or tuple."""
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    yield f"{prefix}/", None
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, part in parts:
        yield from paths(part, f"{prefix}/{name}" if prefix else str(name))


def same_bits(a: Tree, b: Tree) -> bool:
    """True if two trees have the same structure and values."""
    found, wanted = dict(paths(a)), dict(paths(b))
    if found.keys() != wanted.keys():
        return False
    pairs = ((v, wanted[name]) for name, v in found.items())
    return all(v is w or (v is not None and w is not None and torch.equal(v, w)) for v, w in pairs)


def check_like(tree: Tree, like: Tree, name: str = "") -> None:
    """Raise BadMessage unless a tree has the structure, shapes and types of another one."""
    if isinstance(tree, Tensor) and isinstance(like, Tensor):
        if tree.shape != like.shape:
            raise BadMessage(f"'{name}' has shape {list(tree.shape)} instead of {list(like.shape)}")
        if tree.dtype != like.dtype:
            raise BadMessage(f"'{name}' has type {tree.dtype} instead of {like.dtype}")
        return
    if type(tree) is not type(like):
        raise BadMessage(f"'{name}' is of another kind than it should be")
    found, wanted = _parts(tree), _parts(like)
    prefix = f"{name}/" if name else ""
    if missing := [part for part in wanted if part not in found]:
        raise BadMessage(f"'{prefix}{missing[0]}' is missing")
    if extra := [part for part in found if part not in wanted]:
        raise BadMessage(f"'{prefix}{shown(extra[0])}' was not asked for")
    for part, value in wanted.items():
        check_like(found[part], value, f"{prefix}{part}")


def _parts(tree: Tree) -> Mapping[Any, Tree]:
    return tree if isinstance(tree, dict) else dict(enumerate(tree))
