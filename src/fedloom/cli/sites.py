"""The commands `fedloom keys`, `serve`, `join` and `status`: a federation whose sites keep their data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.command import Command, examples
from fedloom.cli.console import begin, err, out
from fedloom.cli.options import ConfigDict, option, pairs, setting_option, with_settings
from fedloom.core.errors import UserError

DOCS = "docs/federation.md"
NEEDS_FLOWER = "This needs Flower; install it with \"pip install 'fedloom[flower]'\"."
PORT = 8000


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(
        cls=Command,
        epilog=examples("fedloom keys federation --host server.example.org --sites 3", docs=DOCS),
    )(keys)
    app.command(
        cls=Command,
        epilog=examples(
            "fedloom serve fedrep --keys federation/server --rounds 50",
            "fedloom serve --keys federation/server --config study.yaml --out runs/study",
            docs=DOCS,
        ),
    )(serve)
    app.command(
        cls=Command,
        epilog=examples(
            "fedloom join site-0 --server 10.0.0.5:8000 --dataset patients.csv",
            "fedloom join site-1 --server 10.0.0.5:8000 --dataset scans/ --set label=ill",
            "fedloom join site-0 --dataset patients.csv --dry-run --method gpfl",
            docs=DOCS,
        ),
    )(join)
    app.command(
        cls=Command,
        epilog=examples(
            "fedloom status", "fedloom status federation/server --watch", "fedloom status site-0", docs=DOCS
        ),
    )(status)


def keys(
    folder: Annotated[Path, typer.Argument(help="where to make them", metavar="FOLDER", show_default=False)],
    host: Annotated[
        list[str] | None,
        option("--host", about="name or address under which sites reach the server; may be given several times",
               metavar="NAME"),
    ] = None,
    sites: Annotated[int, option("--sites", about="number of sites [2]", metavar="INT")] = 2,
    days: Annotated[int, option("--days", about="days until the certificates expire [365]", metavar="INT")] = 365,
) -> None:  # fmt: skip
    """Make certificates for a server, and a key for every site.

    FOLDER/server stays with the server. FOLDER/site-0, site-1, ... go to the sites' machines. What is there already
    stays, so more sites can be added.
    """
    _need_flower()
    from fedloom.deployment.flower.keys import make_keys

    begin()
    if sites < 1 or days < 1:
        raise UserError("A federation needs one site and one day at least.")
    made = make_keys(folder, host or ["localhost", "127.0.0.1"], sites, days)
    out.print("\n".join(map(str, made)), highlight=False, soft_wrap=True)
    err.print(f"{made[0]} stays here; the others go to their sites, over a channel that you trust.", soft_wrap=True)


@with_settings()
def serve(
    config: ConfigDict,
    algorithm: Annotated[
        str | None,
        typer.Argument(help="method, see 'fedloom list algorithms' [ditto]", metavar="METHOD", show_default=False),
    ] = None,
    keys: Annotated[
        Path, option("--keys", about="the server's folder, made by 'fedloom keys'", metavar="FOLDER", group="Sites")
    ] = Path("federation/server"),
    address: Annotated[
        str, option("--address", about="address of this machine to listen at [0.0.0.0]", metavar="NAME", group="Sites")
    ] = "0.0.0.0",
    port: Annotated[int, option("--port", about=f"port to listen at [{PORT}]", metavar="INT", group="Sites")] = PORT,
    deadline: Annotated[
        float, option("--deadline", about="seconds that sites have to answer [600]", metavar="FLOAT", group="Sites")
    ] = 600.0,
    minimum: Annotated[
        int | None,
        option("--minimum", about="replies that a round needs [all that are asked]", metavar="INT", group="Sites"),
    ] = None,
    repeats: Annotated[
        int,
        option("--repeats", about="how often missing replies are asked for again [2]", metavar="INT", group="Sites"),
    ] = 2,
    schema: Annotated[
        Path | None,
        option("--schema", about="what the sites' own samples look like [agreed on with them]", metavar="FILE",
               group="Task"),
    ] = None,
    out_: Annotated[
        Path | None, option("--out", about="folder for the results [runs/served]", metavar="FOLDER", group="Results")
    ] = None,
    verbose: Annotated[bool, option("--verbose", "-v", about="log what happens")] = False,
) -> None:  # fmt: skip
    """Train one method with the sites of a federation.

    The sites' data stay where they are; what a method sends is listed in the documentation. Without --dataset, sites
    take part with data of their own. The same command continues a run that was stopped.
    """
    _need_flower()
    from fedloom.cli import display
    from fedloom.config.resolve import combine, describe, resolve
    from fedloom.deployment.flower.launch import Server
    from fedloom.deployment.flower.processes import ended_by_signals
    from fedloom.deployment.own_data import read_schema
    from fedloom.studies.result import load_run

    begin(verbose)
    given = combine(config, {"algorithm": algorithm} if algorithm is not None else {})
    own = "dataset" not in given
    if schema is not None and not own:
        raise UserError("A schema describes the sites' own data; leave out --schema, or --dataset.")
    server, folder = Server(keys, address, port), (out_ or Path("runs/served")).absolute()
    clients = server.sites()
    job: dict[str, Any] = {
        "config": given if own else describe(resolve(combine(given, {"clients": clients}))),
        "clients": clients if own else None,
        "schema": read_schema(schema).to_json() if schema is not None else None,
        "terms": {"deadline": deadline, "minimum": minimum, "repeats": repeats},
        "out": str(folder),
    }
    err.print(f"Waiting for {clients} sites at port {port}; results go to {folder}.", highlight=False, soft_wrap=True)
    try:
        with ended_by_signals(), display.served_rounds(err, folder) as watch:
            server.carry_out(job, watch)
    except KeyboardInterrupt:
        err.print(f"Stopped. The same command continues; the run is in {folder}.", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    display.print_result(out, load_run(folder))


def join(
    folder: Annotated[
        Path, typer.Argument(help="the site's folder, made by 'fedloom keys'", metavar="FOLDER", show_default=False)
    ],
    server: Annotated[
        str | None, option("--server", about="where the server is", metavar="HOST:PORT", group="Sites")
    ] = None,
    dataset: Annotated[
        str | None,
        option("--dataset", about="path to the site's data, or name of a data set", metavar="NAME|PATH", group="Task"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        option("--set", about="what the data do not say: --set label=NAME, see 'fedloom list datasets own'",
               metavar="KEY=VALUE", group="Task"),
    ] = None,
    data_dir: Annotated[str | None, setting_option("data_dir")] = None,
    device: Annotated[str | None, setting_option("device")] = None,
    schema: Annotated[
        Path | None,
        option("--schema", about="what samples look like, whatever the server says (fedloom data schema)",
               metavar="FILE", group="Task"),
    ] = None,
    max_epsilon: Annotated[
        float | None,
        option("--max-epsilon", about="differential privacy that the site asks for, of all runs together [none]",
               metavar="FLOAT", group="Sites"),
    ] = None,
    dry_run: Annotated[
        bool, option("--dry-run", about="list what would be sent, and send nothing", group="Dry run")
    ] = False,
    method: Annotated[
        str | None, option("--method", about="method of the dry run [ditto]", metavar="METHOD", group="Dry run")
    ] = None,
    json: Annotated[bool, option("--json", about="the dry run's list, machine-readable", group="Dry run")] = False,
) -> None:  # fmt: skip
    """Take part in a federation with this machine's data.

    It goes on until it is stopped. The data and the private state of the client stay in this machine. What was trained
    is in the site's folder, so it may be stopped and started again at any time.
    """
    _need_flower()
    from fedloom.data.sets.own import OwnData, user_data_path
    from fedloom.deployment.flower.keys import client_of
    from fedloom.deployment.flower.launch import join as take_part
    from fedloom.deployment.flower.processes import ended_by_signals

    begin(verbose=not dry_run)  # who runs it wants to see what happens with the data
    if dataset is None or (server is None and not dry_run):
        missing = "--dataset PATH" if dataset is None else "--server HOST:PORT"
        raise UserError(f"A site needs to know its server and its data; give {missing}.")
    if (method is not None or json) and not dry_run:
        raise UserError("The method is chosen at the server; --method and --json are for --dry-run.")
    path = user_data_path(dataset)
    section: dict[str, Any] = {"name": dataset} if path is None else {"name": OwnData.name, "path": path}
    local: dict[str, Any] = {"dataset": {**section, **pairs(set_ or [])}, "device": device or "auto"}
    if max_epsilon is not None:
        if not 0 < max_epsilon < math.inf:
            raise UserError(f"max-epsilon must be above 0, not {max_epsilon:g}.")
        local["max_epsilon"] = max_epsilon
    if schema is not None:
        if path is None:
            raise UserError("A schema describes data of your own; leave out --schema for a data set with a name.")
        local["schema"] = str(schema.absolute())
    if data_dir is not None:
        local["data_dir"] = str(Path(data_dir).absolute())
    if dry_run:
        from fedloom.cli import display
        from fedloom.deployment.dry_run import what_is_sent

        display.print_sent(out, what_is_sent(client_of(folder), local, method or "ditto"), json)
        return
    assert server is not None
    err.print(f"Client {client_of(folder)} takes part at {server}; Ctrl-C ends it.", highlight=False, soft_wrap=True)
    with ended_by_signals():
        take_part(folder, server, local)


def status(
    folder: Annotated[
        Path,
        typer.Argument(help="a server's folder, or a site's [federation/server]", metavar="FOLDER", show_default=False),
    ] = Path("federation/server"),
    watch: Annotated[bool, option("--watch", about="go on until Ctrl-C")] = False,
) -> None:
    """Show how far a federation is, and which of its sites are there.

    At the server: the round, the accuracy, and for every site what it does and when it last answered. At a site:
    whether it takes part, and which models it has.
    """
    _need_flower()
    from fedloom.cli import display
    from fedloom.deployment.flower.overview import overview

    begin()
    display.print_overview(out, lambda: overview(folder), watch)


def _need_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError(NEEDS_FLOWER) from None
