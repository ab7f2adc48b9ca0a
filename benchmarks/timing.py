"""How long the first rounds of a run take, the run being carried out as users do it."""

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from machine import wait

from fedloom.config.resolve import Config
from fedloom.core.federation import Federation
from fedloom.studies.execute import execute_group


class _Enough(Exception):
    """Ends a run that was asked for more rounds than are measured."""


@dataclass
class _Clock:
    """Called when everything is ready, and after every round of all runs."""

    rounds: int  # of all together
    device: torch.device
    at: list[float] = field(default_factory=lambda: [time.perf_counter()])

    def __call__(self, done: int, total: int, scores: dict[str, Any] | None) -> None:
        wait(self.device)
        self.at.append(time.perf_counter())
        if done == self.rounds:
            raise _Enough


def first_rounds(configs: list[Config], data: Federation, rounds: int) -> tuple[float, list[float]]:
    """Seconds of set-up, and of each of so many rounds; all runs at once. The plan is that for all rounds of a run."""
    clock = _Clock(rounds * len(configs), data.device)
    with contextlib.suppress(_Enough):
        execute_group(configs, data=data, on_round=clock)
    set_up, *took = (b - a for a, b in zip(clock.at, clock.at[1:], strict=False))
    return set_up, took
