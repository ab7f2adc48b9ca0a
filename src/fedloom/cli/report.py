"""The command `fedloom report`, and the page that other commands write when they are done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.command import examples
from fedloom.cli.console import begin, err, out
from fedloom.cli.options import option
from fedloom.core.errors import UserError

PORT = 8765


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="folder of a run, a comparison, a sweep, or of runs on one task", metavar="FOLDER", show_default=False
        ),
    ],
    out_: Annotated[
        Path | None, option("--out", about="file for the page [FOLDER/report.html]", metavar="FILE")
    ] = None,
    live: Annotated[
        bool, option("--live", about="serve the page to browsers on this machine, and keep it current")
    ] = False,
    port: Annotated[int | None, option("--port", about=f"port of a live page [{PORT}]", metavar="INT")] = None,
) -> None:
    """Write a page about runs, for browsers.

    It shows who is served how well, who gains and who loses, what it cost and what was sent. It is one file, and needs
    no network. Runs need not be finished.
    """
    from fedloom.studies.live_report import LiveReport
    from fedloom.studies.report import write_report

    begin()
    if port is not None and (not live or not 0 <= port < 2**16):
        raise UserError("--port is a number from 0 to 65535 (0: any free one), and needs --live.")
    if not live:
        out.print(f"Report: {write_report(folder, out_)}", highlight=False, soft_wrap=True)
        return
    if out_ is not None:
        raise UserError("--live and --out exclude each other; give one of them.")
    with LiveReport(folder, PORT if port is None else port) as server:
        out.print(f"Open {server.address} in a browser; Ctrl-C ends this.", highlight=False, soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


COMMANDS: dict[Callable[..., None], str] = {  # the commands, and the ends of their help
    report: examples(
        "fedloom report runs/compare-digits-1",
        "fedloom report runs/ditto-digits-1 --out ditto.html",
        "fedloom report runs/compare-digits-1 --live",
        docs="docs/report.md",
    ),
}


def write_pages(folders: Sequence[Path]) -> None:
    """Write the pages of runs that have just ended, and say where they are. What goes wrong is said, too, and does not
    change how the command ends: the runs are complete."""
    from fedloom.studies.report import write_report

    for folder in folders:
        try:
            path = write_report(folder)
        except Exception as error:
            err.print(f"The report of {folder} was not written: {error}", highlight=False, markup=False, soft_wrap=True)
        else:
            out.print(f"Report: {path}", highlight=False, markup=False, soft_wrap=True)
