"""Finding the fastest algorithm of every stacked convolution, by timing."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from fedloom.core.autodiff import vmap
from fedloom.device.cuda_graph import capture_graph, side_stream_warmup
from fedloom.nn.kernels.convolution import GROUPED, Algo, ConvCase, compute

# sides and depth of tiles, warps, stages
TILES = {
    "output": ("64 32 32 4 3", "64 64 32 4 3", "128 64 32 4 3", "64 128 32 4 3"),
    "input": ("64 32 32 4 3", "64 64 32 4 3", "128 64 32 4 3", "64 128 32 4 3"),
    "weights": ("32 32 64 4 3", "64 64 32 4 3", "64 128 32 4 3"),
}
REPEATS = 5


def fastest_algos(cases: Iterable[ConvCase], clients: int, device: torch.device, dtype: torch.dtype) -> dict[str, Algo]:
    """The fastest algorithm for each case, by the time of captured calls."""
    times = {case.key: _times(case, clients, device, dtype) for case in cases}
    return {key: min(found, key=lambda algo: found[algo]) for key, found in times.items() if found}


def _times(case: ConvCase, clients: int, device: torch.device, dtype: torch.dtype) -> dict[Algo, float]:
    shapes = {"output": (case.x, case.w), "input": (case.y, case.w), "weights": (case.x, case.y)}[case.part]
    a, b = (torch.randn(clients, *shape, device=device, dtype=dtype) for shape in shapes)
    found = {}
    for algo in candidates(case):
        try:
            found[algo] = _seconds(partial(vmap(lambda a, b: compute(case, a, b, algo)), a, b))  # noqa: B023
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return found


def candidates(case: ConvCase) -> list[Algo]:
    """The algorithms that are tried: torch's, and tiles that are not much larger than what they cover."""
    width = case.w[1] if case.part == "input" else case.w[0]
    column = 0 if case.part == "weights" else 1
    most = max(32, 1 << (width - 1).bit_length()) if case.indexable else 0
    return [GROUPED, *(algo for algo in TILES[case.part] if int(algo.split()[column]) <= most)]


def _seconds(f: Callable[[], Tensor]) -> float:
    def repeated() -> None:
        for _ in range(REPEATS):
            f()

    side_stream_warmup(f)
    graph, _ = capture_graph(repeated)
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:])
