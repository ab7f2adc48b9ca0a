"""Helpers for graph passes that put custom operators into traced graphs."""

from collections.abc import Sequence
from typing import Any

import torch

VIEW = torch.ops.aten.view.default


def behind_views(node: Any) -> Any:
    """The node that a chain of views starts from."""
    while node.target is VIEW:
        node = node.args[0]
    return node


def reshaped(node: Any, shape: Sequence[int]) -> Any:
    """A node with the same value in the given shape."""
    value = node.meta["val"]
    if list(value.shape) == list(shape):
        return node
    view = node.graph.call_function(VIEW, (node, list(shape)))
    view.meta["val"] = value.view(shape)
    return view
