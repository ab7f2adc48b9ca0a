"""Stopping a run gracefully: on Ctrl-C it finishes its round and saves a checkpoint."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

log = logging.getLogger("fedloom")

STOPPING = "Stopping after this round; press Ctrl-C again to stop at once."


class Stopped(KeyboardInterrupt):
    """A run was interrupted by the user and can be continued from `folder`. The rounds are those of one run or, of
    several that were at different rounds, of `all_runs` together."""

    def __init__(self, folder: Path, done: int, total: int, *, all_runs: bool = False) -> None:
        super().__init__(f"stopped after {f'{done} of {total} rounds' if all_runs else f'round {done} of {total}'}")
        self.folder, self.done, self.total = folder, done, total


class StopRequest:
    """Whether the user asked the run to stop."""

    requested = False


@contextmanager
def graceful_stop() -> Iterator[StopRequest]:
    """Within this context the first Ctrl-C (or SIGTERM) is only remembered; the second one interrupts at once."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread can handle signals
        return

    def remember(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        log.warning(STOPPING)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
