"""The execution plan: choices that change how long a run takes and the last bits of its results, nothing else.

A plan is made once, by measuring, and recorded with the run, so that the run can be repeated to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Mode = Literal["stacked", "per-client"]
Replay = Literal["eager", "traced", "captured"]


PhaseId = tuple[str, int]  # "train" or "adapt", and the index of the phase in it


@dataclass(frozen=True)
class Plan:
    """How a run is carried out."""

    mode: Mode
    replay: Replay = "eager"  # how steps are carried out: eagerly, from a traced graph, or from a captured CUDA graph
    scoring: Mode = "stacked"  # how the models of stacked clients are evaluated
    chunk: int = 1  # clients that are stacked at most
    rows: int = 0  # samples that stacked models score at once; 0 for the default
    # A step runs for the first clients, those that still have batches. Unless it is eager, their number is rounded up
    # to sizes that shrink by this ratio, because each size needs its own graph.
    shrink: float = 0.6
    workers: int = 0  # threads that train clients in parallel; 0: one client at a time has all threads
    compiled: bool = False  # captured steps come from torch's compiler
    convolutions: dict[str, str] | None = None  # algorithm of each stacked convolution; None for torch's own
    device: str = ""  # type of the device it was made for
    threads: int = 0  # intra-op threads on the CPU
    runs: int = 1  # number of runs that are stacked together
    shards: int = 0  # parts of the clients that are never stacked together, see `fedloom.cluster`; 0 for none
    client_bytes: int = 0  # memory that a stacked client takes, as far as it is known
    reason: str = ""  # why this plan was chosen, for the log and plan.json

    def prefix(self, active: int) -> int:
        """Rows a step is computed for when `active` clients still have batches: exactly these, or the next larger of a
        few sizes."""
        if self.replay == "eager":
            return active
        size = self.chunk
        while (smaller := int(size * self.shrink)) >= active:
            size = smaller
        return size

    @property
    def bytes_needed(self) -> int:
        """Memory that the clients take that are stacked at once, as far as it is known; 0 if it is not."""
        return self.chunk * self.client_bytes if self.mode == "stacked" else 0

    def summary(self) -> str:
        """The plan in a few words, for messages."""
        if self.mode == "per-client":
            return "one client after another" if not self.workers else f"one client in each of {self.workers} threads"
        need = self.bytes_needed
        size = f", about {need / 1e9:.1f} GB" if need >= 1e9 else f", about {need / 1e6:.1f} MB" if need else ""
        return f"clients stacked ({self.replay}), {self.chunk} at once{size}"

    def check(self) -> None:
        """Raise ValueError unless the values are of the kind that plans have; they may come from a file."""
        for one, usual in zip(fields(self), fields(Plan), strict=True):
            value, default = getattr(self, one.name), usual.default
            known = get_args({"mode": Mode, "replay": Replay, "scoring": Mode}.get(one.name))
            if known and value not in known:
                raise ValueError(f"{one.name} is {value!r}")
            if isinstance(default, bool | int | float | str) and type(value) is not type(default):
                raise ValueError(f"{one.name} is {value!r}")

    @classmethod
    def of_record(cls, found: Mapping[str, Any]) -> Plan:
        """The plan with the values that are known among these."""
        return cls(**{one.name: found[one.name] for one in fields(cls) if one.name in found})

    def record(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)
