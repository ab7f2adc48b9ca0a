"""Which way is fastest for a convolution of stacked clients: found by trying."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from fedloom.core.autodiff import vmap
from fedloom.core.capture import aside, captured
from fedloom.kernels.convolution import Case, Way, carry_out

# sides and depth of tiles, warps, stages
TILES = {
    "output": ("64 32 32 4 3", "64 64 32 4 3", "128 64 32 4 3", "64 128 32 4 3"),
    "input": ("64 32 32 4 3", "64 64 32 4 3", "128 64 32 4 3", "64 128 32 4 3"),
    "weights": ("32 32 64 4 3", "64 64 32 4 3", "64 128 32 4 3"),
}
REPEATS = 5


def fastest(cases: Iterable[Case], clients: int, device: torch.device, dtype: torch.dtype) -> dict[str, Way]:
    """A way for each, by the time of captured calls."""
    times = {case.key: _times(case, clients, device, dtype) for case in cases}
    return {key: min(found, key=lambda way: found[way]) for key, found in times.items() if found}


def _times(case: Case, clients: int, device: torch.device, dtype: torch.dtype) -> dict[Way, float]:
    given = {"output": (case.x, case.w), "input": (case.y, case.w), "weights": (case.x, case.y)}[case.part]
    a, b = (torch.randn(clients, *shape, device=device, dtype=dtype) for shape in given)
    found = {}
    for way in ways(case):
        try:
            found[way] = _seconds(partial(vmap(lambda a, b: carry_out(case, a, b, way)), a, b))  # noqa: B023
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return found


def ways(case: Case) -> list[Way]:
    """Those that are tried: torch's, and tiles that are not much larger than what they cover."""
    width = case.w[1] if case.part == "input" else case.w[0]
    column = 0 if case.part == "weights" else 1
    most = max(32, 1 << (width - 1).bit_length()) if case.countable else 0
    return ["grouped", *(way for way in TILES[case.part] if int(way.split()[column]) <= most)]


def _seconds(f: Callable[[], Tensor]) -> float:
    def repeated() -> None:
        for _ in range(REPEATS):
            f()

    aside(f)
    graph, _ = captured(repeated)
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:])
