"""Execution plans that were measured by earlier processes, for runs that do the same on the same machine.

A plan is found again if everything is equal that it depends on: the machine, versions of programs, the method and its
settings, the model, and the sizes of the data, of which large ones are rounded.
"""

import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import getsourcefile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedloom
from fedloom.core.algorithm import Algorithm
from fedloom.core.task import Task
from fedloom.device.machine import processor
from fedloom.device.memory import limit_of_memory
from fedloom.engine.plan import Plan
from fedloom.engine.planning.measure import Workload
from fedloom.nn.kernels.dispatch import DISABLED
from fedloom.storage import user_cache
from fedloom.storage.files import json_writer

KIND = "plans"
FORMAT = 1
PACKAGES = ("torch", "triton", "numpy")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the description of an object that has no other


def find_plan(inputs: dict[str, Any] | None) -> Plan | None:
    """The plan that was measured for these inputs, if it is known."""
    if inputs is None:
        return None

    def read(content: bytes) -> Plan:
        found = json.loads(content)
        if found["inputs"] != inputs:
            raise ValueError("it is for other inputs")
        plan = Plan(**found["plan"])
        plan.check()
        return plan

    return user_cache.find(KIND, _name(inputs), read)


def keep_plan(inputs: dict[str, Any] | None, plan: Plan) -> None:
    """Keep a plan for later processes."""
    if inputs is not None:
        user_cache.keep(KIND, _name(inputs), json_writer({"inputs": inputs, "plan": plan.record()}))


def _name(inputs: dict[str, Any]) -> str:
    return f"{user_cache.digest(inputs)}.json"


def plan_inputs(load: Workload, mode: str, runs: int, shards: int) -> dict[str, Any] | None:
    """All that a plan depends on, as plain data. None if that cannot be said, for example of a method that was written
    in a notebook and may be another one next time."""
    if not user_cache.is_enabled():
        return None
    network: Any = load.task.network
    types = [*_types(load.alg), *getattr(network, "types", ())]
    sources = _sources(types)
    if sources is None:
        return None
    inputs = {
        "format": FORMAT,
        "machine": _machine(load.task.data.device),
        "versions": _versions(),
        "fedloom": _package_state(),
        "sources": sources,
        "kernels": [*sorted(DISABLED), os.environ.get("FEDLOOM_GPU", "")],
        "method": _described(load.alg),
        "task": _settings(load.task),
        "model": [getattr(network, "structure", ""), bool(network.half)],
        "data": _data(load),
        "mode": [mode, runs, shards, limit_of_memory(load.task.data.device)],
    }
    text = json.dumps(inputs, default=str)  # data may have numbers of NumPy
    return None if ADDRESS.search(text) else json.loads(text)


def _types(alg: Algorithm) -> Iterable[type]:
    return {type(one) for one in getattr(alg, "algs", (alg,))}  # of stacked runs that differ in settings


def _described(alg: Algorithm) -> Any:
    stacked: Any = alg
    if hasattr(alg, "algs"):
        return [[_described(one) for one in stacked.algs], [_settings(task) for task in stacked.tasks]]
    return [type(alg).__module__, repr(alg)]


def _settings(task: Task) -> dict[str, str]:
    """Settings of local training; the number of rounds, which decides what pays, is rounded."""
    found = {f.name: repr(getattr(task, f.name)) for f in fields(task) if f.name not in ("data", "network", "rounds")}
    return {**found, "rounds": str(_rounded(task.rounds))}


def _data(load: Workload) -> list[Any]:
    data, ids = load.task.data, load.cohort.ids
    sizes = {name: split.sizes[ids] for name, split in load.population.data.splits.items()}
    summary = {
        name: [_rounded(value) for value in (found.max(initial=0), found.sum(), np.median(found) if len(found) else 0)]
        for name, found in sizes.items()
    }
    shapes = [list(data.x.shape[1:]), str(data.x.dtype), list(data.y.shape[1:]), str(data.y.dtype), str(data.dtype)]
    cohort = [len(ids), len(np.unique(load.cohort.run)), int(load.cohort.scored.sum()), load.eval_clients]
    return [shapes, data.kind, data.classes, data.vocab, summary, cohort, data.held_out > 0]


def _rounded(value: float) -> int:
    """A size, rounded to about 20 %."""
    return round(4 * math.log2(value + 1))


@cache
def _machine(device: torch.device) -> list[Any]:
    found: list[Any] = [device.type, torch.get_num_threads(), os.cpu_count(), processor(), platform.system()]
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found += [gpu.name, gpu.total_memory, gpu.multi_processor_count, torch.cuda.get_device_capability(device)]
    return found


@cache
def _versions() -> list[str | None]:
    return [platform.python_version(), torch.version.cuda, *map(_version, PACKAGES)]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _package_state() -> list[Any]:
    """The version of FedLoom, and, for those who change it, how many files it has and when the last one was changed."""
    files = [path.stat() for path in Path(fedloom.__file__).parent.rglob("*.py")]
    return [fedloom.__version__, len(files), sum(f.st_size for f in files), max(f.st_mtime_ns for f in files)]


def _sources(types: Iterable[type]) -> list[Any] | None:
    """State of the files in which classes are that belong neither to FedLoom nor to torch; None if one has no file."""
    found = set()
    for one in types:
        if one.__module__.partition(".")[0] in ("fedloom", "torch"):
            continue
        try:
            path = getsourcefile(sys.modules[one.__module__])
            state = None if path is None else os.stat(path)
        except (KeyError, OSError, TypeError):
            return None
        if path is None or state is None:
            return None
        found.add((path, state.st_size, state.st_mtime_ns))
    return sorted(map(list, found))
