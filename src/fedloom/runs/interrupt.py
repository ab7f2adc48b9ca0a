"""A run that is asked to stop finishes its round first."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

log = logging.getLogger("fedloom")


class Stopped(KeyboardInterrupt):
    """The run was asked to stop and can be continued from `folder`."""

    def __init__(self, folder: Path, done: int, total: int) -> None:
        super().__init__(f"stopped after round {done} of {total}")
        self.folder, self.done, self.total = folder, done, total


class Wish:
    asked = False


@contextmanager
def stoppable() -> Iterator[Wish]:
    """The first Ctrl-C (or a termination signal) is remembered; the second one interrupts at once."""
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish  # signals are the main thread's business
        return

    def remember(number: int, frame: FrameType | None) -> None:
        if wish.asked:
            raise KeyboardInterrupt
        wish.asked = True
        log.warning("Stopping after this round; press Ctrl-C again to stop at once.")

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
