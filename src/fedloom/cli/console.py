"""Where output goes: results to stdout, everything else to stderr."""

import logging

from rich.console import Console
from rich.logging import RichHandler

out, err = Console(), Console(stderr=True)


def log(verbose: bool) -> None:
    level = logging.INFO if verbose else logging.WARNING
    handler = RichHandler(level, console=err, show_time=False, show_path=False, show_level=False)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
