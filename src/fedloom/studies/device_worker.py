"""The program of a worker: a process that carries out groups of runs on one device, for `fedloom.studies.devices`.

It sees no other GPU than its own. It reads one JSON object per line from its standard input: a setup, then groups of
runs, one after another. It answers with events, one JSON object per line on its standard output, see `devices.Event`.
When its input ends, whoever started it has gone or needs it no more, so it ends at once, whatever it does.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from fedloom.config.methods import blame, load_recorded
from fedloom.config.resolve import Config, resolve
from fedloom.core.errors import UserError, reason, system_error
from fedloom.core.federation import Federation
from fedloom.device.memory import is_out_of_memory
from fedloom.runs.interrupt import STOPPING
from fedloom.runs.records import Row
from fedloom.studies.build import make_data
from fedloom.studies.execute import execute_group


class Channel:
    """Sends events to the process that started this one."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def send(self, event: str, **contents: Any) -> None:
        """Send an event as a line of JSON."""
        with self._lock:
            self._file.write(f"{json.dumps({'event': event, **contents}, default=float)}\n")
            self._file.flush()


class Forward(logging.Handler):
    """Forwards log records to the process that started this one."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a record, unless the other process has said the same itself."""
        if record.msg != STOPPING:
            self._channel.send("log", level=record.levelno, text=record.getMessage())


def main() -> None:
    """Carry out what the standard input asks for."""
    channel = Channel(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what a user's method prints must not come between the events
    setup, orders = _orders()
    sys.argv = setup["argv"]  # which run directories record
    handler = Forward(channel)
    handler.setLevel(logging.ERROR)  # what there is to say of the data, the other process has said
    logging.basicConfig(level=setup["level"], format="%(message)s", handlers=[handler])
    data: Federation | None = None
    try:
        while True:
            order = orders.get()
            if data is None:
                for name, place in setup["methods"]:
                    load_recorded(name, place)  # all of them, because their files may define models that others use
                data = make_data(resolve(setup["first"]))
                handler.setLevel(setup["level"])
            _carry_out([resolve(config) for config in order["configs"]], order["folders"], data, channel)
    except KeyboardInterrupt:  # or `Stopped`
        channel.send("stopped")
    except (Exception, SystemExit) as error:
        channel.send("error", **explanation(error))
    _end()


def _orders() -> tuple[Mapping[str, Any], queue.SimpleQueue[Mapping[str, Any]]]:
    """The setup, and a queue in which orders arrive."""
    orders: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        _end()

    threading.Thread(target=listen, daemon=True).start()
    return orders.get(), orders


def _end() -> NoReturn:
    """End this process at once: run directories can be left at any moment. An ordinary end would wait for the thread
    that listens."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _carry_out(configs: Sequence[Config], folders: Sequence[str], data: Federation, channel: Channel) -> None:
    """Carry out a group of runs."""

    def on_round(done: int, total: int, row: Row | None) -> None:
        scores = {} if row is None else {name: value for name, value in row.items() if name.startswith("pre_")}
        channel.send("rounds", done=done, total=total, row=scores or None)

    execute_group(configs, out=folders, resume=True, on_round=on_round, data=data)
    channel.send("done")


def explanation(error: BaseException) -> dict[str, Any]:
    """What an error event says: a sentence, whether the user can do something about it, and the traceback."""
    details = "".join(traceback.format_exception(error))
    if isinstance(error, UserError):
        return {"sentence": str(error), "user": True, "details": ""}
    if is_out_of_memory(error):
        return {
            "sentence": "There is not enough memory; use a smaller model or fewer seeds.",
            "user": True,
            "details": "",
        }
    if isinstance(error, OSError):
        return {"sentence": system_error(error), "user": True, "details": details}
    if (sentence := blame(error)) is not None:
        return {"sentence": f"{sentence}.", "user": True, "details": details}
    return {"sentence": f"{type(error).__name__}: {reason(error)}", "user": False, "details": details}


if __name__ == "__main__":
    main()
