"""The consoles: `out` (stdout) for results, `err` (stderr) for everything else."""

import logging

from rich.console import Console
from rich.logging import RichHandler

out, err = Console(), Console(stderr=True)


def log(verbose: bool) -> None:
    """Send log records to stderr: warnings, and with `verbose` also what the engine decides."""
    level = logging.INFO if verbose else logging.WARNING
    handler = RichHandler(level, console=err, show_time=False, show_path=False, show_level=False)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
