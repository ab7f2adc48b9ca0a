"""What a run asks of an executor while it goes through a round, and several runs that ask at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple

from fedloom.core.network import Params
from fedloom.engines.cohort import Cohort, Executor


class Request(NamedTuple):
    """`clock` is answered when all runs have come so far."""

    job: Literal["train", "score_personal", "score_global", "clock"]
    cohort: Cohort | None = None
    splits: tuple[str, ...] = ()
    params: Params | None = None  # of the model that is scored, where it is the global one
    newcomers: bool = False  # clients that the method has never seen

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.job, self.splits, self.newcomers

    def carry_out(self, executor: Executor) -> Any:
        assert self.cohort is not None
        if self.job == "score_global":
            assert self.params is not None
            return executor.score_global(self.params, self.cohort, self.splits)
        return (executor.train if self.job == "train" else executor.score_personal)(self.cohort, self.splits)


Steps = Generator[Request, Any, Any]  # yields requests, is sent the answers, returns what it found
CLOCK = Request("clock")


def lockstep(runs: Sequence[Steps], answer: Callable[[list[int], list[Request]], list[Any]]) -> list[Any]:
    """What the runs return. `answer` is given requests of one kind and the places of the runs that made them. A clock
    runs slower by the number of runs, so that what it shows is each one's share."""
    found: list[Any] = [None] * len(runs)
    answers: dict[int, Any] = dict.fromkeys(range(len(runs)))
    while answers:
        asked: dict[int, Request] = {}
        for place, given in answers.items():
            try:
                asked[place] = runs[place].send(given)
            except StopIteration as end:
                found[place] = end.value
        answers = {}
        for kind in dict.fromkeys(request.kind for request in asked.values()):
            places = [place for place, request in asked.items() if request.kind == kind]
            if kind == CLOCK.kind:
                answers |= dict.fromkeys(places, time.perf_counter() / len(runs))
            else:
                answers |= zip(places, answer(places, [asked[place] for place in places]), strict=True)
    return found
