"""Trees of tensors as flat mappings from names to tensors, which is what files store."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from fedloom.core.tree import Tree
from fedloom.storage.files import Damaged


def named(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """The leaves of a tree by path, such as `w/head.weight`."""
    return {_name(path, prefix): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def rebuilt(like: Tree, tensors: Mapping[str, Tensor], prefix: str = "") -> Tree:
    """The tree with the structure and the devices of `like`, its leaves taken from the mapping."""
    paths, spec = tree_flatten_with_path(like)
    found = []
    for path, leaf in paths:
        name = _name(path, prefix)
        if name not in tensors:
            raise Damaged(f"'{name}' is missing")
        found.append(tensors[name].to(leaf.device))
    return tree_unflatten(found, spec)


def nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nested dictionaries from names with slashes, where the original structure is not known."""
    made: dict[str, Any] = {}
    for name, value in tensors.items():
        *folders, last = name.split("/")
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return made


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix/`, without it."""
    return {k.removeprefix(f"{prefix}/"): v for k, v in tensors.items() if k.startswith(f"{prefix}/")}


def _name(path: tuple[Any, ...], prefix: str) -> str:
    steps = (str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
    return "/".join((*((prefix,) if prefix else ()), *steps))
