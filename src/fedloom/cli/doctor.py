"""The command `fedloom doctor`."""

from __future__ import annotations

import json as json_
from typing import Annotated

import typer
from rich.text import Text

from fedloom.cli.command import examples
from fedloom.cli.console import begin, no_warnings, out
from fedloom.cli.options import Json, option

STYLES = {"ok": "", "missing": "yellow", "wrong": "red"}


def doctor(
    test: Annotated[bool, option("--test/--no-test", about="train for some seconds on every device [yes]")] = True,
    clear_cache: Annotated[
        bool, option("--clear-cache", about="remove execution plans and kernels that earlier runs have left")
    ] = False,
    json: Json = False,
) -> None:
    """Show the machine, what FedLoom can use of it, and test it.

    Exits with 1 if something is wrong.
    """
    from fedloom.storage import user_cache
    from fedloom.studies.doctor import CACHE_KINDS, Finding, examine

    begin()
    if clear_cache:
        removed = sum(user_cache.clear(kind) for kind in CACHE_KINDS)
        if not json:
            out.print(f"Removed {removed} files from {user_cache.cache_folder()}.\n", highlight=False)
    found: list[Finding] = []
    with no_warnings():
        for finding in examine(test):
            if not json:
                _print(finding, first=not found or found[-1].part != finding.part)
            found.append(finding)
    wrong = [finding for finding in found if finding.state == "wrong"]
    if json:
        out.print_json(json_.dumps([finding._asdict() for finding in found]))
    elif wrong:
        out.print(f"\nTo be mended: {', '.join(finding.name for finding in wrong)}.", style="red", highlight=False)
    else:
        out.print("\nNothing is wrong.", highlight=False)
    if wrong:
        raise typer.Exit(1)


def _print(finding: tuple[str, str, str, str], first: bool) -> None:
    part, name, value, state = finding
    if first:
        out.print(f"\n[bold]{part}[/]", highlight=False)
    line = Text(f" {name:<14} ")
    line.append(value, STYLES[state])
    out.print(line, highlight=False, soft_wrap=True)


COMMANDS = {doctor: examples("fedloom doctor", "fedloom doctor --no-test --json", docs="docs/doctor.md")}
