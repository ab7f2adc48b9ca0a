"""The execution plan: choices that change how long a run takes and the last bits of its results, nothing else.

They are made once, by measuring, and recorded with the run, so that a run can be repeated to the bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["stacked", "per-client"]
Replay = Literal["eager", "traced", "captured"]


@dataclass(frozen=True)
class Plan:
    mode: Mode
    replay: Replay = "eager"  # how stacked steps are carried out
    scoring: Mode = "stacked"  # how stacked models are evaluated
    chunk: int = 1  # clients stacked at most
    rows: int = 0  # samples that stacked models score at once; 0: as many as are usual
    shrink: float = 0.6  # each prefix size over the next larger one, where a size has a price (a trace, a graph)
    workers: int = 0  # threads that train clients side by side; 0: one client at a time has all threads
    compiled: bool = False  # captured steps come from torch's compiler
    convolutions: dict[str, str] | None = None  # ways of stacked convolutions by case; None: torch's own
    device: str = ""  # kind of device it was made for
    threads: int = 0  # of the processor, where it computes
    runs: int = 1  # that are stacked together
    reason: str = ""

    def prefix(self, active: int) -> int:
        """Rows a step runs for when `active` clients still have work: so many, or the next of a few sizes."""
        if self.replay == "eager":
            return active
        size = self.chunk
        while (smaller := int(size * self.shrink)) >= active:
            size = smaller
        return size

    def record(self) -> dict[str, Any]:
        return asdict(self)
