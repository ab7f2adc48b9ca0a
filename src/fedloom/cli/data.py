"""`fedloom data`: what can be asked about data without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli import show
from fedloom.cli.console import err, log, out
from fedloom.cli.options import with_settings

app = typer.Typer(help="Look at data before training on them.", rich_markup_mode=None, invoke_without_command=True)
PLAIN: dict[str, Any] = {"show_default": False, "metavar": "VALUE"}
Request = dict[str, Any]


@app.callback()
def _top(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        out.print(context.get_help(), highlight=False, markup=False)


@app.command(name="show")
@with_settings("dataset", "partition", "clients", "data_dir")
def show_(
    request: Request,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="file for a picture (png, svg or pdf)", **PLAIN)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Show who would have which data, without training."""
    log(False)
    from fedloom.config import combine, resolve
    from fedloom.experiment import make_data
    from fedloom.report import partition

    if picture is not None:
        partition.check_picture(picture)
    federation = make_data(resolve(combine({"device": "cpu"}, request)))
    show.partition(out, partition.describe(federation), json)
    if picture is not None:
        partition.draw(federation, picture)
        err.print(f"Picture: {picture}", highlight=False, soft_wrap=True)
