"""Ray's side: actors are started when a run needs them, and serve one run after another until the session ends."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedloom.cluster.shards import USUAL
from fedloom.cluster.worker import RunSetup, Worker
from fedloom.core.errors import UserError

log = logging.getLogger("fedloom")

START_SECONDS = 300.0  # after which Ray has failed to start an actor
ADDRESS = "RAY_ADDRESS"  # Ray's variable with the address of a cluster
LOGS = "/tmp/ray/session_latest/logs"


def require_ray() -> Any:
    """The package ray. Raises UserError that says what to install if it is not there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UserError(
            f"engine=ray needs the package '{error.name or 'ray'}', which is not installed; install it with "
            "pip install 'fedloom[ray]'."
        ) from None


class _Session:
    """Ray, and the actors that are there."""

    def __init__(self) -> None:
        self.ray = require_ray()
        self.local = False  # Ray was started for FedLoom alone, on this machine
        self.handles: list[Any] = []
        self.serving: RayActors | None = None  # the actors of the run that they serve now
        self.on_gpus = False
        if self.ray.is_initialized():
            return
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if not os.environ.get(ADDRESS):
            self.local = True
            options |= {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        try:
            with _same_signal_handlers():
                self.ray.init(**options)
        except Exception as error:  # Ray raises all kinds
            raise UserError(f"Ray could not be started: {_first_line(error)}.") from None

    def resources(self, kind: str) -> int:
        """How many CPU or GPU Ray has."""
        if self.local and kind == "CPU":
            return os.cpu_count() or 1
        return int(self.ray.cluster_resources().get(kind, 0))

    def take(self, count: int, on_gpus: bool) -> list[Any]:
        """So many actors, each with a GPU or none."""
        kind = "GPU" if on_gpus else "CPU"
        there = self.resources(kind)
        if not on_gpus and self.local:  # a few may share a core, but each takes memory
            there = max(there, USUAL)
        if count > there:
            raise UserError(f"actors={count} is more than Ray has {kind}s for; use actors={there} or fewer.")
        if on_gpus != self.on_gpus:
            self.end_actors()
        self.on_gpus = on_gpus
        missing = [self.new() for _ in range(count - len(self.handles))]
        self.handles += missing
        for handle in missing:
            self.wait_for(handle)
        return self.handles[:count]

    def new(self) -> Any:
        """An actor that is being started. On this machine several may share a core, elsewhere Ray decides."""
        share = {"num_gpus": 1, "num_cpus": 0} if self.on_gpus else {"num_cpus": 0 if self.local else 1}
        return self.ray.remote(Worker).options(**share, scheduling_strategy="SPREAD").remote()

    def wait_for(self, handle: Any) -> None:
        """Wait until an actor has started."""
        try:
            self.ray.get(handle.do.remote("process"), timeout=START_SECONDS)
        except self.ray.exceptions.RayError as error:
            raise UserError(f"Ray could not start an actor: {_first_line(error)}.") from None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Context in which an error of Ray becomes a UserError. What an actor's work raises stays what it is."""
        errors = self.ray.exceptions
        try:
            yield
        except errors.RayError as error:
            if isinstance(error, errors.RayTaskError) and not isinstance(error, errors.ObjectLostError):
                raise (error.cause if isinstance(error.cause, UserError) else error) from None
            raise UserError(
                f"Ray failed: {_first_line(error)}; it may be short of memory or disk, see its messages in {LOGS}."
            ) from None

    def end_actors(self) -> None:
        """End all actors."""
        for handle in self.handles:
            self.ray.kill(handle)
        self.handles = []

    def close(self) -> None:
        """End all actors, and Ray if it was started here."""
        self.end_actors()
        self.serving = None
        if self.local:
            self.ray.shutdown()


@contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Context after which signals are handled as before, if the program does it itself: a run saves a checkpoint at
    SIGTERM, for which Ray sets a handler that ends the program, and Ray's processes."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals, and Ray knows that
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler not in (signal.SIG_DFL, None):  # None was not set by Python, and cannot be set by it
                signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    """The first sentence of an error's message."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split(". ")[0].rstrip(".:")


def pickled(setup: RunSetup) -> bytes:
    """The bytes of what actors need to know of a run. Methods and models of the user's own are part of them, because
    actors may not find their modules."""
    cloudpickle = importlib.import_module("ray.cloudpickle")
    modules = _own_modules(setup)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(setup)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise UserError(
            f"The method or the model cannot be sent to Ray's actors ({_first_line(error)}); use engine=vectorized."
        ) from None
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules(setup: RunSetup) -> list[ModuleType]:
    """Modules of the method, the model and the metric that are neither FedLoom's nor installed packages."""
    inside = [cell.cell_contents for cell in getattr(setup.make, "__closure__", None) or ()]
    layers = [type(layer) for thing in inside if isinstance(thing, nn.Module) for layer in thing.modules()]
    things = [
        *type(setup.alg).__mro__,
        setup.make,
        *inside,
        *map(type, inside),
        *layers,
        getattr(setup.metric, "per_client", None),
    ]
    names = {name for thing in things if isinstance(name := getattr(thing, "__module__", None), str)}
    found = [sys.modules[name] for name in sorted(names) if name in sys.modules and name.split(".")[0] != "fedloom"]
    return [m for m in found if m.__name__ != "__main__" and _is_own_file(getattr(m, "__file__", None))]


def _is_own_file(path: str | None) -> bool:
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return path is not None and not Path(path).is_relative_to(installed[0]) and not path.startswith(installed[1:])


_depth = 0
_current: _Session | None = None


@contextmanager
def session() -> Iterator[None]:
    """Within this context, actors serve one run after another; they end with the outermost one, as does Ray if it was
    started for them."""
    global _depth, _current
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth and _current is not None:
            ended, _current = _current, None
            ended.close()


def _session() -> _Session:
    global _current
    assert _depth, "actors are needed outside of a session"
    if _current is None:
        _current = _Session()
    return _current


def usual_number(on_gpus: bool) -> int:
    """How many actors there are if nobody says it: one per GPU, or per CPU core."""
    return max(1, _session().resources("GPU" if on_gpus else "CPU"))


class RayActors:
    """Actors of the session, numbered from 0, for one run: the next run that takes them ends its use."""

    def __init__(self, count: int, on_gpus: bool) -> None:
        gc.collect()  # runs that have ended: they are reference cycles, and hold objects in Ray's memory
        self.session = _session()
        self.handles = self.session.take(count, on_gpus)
        self.session.serving = self

    def __len__(self) -> int:
        return len(self.handles)

    def put(self, value: Any) -> Any:
        """A reference to a value, which all actors can read."""
        with self.session.errors():
            return self.session.ray.put(value)

    def get(self, reference: Any) -> Any:
        """The value that a reference of `put` stands for."""
        with self.session.errors():
            return self.session.ray.get(reference)

    def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a function of `Worker` at some actors, all at the same time. Actors that have ended are not among the
        results."""
        if self.session.serving is not self:
            raise UserError("The actors of this run have ended, or serve another run; load it from its folder.")
        ray = self.session.ray
        ended = ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError  # the latter if Ray itself has ended it
        results, messages = {}, dict[tuple[int, str], None]()
        with self.session.errors():
            asked = {i: self.handles[i].do.remote(name, *given) for i, given in arguments.items()}
            for i, reference in asked.items():
                with suppress(*ended):
                    results[i], logged = ray.get(reference)
                    messages |= dict.fromkeys(logged)
        for level, text in messages:  # each once, though several actors say it
            log.log(level, "%s", text)
        return results

    def replace(self, i: int) -> None:
        """Start another actor in place of one that has ended."""
        self.session.ray.kill(self.handles[i])  # Ray may only have lost touch with it
        self.session.handles[i] = self.handles[i] = self.session.new()
        self.session.wait_for(self.handles[i])

    def processes(self) -> list[int]:
        """The process of every actor."""
        return [self.session.ray.get(handle.do.remote("process"))[0] for handle in self.handles]
