"""Compiling the kernels of a program side by side: one takes half a second, and a deep network has dozens."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node


def get_ready(program: GraphModule) -> None:
    """Every operator of ours is called once, for one client, with numbers that mean nothing."""
    calls: dict[Any, Node] = {}
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fedloom":
            calls.setdefault((node.target, *map(_kind, node.args)), node)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(_call, calls.values()))


def _kind(arg: Any) -> Any:
    if isinstance(arg, Node):
        value: Tensor = arg.meta["val"]
        return value.dtype, value.shape[1:], value.stride()
    return tuple(arg) if isinstance(arg, list) else arg


def _call(node: Node) -> None:
    node.target(*(_numbers(arg.meta["val"]) if isinstance(arg, Node) else arg for arg in node.args))  # type: ignore[operator]


def _numbers(like: Tensor) -> Tensor:
    return torch.empty_strided((1, *like.shape[1:]), like.stride(), dtype=like.dtype, device=like.device)
