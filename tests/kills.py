"""Real processes that are killed: from outside after some time, or at an exact operation on files."""

import functools
import json
import multiprocessing
import os
import pathlib
import pkgutil
import signal
import sys
from pathlib import Path

import fedloom

OPERATIONS = ("open", "fsync", "replace", "pwrite", "unlink", "mkdir")

# what does not depend on the clock
SAME = (
    "final/server.safetensors", "final/clients.safetensors", "rounds.parquet", "clients.parquet", "reports.parquet",
    "partition.parquet", "summary.json", "config.yaml",
)  # fmt: skip

server = multiprocessing.get_context("forkserver")
# what a run imports: seconds in every life. The kernels need Triton, and `fedloom.__main__` is a command
ours = [module.name for module in pkgutil.walk_packages(fedloom.__path__, "fedloom.")]
ours = [name for name in ours if not name.endswith(("_triton", "__main__"))]
server.set_forkserver_preload([*ours, "sklearn.datasets", "torch._dynamo", "typer._adapters"])


class Deadly:
    """Keeps a log of operations on files, and kills this process at one of them: before it, or with a file half
    written. Which one: the `at`-th, counted from the first on a path that contains `mark`."""

    def __init__(self, at: int | None, mark: str) -> None:
        self.at, self.mark = at, mark
        self.log: list[str] = []
        self.count = 0

    def step(self, path: str) -> None:
        self.log.append(path)
        self.count += self.count > 0 or self.mark in path
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._before(getattr(os, name)))
        whole = pathlib.Path.write_bytes

        def write_bytes(path, data):
            whole(path, data[: len(data) // 2])
            self.step(str(path))
            return whole(path, data)

        pathlib.Path.write_bytes = write_bytes

    def _before(self, original):
        @functools.wraps(original)
        def call(*args, **kwargs):
            self.step(str(args[0]))
            return original(*args, **kwargs)

        return call


def _life(command: list[str], at: int | None, mark: str, report: str | None) -> None:
    import torch

    torch.set_num_threads(1)
    deadly = Deadly(at, mark)
    deadly.install()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.argv = ["fedloom", *command]
    from fedloom.cli.main import main

    try:
        main()
    finally:
        if report is not None:
            Path(report).write_text(json.dumps(deadly.log))


def live(command: list[str], at=None, mark="", after: float | None = None, report: Path | None = None) -> int:
    """Run a command in a process of its own; killed at an operation on files (see `Deadly`), or `after` so many
    seconds. Returns the exit code, negative if it was killed; `report` gets the log of operations otherwise."""
    process = server.Process(target=_life, args=(command, at, mark, None if report is None else str(report)))
    process.start()
    process.join(after)
    if after is not None and process.is_alive():
        process.kill()
    process.join(120)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode
