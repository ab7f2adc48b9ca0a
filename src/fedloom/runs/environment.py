"""Versions, hardware, command and git commit of a run."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fedloom.device.machine import memory_bytes, processor

PACKAGES = ("fedloom", "torch", "numpy", "scikit-learn", "pyarrow", "safetensors")


def environment(device: torch.device) -> dict[str, Any]:
    """What is recorded of this machine and process."""
    found: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": platform.platform(),
        "host": platform.node(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "git": _git(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Git commit of the current folder, and whether there are uncommitted changes; None outside a repository."""
    try:
        commit = _call("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_call("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _call(*args: str) -> str:
    return subprocess.run(
        ["git", *args], capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL
    ).stdout.strip()
