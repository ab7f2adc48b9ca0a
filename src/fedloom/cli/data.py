"""The commands `fedloom data check`, `show`, `schema` and `download`, which do not train."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import completion
from fedloom.cli.command import Command, Group, examples
from fedloom.cli.console import begin, err, out
from fedloom.cli.options import ConfigDict, Json, option, pairs, setting_option, with_settings

app = typer.Typer(
    cls=Group,
    help="Fetch data, and look at data before training.",
    epilog=examples(
        "fedloom data check hospitals.csv",
        "fedloom data show --dataset fmnist --clients 50",
        "fedloom data download fmnist",
        docs="docs/data.md, docs/own-data.md",
    ),
    rich_markup_mode=None,
    invoke_without_command=True,
)


@app.callback()
def _print_help(context: typer.Context) -> None:
    """Without a command, print the help."""
    if context.invoked_subcommand is None:
        out.print(context.get_help(), highlight=False, markup=False)


@app.command(
    cls=Command,
    epilog=examples(
        "fedloom data check hospitals.csv",
        "fedloom data check hospitals.csv --set label=diagnosis --set client=site",
        "fedloom data check pictures/ --partition dirichlet_class --clients 10",
        docs="docs/own-data.md",
    ),
)
def check(
    path: Annotated[str, typer.Argument(help="file or folder with your own data", show_default=False, metavar="PATH")],
    set_: Annotated[
        list[str] | None,
        option(
            "--set",
            about="what the data do not say: --set label=NAME, see 'fedloom list datasets own'",
            metavar="KEY=VALUE",
            group="Task",
        ),
    ] = None,
    partition: Annotated[str | None, setting_option("partition")] = None,
    clients: Annotated[str | None, setting_option("clients")] = None,
    json: Json = False,
) -> None:
    """Check your own data: what is there, and what is wrong with it."""
    from fedloom.cli.check_report import print_check
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


@app.command(
    name="show",
    cls=Command,
    epilog=examples(
        "fedloom data show --dataset fmnist --clients 50 --set beta=0.5",
        "fedloom data show --dataset hospitals.csv --picture clients.png",
        docs="docs/data.md",
    ),
)
@with_settings("dataset", "partition", "clients", "holdout_clients", "data_dir")
def show_(
    config: ConfigDict,
    picture: Annotated[
        Path | None,
        option("--picture", about="file for a picture: .png, .svg or .pdf", metavar="FILE", group="Results"),
    ] = None,
    json: Json = False,
) -> None:
    """Show how a data set is divided among clients."""
    from fedloom.cli import display
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


@app.command(
    cls=Command,
    epilog=examples(
        "fedloom data schema public.csv",
        "fedloom data schema public.csv --set label=diagnosis --out schema.json",
        docs="docs/federation.md",
    ),
)
def schema(
    path: Annotated[str, typer.Argument(help="file or folder with your own data", show_default=False, metavar="PATH")],
    out_: Annotated[Path, option("--out", about="file to write [schema.json]", metavar="FILE", group="Results")] = Path(
        "schema.json"
    ),
    set_: Annotated[
        list[str] | None,
        option("--set", about="what the data do not say: --set label=NAME, see 'fedloom list datasets own'",
               metavar="KEY=VALUE", group="Task"),
    ] = None,
) -> None:  # fmt: skip
    """Write down what samples look like, for the sites of a federation.

    The file has the columns, words, classes and the scale of numbers. With it, sites need not say before training what
    they have.
    """
    from fedloom.core.settings import build
    from fedloom.data.sets.own import OwnData
    from fedloom.deployment.own_data import make_schema
    from fedloom.storage.files import json_writer, write_file

    begin()
    settings = {key.removeprefix("dataset."): value for key, value in pairs(set_ or []).items()}
    found = make_schema(build(OwnData, {**settings, "path": path}, "your own data"))
    write_file(out_, json_writer(found.to_json()))
    what = f"{len(found.columns)} columns, " if found.columns else ""
    out.print(f"{out_}: {what}{len(found.classes)} classes" if found.target != "number" else f"{out_}: {what}a number")


@app.command(
    cls=Command,
    epilog=examples(
        "fedloom data download fmnist",
        "fedloom data download cifar100 --data-dir ~/data",
        docs="docs/data.md",
    ),
)
def download(
    name: Annotated[
        str,
        typer.Argument(
            help="data set, see 'fedloom list datasets'",
            show_default=False,
            metavar="NAME",
            autocompletion=lambda: completion.names("datasets"),
        ),
    ],
    data_dir: Annotated[
        Path | None,
        option("--data-dir", about="folder for data sets [$FEDLOOM_DATA, or a cache]", metavar="FOLDER"),
    ] = None,
) -> None:
    """Fetch a data set from its publisher, unless it is there already."""
    from fedloom.cli import display
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
