"""Capturing CUDA graphs."""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def aside(job: Callable[[], Any], times: int = 1) -> None:
    """Do it on another stream, as libraries must have set themselves up outside a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            job()
    torch.cuda.current_stream().wait_stream(side)


def captured(job: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph that does it, and where its results will be. No garbage is collected meanwhile: graphs of runs that are
    over may be in it, and destroying one would spoil the capture."""
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            found = job()
    finally:
        if collects:
            gc.enable()
    return graph, found
