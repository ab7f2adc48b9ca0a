"""Capturing CUDA graphs."""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def side_stream_warmup(function: Callable[[], Any], times: int = 1) -> None:
    """Call the function on a side stream, so that libraries initialise themselves before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(side)


def capture_graph(function: Callable[[], T], memory_pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture what the function does as a CUDA graph; returns the graph and the function's (static) results.

    Garbage collection is off during the capture: it could destroy an old graph, which would invalidate this capture.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=memory_pool):
            results = function()
    finally:
        if collects:
            gc.enable()
    return graph, results
