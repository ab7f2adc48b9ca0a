"""The commands `fedloom data check`, `show` and `download`, which do not train."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli import display
from fedloom.cli.check_report import print_check
from fedloom.cli.console import begin, err, out
from fedloom.cli.options import SETTINGS, pairs, with_settings

app = typer.Typer(help="Fetch data, look at data, before training.", rich_markup_mode=None, invoke_without_command=True)
PLAIN: dict[str, Any] = {"show_default": False, "metavar": "VALUE"}
ConfigDict = dict[str, Any]


@app.callback()
def _print_help(context: typer.Context) -> None:
    """Without a command, print the help."""
    if context.invoked_subcommand is None:
        out.print(context.get_help(), highlight=False, markup=False)


@app.command()
def check(
    path: Annotated[str, typer.Argument(help="file or folder with your own data", metavar="PATH")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="what the data do not say: --set label=NAME, see 'fedloom list datasets own'",
            metavar="KEY=VALUE",
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", help=SETTINGS["partition"], **PLAIN)] = None,
    clients: Annotated[str | None, typer.Option("--clients", help=SETTINGS["clients"], **PLAIN)] = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Check your own data: what is there, and what is wrong with it, before any training."""
    from fedloom.config.resolve import configure
    from fedloom.core.errors import UserError
    from fedloom.core.settings import build
    from fedloom.data.sets.own import OwnData
    from fedloom.data.user_data.check import check as examine
    from fedloom.studies.build import make_task

    begin()
    count = {} if clients is None else {"clients": clients}
    settings = {key.removeprefix("dataset."): value for key, value in pairs(set_ or []).items()}
    dataset = build(OwnData, {**settings, "path": path}, "your own data")
    report = examine(dataset)
    if report["ready"]:
        try:
            make_task(configure(dataset=dataset, partition=partition, values={"device": "cpu", **count}))
        except UserError as error:
            report |= {"ready": False, "problems": [{"kind": "run", "text": str(error)}]}
    options = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    for name, value in (("--partition", partition), ("--clients", clients)):
        options += [] if value is None else [name, value]
    print_check(out, report, options, json)
    if not report["ready"]:
        raise typer.Exit(2)


@app.command(name="show")
@with_settings("dataset", "partition", "clients", "holdout_clients", "data_dir")
def show_(
    config: ConfigDict,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="file for a picture (png, svg or pdf)", **PLAIN)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Show how a data set would be divided among clients, without training."""
    from fedloom.config.resolve import combine, resolve
    from fedloom.report import partition
    from fedloom.studies.build import make_data

    begin()
    if picture is not None:
        partition.check_image_path(picture)
    federation = make_data(resolve(combine({"device": "cpu"}, config)))
    display.print_partition(out, partition.describe(federation), json)
    if picture is not None:
        partition.draw(federation, picture)
        err.print(f"Picture: {picture}", highlight=False, soft_wrap=True)


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="data set, see 'fedloom list datasets'", metavar="NAME")],
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="folder for data sets [$FEDLOOM_DATA, or a cache]", **PLAIN)
    ] = None,
) -> None:
    """Fetch a data set from its publisher; what is there already is not fetched again."""
    from fedloom.data import fetch
    from fedloom.data.dataset import DATASETS, folders

    begin()
    dataset = DATASETS[name]
    if dataset.built_in:
        out.print(f"{name} needs no download: {dataset.about}.", highlight=False, soft_wrap=True)
        return
    if dataset.debian is not None and data_dir is None and dataset.debian[1].is_dir():
        package, place = dataset.debian
        message = f"{name} is there already: {place}, from Debian's package '{package}'."
        out.print(f"{message} With --data-dir FOLDER it is downloaded.", highlight=False, soft_wrap=True)
        return
    if dataset.sources:
        folder = folders(dataset, data_dir)[0]
        facts = {"Data set": f"{dataset.about}; {dataset.size}", "Licence": dataset.licence, "Folder": folder}
        for title, text in facts.items():
            err.print(f"{title}: {text}", highlight=False, markup=False, soft_wrap=True)
    try:
        with display.download_progress(err) as on_progress:
            folder = fetch.download(dataset, data_dir, on_progress)
    except KeyboardInterrupt:
        again = f"fedloom data download {name}" + (f" --data-dir {data_dir}" if data_dir is not None else "")
        err.print(f"Stopped.\nContinue with: {again}", highlight=False, markup=False, soft_wrap=True)
        sys.exit(130)
    out.print(f"{name} is in {folder}", highlight=False, markup=False, soft_wrap=True)
