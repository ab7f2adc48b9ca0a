"""The consoles: `out` (stdout) for results, `err` (stderr) for everything else."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler

from fedloom.cli.main import imports_done

out, err = Console(), Console(stderr=True)


def begin(verbose: bool = False) -> None:
    """To be called when a command has imported what it needs. Log records go to stderr: warnings, and with `verbose`
    also what the engine decides."""
    imports_done()
    level = logging.INFO if verbose else logging.WARNING
    handler = RichHandler(level, console=err, show_time=False, show_path=False, show_level=False)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])


@contextmanager
def no_warnings() -> Iterator[None]:
    """Within this context, warnings are not shown."""
    log = logging.getLogger("fedloom")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
