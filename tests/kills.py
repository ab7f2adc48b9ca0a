"""Commands in processes that are killed: from outside after some time, or at an exact operation on files."""

import functools
import json
import multiprocessing
import os
import pkgutil
import signal
import sys
from pathlib import Path

import fedloom

OPERATIONS = ("open", "fsync", "replace", "pwrite", "unlink", "mkdir")

# files of a run that do not depend on the clock, so a run that was killed and resumed has the same bytes in them
REPRODUCIBLE_FILES = (
    "final/server.safetensors", "final/clients.safetensors", "rounds.parquet", "clients.parquet", "reports.parquet",
    "partition.parquet", "summary.json", "config.yaml",
)  # fmt: skip

forkserver = multiprocessing.get_context("forkserver")
# Imported once by the server instead of by every process, where it would take seconds. Triton may not be installed, and
# `fedloom.__main__` is a command.
modules = [module.name for module in pkgutil.walk_packages(fedloom.__path__, "fedloom.")]
modules = [name for name in modules if ".triton." not in name and not name.endswith("__main__")]
forkserver.set_forkserver_preload([*modules, "sklearn.datasets", "torch._dynamo", "typer._adapters"])


def assert_same_files(found: Path, expected: Path) -> None:
    """Two folders of runs have the same bytes in all files that do not depend on the clock."""
    for name in REPRODUCIBLE_FILES:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


class KillAtOperation:
    """Keeps a log of operations on files, and kills this process before one of them: the `at`-th, counted from the
    first on a path that contains `mark`. A new file that was about to be flushed to the disk is left half written."""

    def __init__(self, at: int | None, mark: str) -> None:
        self.at, self.mark = at, mark
        self.log: list[str] = []
        self.count = 0

    def step(self, path: str | int) -> None:
        self.log.append(str(path))
        self.count += self.count > 0 or self.mark in str(path)
        if self.count == self.at:
            if isinstance(path, int) and os.readlink(f"/proc/self/fd/{path}").endswith(".partial"):
                os.ftruncate(path, os.fstat(path).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._before(getattr(os, name)))

    def _before(self, original):
        @functools.wraps(original)
        def call(*args, **kwargs):
            self.step(args[0])
            return original(*args, **kwargs)

        return call


def _run_command(command: list[str], at: int | None, mark: str, log_file: str | None) -> None:
    import torch

    torch.set_num_threads(1)
    kill = KillAtOperation(at, mark)
    kill.install()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.argv = ["fedloom", *command]
    from fedloom.cli.main import main

    try:
        main()
    finally:
        if log_file is not None:
            Path(log_file).write_text(json.dumps(kill.log))


def run_process(command: list[str], at=None, mark="", after: float | None = None, log_file: Path | None = None) -> int:
    """Run a command in a process of its own; killed at an operation on files (see `KillAtOperation`), or `after` so
    many seconds. Returns the exit code, negative if it was killed; otherwise `log_file` gets the operations."""
    log_path = None if log_file is None else str(log_file)
    process = forkserver.Process(target=_run_command, args=(command, at, mark, log_path))
    process.start()
    process.join(after)
    if after is not None and process.is_alive():
        process.kill()
    process.join(120)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode
