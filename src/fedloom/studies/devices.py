"""Several devices in one machine: groups of runs are carried out by workers, processes of one device each.

A worker (`device_worker.py`) gets configurations as JSON and writes run directories, as an ordinary run does. It is
restricted to its GPU by an environment variable, so that the device that run directories record is the one that was
asked for (`auto`), and the runs can be continued on any other.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

import fedloom
from fedloom.config.files import SECTIONS
from fedloom.config.methods import place_of
from fedloom.config.resolve import NOUNS, REGISTRIES, Config, describe
from fedloom.core.authors import is_own
from fedloom.core.errors import UserError, WorkerError, plural, shown
from fedloom.metrics.registry import OWN
from fedloom.runs.interrupt import Stopped, graceful_stop
from fedloom.runs.records import Row

log = logging.getLogger("fedloom")

WORKER = "fedloom.studies.device_worker"
VISIBLE = "CUDA_VISIBLE_DEVICES"  # numbers of the GPUs that a process has
POLL_SECONDS = 0.1  # between looks whether the user wants to stop
END_SECONDS = 10.0  # for a worker that has nothing to do to end
HOW = "write GPUs as 0,1 or cuda:0,cuda:1, or cpu,cpu for two processes on the CPU"
INSTEAD = {
    "algorithm": "write its class into a file and name that, as in ./my_method.py",
    "dataset": "save the data as files and give their path",
    "partition": "choose one by its name",
    "model": "choose one by its name",
}
Devices = str | int | Sequence[str | int]
Event = Mapping[str, Any]  # "event" is rounds (done, total, row), log (level, text), done, stopped or error


@dataclass
class WorkItem:
    """A group of runs that a worker carries out, and how far it is."""

    name: str  # of the method; in a sweep, the values
    configs: Sequence[Config]
    folders: Sequence[Path]
    device: str = ""  # that it is carried out on; none while it waits
    done: int = 0  # rounds of all its runs
    row: Row | None = None  # metrics of the last evaluated round
    finished: bool = False

    @property
    def title(self) -> str:
        """What a progress bar calls it, such as "fedrep, 3 runs"."""
        return self.name if len(self.configs) == 1 else f"{self.name}, {plural(len(self.configs), 'run')}"

    @property
    def total(self) -> int:
        """Rounds of all its runs."""
        return sum(config.settings.rounds for config in self.configs)


OnProgress = Callable[[Sequence[WorkItem]], None]  # called with all groups whenever something may have changed


def parse_devices(devices: Devices) -> tuple[str, ...]:
    """Names of devices (`cuda:0`, `cpu`) from `"0,1"`, `"cuda:0,cuda:1"`, `"cpu,cpu"`, or a list of these. Raises
    UserError for what is no device, or not there."""
    given = devices.split(",") if isinstance(devices, str) else [devices] if isinstance(devices, int) else devices
    try:
        words = [str(device).strip() for device in given]
    except TypeError:
        raise UserError(f"devices cannot be {shown(devices)}; {HOW}.") from None
    if not any(words):
        raise UserError(f"devices is empty; {HOW}.")
    found = tuple(_device(word) for word in words)
    if "cpu" in found and len(set(found)) > 1:
        raise UserError(
            "devices has both GPUs and the CPU, between which a run cannot change when it is continued; use either."
        )
    return found


def _device(word: str) -> str:
    if word == "cpu":
        return word
    known = re.fullmatch(r"cuda|(?:cuda:)?(\d{1,6})", word)
    if known is None:
        raise UserError(f"devices has '{shown(word)}', which is no device; {HOW}.")
    number, count = int(known[1] or 0), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= count:
        there = "none, so use cpu,cpu" if not count else "device 0 only" if count == 1 else f"0 to {count - 1}"
        raise UserError(f"devices has '{shown(word)}', but this machine has {plural(count, 'CUDA device')}: {there}.")
    return f"cuda:{number}"


def checked_devices(
    devices: Devices | None, configs: Sequence[Config], out: str | Path | None, callbacks: Sequence[Any]
) -> tuple[str, ...]:
    """The devices for these configurations, none if all runs are to be carried out in this process. Raises UserError
    for what cannot be had together with several devices."""
    if devices is None:
        return ()
    found = parse_devices(devices)
    if out is None:
        raise UserError(
            "devices needs a folder that its processes write to (out, without --no-save); give one, or leave out "
            "devices."
        )
    if callbacks:
        raise UserError(
            "Callbacks and trackers cannot be called by the processes of several devices; leave out either."
        )
    kind = found[0].partition(":")[0]
    methods = [type(config.algorithm) for config in configs]
    modules = {cls.__module__ for cls in methods if place_of(cls) is not None}  # of files, which workers load
    for config in configs:
        s = config.settings
        if s.engine == "ray":
            raise UserError("engine=ray divides clients among devices itself; leave out either engine or devices.")
        if s.device not in ("auto", kind):
            raise UserError(f"device={shown(s.device)} and devices={','.join(found)} exclude each other; give either.")
        _check_portable(config, modules)
    return found


def _check_portable(config: Config, modules: Container[str]) -> None:
    """Raise UserError if a configuration has a Python object, which other processes could not find. They find what is
    defined in these modules."""
    described = describe(config)
    for section in SECTIONS:
        cls, about = type(getattr(config, section)), described[section]
        known = not is_own(cls) or cls.__module__ in modules or _is_plugin(cls, REGISTRIES[section].package)
        if about.get("own") is True or not known:
            raise UserError(
                f"The {NOUNS[section]} '{shown(about.get('name'))}' was made in Python, so the processes of several "
                f"devices cannot have it; {INSTEAD[section]}, or leave out devices."
            )
    if config.settings.metric in OWN:
        raise UserError(
            f"The metric '{config.settings.metric}' was made in Python, so the processes of several devices cannot "
            "have it; choose one by its name, or leave out devices."
        )


def _is_plugin(cls: type, group: str) -> bool:
    """True for a class of an installed package, which every process finds."""
    packages = {point.value.partition(":")[0].partition(".")[0] for point in entry_points(group=group)}
    return cls.__module__.partition(".")[0] in packages


def on_cpu(config: Config, devices: Sequence[str]) -> Config:
    """The configuration for this process, which only checks it and leaves the GPUs to the workers."""
    s = config.settings
    dtype = "float32" if s.dtype == "tf32" and "cpu" not in devices else s.dtype  # a format of GPUs
    return dataclasses.replace(config, settings=dataclasses.replace(s, device="cpu", dtype=dtype))


def execute_on_devices(
    items: Sequence[WorkItem],
    devices: Sequence[str],
    first: Config,
    folder: Path,
    on_progress: OnProgress | None = None,
) -> None:
    """Carry out groups of runs, each by the next worker that is free.

    If one fails, the others stop with checkpoints, and its error is raised. The same happens on Ctrl-C, which raises
    `Stopped`.

    Args:
        items: the groups; those that are finished are left alone.
        devices: names of `parse_devices`; a worker is started for each, if there is something for it to do.
        first: a configuration of the study, with which workers load the data.
        folder: of the study, for messages.
        on_progress: called from this thread.
    """
    if all(item.finished for item in items):
        return
    methods = {type(config.algorithm) for item in items for config in item.configs}
    setup = {
        "argv": sys.argv,
        "level": log.getEffectiveLevel(),
        "methods": sorted((cls.name, place) for cls in methods if (place := place_of(cls)) is not None),
        "first": describe(first),
    }
    pool = _Pool(items, folder)
    with graceful_stop() as stop:
        try:
            pool.start(devices, setup)
            while pool.working:
                if on_progress is not None:
                    on_progress(items)
                pool.handle_event()
                if stop.requested or pool.failure is not None or pool.interrupted:
                    pool.stop()
        finally:
            pool.close()
    if pool.failure is not None:
        raise pool.failure
    if not all(item.finished for item in items):
        raise Stopped(folder, sum(item.done for item in items), sum(item.total for item in items), all_runs=True)
    if on_progress is not None:
        on_progress(items)


class _Pool:
    """The workers of a study."""

    def __init__(self, items: Sequence[WorkItem], folder: Path) -> None:
        self.folder = folder
        self.waiting = deque(item for item in items if not item.finished)
        self.workers: list[_Worker] = []
        self.events: Events = queue.SimpleQueue()
        self.failure: Exception | None = None  # the first one
        self.interrupted = False  # somebody has stopped one of the workers
        self.stopping = False

    @property
    def working(self) -> bool:
        """True while a worker has something to do."""
        return any(worker.item is not None for worker in self.workers)

    def start(self, devices: Sequence[str], setup: Mapping[str, Any]) -> None:
        """Start a worker for each device that has something to do."""
        threads = share_of_threads(len(devices))  # however many are started, so that a resumed study uses as many
        for device in devices[: len(self.waiting)]:
            self.workers.append(_Worker(device, setup, threads, self.events))
            self.workers[-1].start(self.waiting.popleft())

    def stop(self) -> None:
        """Ask all workers to stop after the round in which they are, with checkpoints."""
        if not self.stopping:
            self.stopping = True
            self.waiting.clear()
            for worker in self.workers:
                worker.stop()

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.close()

    def handle_event(self) -> None:
        """Do what the next event of a worker asks for, if one comes soon."""
        try:
            worker, event = self.events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        item = worker.item
        if item is None:  # it has said how its work ended, and now it has ended itself
            return
        kind = "killed" if event is None else event["event"]
        if event is None:
            if not self.stopping:
                self.failure = self.failure or _killed(item, worker.exit_code(), self.folder)
        elif kind == "log":
            log.log(event["level"], "%s: %s", item.name, event["text"])
        elif kind == "rounds":
            item.done = item.total - event["total"] + event["done"]  # its total is that of the unfinished runs
            item.row = event["row"] or item.row
        elif kind == "done":
            item.done, item.finished = item.total, True
        elif kind == "stopped":
            self.interrupted = True
        elif kind == "error":
            self.failure = self.failure or _failure(item, event, self.folder)
        if kind in ("killed", "done", "stopped", "error"):
            worker.item = None
        if kind == "done" and self.waiting:
            worker.start(self.waiting.popleft())


def share_of_threads(processes: int) -> int:
    """Threads of each of so many processes; more in all than there are cores would slow all of them down."""
    return max(1, torch.get_num_threads() // processes)


class _Worker:
    """A worker process, and what it does."""

    def __init__(
        self,
        device: str,
        setup: Mapping[str, Any],
        threads: int,
        events: Events,
    ) -> None:
        self.device = device
        self.item: WorkItem | None = None
        source = str(Path(fedloom.__file__).parents[1])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, VISIBLE: visible(device)}
        # In a session of its own, so that Ctrl-C reaches this process only, which then asks all workers to stop.
        # Without the current folder in its path (-P), a file there such as random.py is not taken for Python's module.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(events,), daemon=True)
        self._reader.start()
        self._send(setup)

    def _read(self, events: Events) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # a process that is killed may leave half a line
                events.put((self, json.loads(line)))
        events.put((self, None))

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, which its output tells
            self._process.stdin.write(f"{json.dumps(message)}\n")
            self._process.stdin.flush()

    def start(self, item: WorkItem) -> None:
        """Let it carry out a group of runs."""
        self.item, item.device = item, self.device
        configs, folders = [describe(config) for config in item.configs], [str(path) for path in item.folders]
        self._send({"configs": configs, "folders": folders})
        log.info("%s trains on %s.", item.title, self.device)

    def stop(self) -> None:
        """Ask it to stop after the round in which it is, with checkpoints."""
        self._process.terminate()

    def exit_code(self) -> int:
        """How it has ended; a negative number is a signal."""
        return self._process.wait()

    def close(self) -> None:
        """Wait until it has ended; at once if it is still at work."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()  # so that it ends
        if self.item is not None:
            self._process.kill()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


Events = queue.SimpleQueue[tuple[_Worker, Event | None]]  # None when a worker has ended


def visible(device: str) -> str:
    """The value of CUDA_VISIBLE_DEVICES with which a process has this GPU only, or none for the CPU."""
    if device == "cpu":
        return ""
    number = int(device.partition(":")[2])
    mine = os.environ.get(VISIBLE)  # numbers count among those that this process has
    return mine.split(",")[number].strip() if mine else str(number)


def _failure(item: WorkItem, event: Event, folder: Path) -> Exception:
    """The exception for an error that a worker reports."""
    if event["user"]:
        if event["details"]:
            log.info("%s", event["details"].rstrip())
        return UserError(f"{item.name} on {item.device}: {event['sentence']}")
    return WorkerError(
        f"{item.name} on {item.device} ended with an error ({shown(event['sentence'])}); {_continue(folder)}.",
        event["details"],
    )


def _killed(item: WorkItem, code: int, folder: Path) -> WorkerError:
    """The exception for a worker that has ended without a word."""
    how = f"ended with exit code {code}"
    if code < 0:
        with suppress(ValueError):
            how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += ", maybe because memory is short"
    return WorkerError(f"The process that trained {item.name} on {item.device} {how}; {_continue(folder)}.")


def _continue(folder: Path) -> str:
    return f"the others have stopped with checkpoints, and --resume {folder} continues"
