"""The entry point of the program `fedloom`, which imports nothing else at first: importing torch takes seconds, and in
them, too, Ctrl-C must end the program in order."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command that the arguments ask for, and exit: with 2 and one sentence if something is wrong with it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        from fedloom.cli.commands import run_command

        run_command()
    finally:
        imports_done()


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Ctrl-C during imports. An exception there would be caught or reworded by the modules that are being imported."""
    os._exit(130)


def imports_done() -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _exit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
