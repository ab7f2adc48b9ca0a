"""The program `fedloom`: its commands and their options, and one sentence for what goes wrong."""

import contextlib
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from fedloom.cli import audit, completion, data, doctor, figures, models, report, sites
from fedloom.cli.command import Command, Group, UsageError, examples
from fedloom.cli.console import begin, err, no_warnings, out
from fedloom.cli.options import ConfigDict, Json, option, pairs, with_settings
from fedloom.core.errors import UserError, WorkerError, is_plain_text, printable, system_error, unknown
from fedloom.trackers import TRACKERS

app = typer.Typer(
    cls=Group,
    help="Personalized federated learning: many clients train together, each ends up with a model that is good for it.",
    epilog=examples(
        "fedloom run",
        "fedloom compare fedavg fedrep ditto --seeds 3",
        "fedloom list algorithms",
        docs="README.md, docs/",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
RESUMABLE = ("config.yaml", "compare.yaml", "sweep.yaml")  # a folder with one of these can be resumed
REPRODUCTION = ("rounds", "data_dir", "eval_clients", "device", "dtype", "plan", "store", "keep")  # its settings
COSTS = (  # settings that costs depend on
    "dataset", "partition", "model", "clients", "data_dir", "rounds", "participation", "local_epochs", "batch_size",
)  # fmt: skip
KINDS = ("algorithms", "datasets", "models", "partitions", "presets", "settings")
SAME_KIND = {"methods": "algorithms"}  # as the documentation calls them

Out = Annotated[
    Path | None, option("--out", about="folder for the results [runs/NAME-N]", metavar="FOLDER", group="Results")
]
NoSave = Annotated[bool, option("--no-save", about="write no files", group="Results")]
Resume = Annotated[
    Path | None,
    option("--resume", about="continue what was started in this folder", metavar="FOLDER", group="Results"),
]
Tracker = Annotated[
    list[str] | None,
    option(
        "--tracker",
        about="log metrics there, too, see docs/callbacks.md; may be given several times",
        metavar="|".join(TRACKERS),
        group="Results",
    ),
]
Devices = Annotated[
    str | None,
    option(
        "--devices",
        about="train on several devices, a process on each: 0,1 for two GPUs, or cpu,cpu",
        metavar="NAME,...",
        group="Execution",
    ),
]
Verbose = Annotated[bool, option("--verbose", "-v", about="log the execution plan and the kernels used")]


def _method_argument(about: str, metavar: str = "METHOD") -> Any:
    return typer.Argument(
        help=about, metavar=metavar, show_default=False, autocompletion=lambda: completion.names("algorithms")
    )


def _seeds_option(default: int) -> Any:
    return option("--seeds", about=f"how many (3), or which (4,7,9) [{default}]", metavar="INT,...", group="Training")


Method = Annotated[
    str | None, _method_argument("method, see 'fedloom list algorithms', or a Python file with one [ditto]")
]


@app.command(
    cls=Command,
    epilog=examples(
        "fedloom run",
        "fedloom run fedrep --dataset fmnist --rounds 100 --lr 0.01",
        "fedloom run ditto --set lam=0.5 --set split=0.6/0.2/0.2",
        "fedloom run ./my_method.py --dataset hospitals.csv --out runs/first",
        docs="docs/runs.md",
    ),
)
@with_settings()
def run(
    config: ConfigDict,
    algorithm: Method = None,
    out_: Out = None,
    resume: Resume = None,
    no_save: NoSave = False,
    tracker: Tracker = None,
    verbose: Verbose = False,
) -> None:
    """Train and evaluate one method.

    Without arguments: Ditto on digits, 20 clients, Dirichlet 0.1.
    """
    from fedloom.cli import display
    from fedloom.config.resolve import combine, resolve
    from fedloom.runs.directory import RunDirectory
    from fedloom.studies.execute import execute
    from fedloom.trackers.named import trackers

    begin(verbose)
    tracking = trackers(tracker or [])
    _check_exclusive(out_, resume, no_save)
    saved = RunDirectory(resume).config() if resume is not None else {}
    resolved = resolve(combine(saved, config, {"algorithm": algorithm} if algorithm is not None else {}))
    names = [resolved.algorithm.name, Path(display.dataset_label(config.get("dataset", {}))).stem]
    folder = None if no_save else resume or out_ or _free_folder("-".join(names))
    with display.round_progress(err) as callbacks:
        result = _interruptible(
            lambda: execute(resolved, out=folder, resume=resume is not None, callbacks=[*callbacks, *tracking]),
            "run",
            folder,
        )
    display.print_result(out, result)
    _write_report(folder)
    if result.all_diverged:
        raise typer.Exit(1)  # the log says so


@app.command(
    cls=Command,
    epilog=examples(
        "fedloom compare",
        "fedloom compare fedavg fedrep ditto:lam=0.5 --dataset fmnist --seeds 3",
        "fedloom compare local fedavg ./my_method.py --metric macro_f1",
        "fedloom compare fedrep plgu-grep --equal-budget fedavg --out runs/fair",
        "fedloom compare fedavg fedrep ditto --seeds 3 --devices 0,1",
        docs="docs/comparisons.md, docs/metrics.md",
    ),
)
@with_settings(without="seed")
def compare(
    config: ConfigDict,
    methods: Annotated[
        list[str] | None,
        _method_argument(
            "methods, with settings where they differ: ditto:lam=0.5 [local fedavg fedrep ditto]", "METHOD..."
        ),
    ] = None,
    seeds: Annotated[str | None, _seeds_option(3)] = None,
    equal_budget: Annotated[
        str | None,
        option(
            "--equal-budget",
            about="give all methods as many rounds as it takes them to compute what this one does [fedavg]",
            metavar="METHOD",
            group="Training",
            kind="algorithms",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        option(
            "--columns",
            about="columns of the LaTeX table [mean,low5,worst,gain,harmed]",
            metavar="NAME,...",
            group="Results",
        ),
    ] = None,
    devices: Devices = None,
    out_: Out = None,
    resume: Resume = None,
    no_save: NoSave = False,
    tracker: Tracker = None,
    verbose: Verbose = False,
) -> None:
    """Train and evaluate several methods on one task, and rank them.

    Each is trained with several seeds.
    """
    from fedloom.cli import display
    from fedloom.config.resolve import combine
    from fedloom.report.latex import COLUMNS, check_columns
    from fedloom.studies.compare import (
        EQUAL_BUDGET,
        METHODS,
        carry_out,
        configurations,
        parse_methods,
        read_comparison,
    )
    from fedloom.studies.study import parse_seeds
    from fedloom.trackers.named import trackers

    begin(verbose)
    tracking = trackers(tracker or [])
    _check_exclusive(out_, resume, no_save)
    names, numbers, saved = read_comparison(resume) if resume is not None else (list(METHODS), [0, 1, 2], {})
    names, numbers = config.pop("methods", names), config.pop("seeds", numbers)
    names, numbers = methods or parse_methods(names), parse_seeds(numbers if seeds is None else seeds)
    budget = equal_budget or config.pop(EQUAL_BUDGET, None) or saved.pop(EQUAL_BUDGET, None)
    shown = COLUMNS if columns is None else check_columns([name.strip() for name in columns.split(",")])
    configs = configurations(names, combine(saved, config))
    dataset = Path(display.dataset_label(config.get("dataset", {}))).stem
    folder = None if no_save else resume or out_ or _free_folder(f"compare-{dataset}")
    with display.study_progress(err, devices is not None) as (callbacks, on_progress):
        comparison = _interruptible(
            lambda: carry_out(
                configs, numbers, out=folder, resume=resume is not None, equal_budget=budget, columns=shown,
                callbacks=[*callbacks, *tracking], devices=devices, on_progress=on_progress,
            ),
            "compare", folder,
        )  # fmt: skip
    display.print_comparison(out, comparison)
    _write_report(folder)


@app.command(
    cls=Command,
    epilog=examples(
        "fedloom sweep ditto --grid lr=0.005,0.01,0.05 --grid lam=0.1,1 --seeds 3",
        "fedloom sweep fedprox --preset gpfl/fmnist-dirichlet --grid mu=0.001,0.01,0.1",
        "fedloom sweep --resume runs/sweep-ditto-digits-1",
        docs="docs/sweep.md",
    ),
)
@with_settings(without="seed")
def sweep(
    config: ConfigDict,
    algorithm: Method = None,
    grid: Annotated[
        list[str] | None,
        option(
            "--grid", about="a setting and its values: --grid lr=0.005,0.01", metavar="KEY=VALUES", group="Training"
        ),
    ] = None,
    seeds: Annotated[str | None, _seeds_option(1)] = None,
    devices: Devices = None,
    out_: Out = None,
    resume: Resume = None,
    no_save: NoSave = False,
    tracker: Tracker = None,
    verbose: Verbose = False,
) -> None:
    """Train one method with all combinations of some settings.

    They are ranked on validation data.
    """
    from fedloom.cli import display
    from fedloom.config.resolve import combine
    from fedloom.studies.study import parse_seeds
    from fedloom.studies.sweep import carry_out, configurations, parse_grid, read_sweep
    from fedloom.trackers.named import trackers

    begin(verbose)
    tracking = trackers(tracker or [])
    _check_exclusive(out_, resume, no_save)
    values, numbers, saved = read_sweep(resume) if resume is not None else ({}, [0], {})
    config_grid, numbers = config.pop("grid", None), config.pop("seeds", numbers)
    values = parse_grid(grid or config_grid) if grid or config_grid or not values else values
    numbers = parse_seeds(numbers if seeds is None else seeds)
    merged = combine(saved, config, {"algorithm": algorithm} if algorithm is not None else {})
    method = merged.get("algorithm", {}).get("name", "ditto")
    names = ["sweep", method, Path(display.dataset_label(config.get("dataset", {}))).stem]
    folder = None if no_save else resume or out_ or _free_folder("-".join(names))
    with display.study_progress(err, devices is not None) as (callbacks, on_progress):
        result = _interruptible(
            lambda: carry_out(
                configurations(merged), values, numbers, out=folder, resume=resume is not None,
                callbacks=[*callbacks, *tracking], devices=devices, on_progress=on_progress,
            ),
            "sweep", folder,
        )  # fmt: skip
    display.print_sweep(out, result)
    _write_report(folder)


@app.command(
    cls=Command,
    epilog=examples(
        "fedloom costs",
        "fedloom costs fedavg fedrep pfedkt:hn_update=step --model cnn8",
        "fedloom costs page --rounds 1000 --set server_share=0.2",
        docs="docs/costs.md",
    ),
)
@with_settings(*COSTS)
def costs(
    config: ConfigDict,
    methods: Annotated[
        list[str] | None,
        _method_argument("methods, with settings where they differ: ditto:personal_epochs=3 [all]", "METHOD..."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Count the bytes, operations and state that methods need.

    Nothing is trained but one step of each phase.
    """
    from fedloom.cli import display
    from fedloom.config.resolve import describe
    from fedloom.studies.costs import configurations, cost_rows

    begin(verbose)
    configs = configurations(methods, config)
    display.print_costs(out, cost_rows(configs), describe(configs[0]))


@app.command(
    cls=Command,
    epilog=examples(
        "fedloom reproduce",
        "fedloom reproduce GPFL-T1 --dataset fmnist --seeds 3",
        "fedloom reproduce PAGE-T1 --task synthetic --algorithms fedavg,page",
        "fedloom reproduce PLGU-T2 --dataset cifar10 --dtype tf32",
        docs="docs/reproduce.md, docs/results/README.md",
    ),
)
@with_settings(*REPRODUCTION)
def reproduce(
    config: ConfigDict,
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="a table or figure of a paper, such as GPFL-T1 [list all]",
            metavar="EXPERIMENT",
            show_default=False,
            autocompletion=lambda: completion.names("experiments"),
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        option("--task", about="a column of the table; may be given several times [all]", metavar="NAME", group="Task"),
    ] = None,
    dataset: Annotated[
        str | None, option("--dataset", about="only columns of this data set [all]", metavar="NAME", group="Task")
    ] = None,
    algorithms: Annotated[
        str | None, option("--algorithms", about="rows of the table [all]", metavar="NAME,...", group="Task")
    ] = None,
    seeds: Annotated[str | None, _seeds_option(3)] = None,
    out_: Out = None,
    tracker: Tracker = None,
    verbose: Verbose = False,
) -> None:
    """Run a paper's table, and print its numbers beside ours.

    Runs that are in the folder already are kept, so the same command continues what was stopped, and other options
    add to it. Without an experiment, all are listed.
    """
    from fedloom.cli import display
    from fedloom.papers.catalog import experiments, runnable
    from fedloom.studies.reproduce import carry_out, select
    from fedloom.studies.study import parse_seeds
    from fedloom.trackers.named import trackers

    begin(verbose)
    if experiment is None:
        display.print_experiments(out, list(experiments().values()))
        return
    wanted = [name.strip() for name in algorithms.split(",") if name.strip()] if algorithms else []
    selection = select(runnable(experiment), task or [], dataset, wanted)
    numbers = parse_seeds(config.pop("seeds", 3) if seeds is None else seeds)
    folder = out_ or Path("runs") / selection.experiment.id
    with display.round_progress(err) as callbacks:
        found = _interruptible(
            lambda: carry_out(selection, numbers, config, folder, [*callbacks, *trackers(tracker or [])]),
            "reproduce", folder,
        )  # fmt: skip
    display.print_reproduction(out, found)
    report.write_pages([folder / task.name for task in selection.tasks if (folder / task.name).is_dir()])


for command, epilog in (
    models.COMMANDS | report.COMMANDS | figures.COMMANDS | audit.COMMANDS | doctor.COMMANDS
).items():
    app.command(cls=Command, epilog=epilog)(command)


@app.command(
    cls=Command,
    epilog=examples("fedloom check ./my_method.py", "fedloom check ditto --set lam=0.5", docs="docs/new-method.md"),
)
def check(
    method: Annotated[str, _method_argument("Python file with a method, package.module:Class, or a name")],
    set_: Annotated[
        list[str] | None, option("--set", about="a setting of the method: --set lam=0.5", metavar="KEY=VALUE")
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Test a method of your own as FedLoom's are tested."""
    from fedloom.cli import display
    from fedloom.config.methods import find_method
    from fedloom.core.settings import build
    from fedloom.studies.method_check import check_method

    begin(verbose)
    cls = find_method(method)
    with contextlib.nullcontext() if verbose else no_warnings():  # what a run would warn of is among the findings
        verdict = check_method(build(cls, pairs(set_ or []), f"algorithm '{cls.name}'"))
    display.print_verdict(out, verdict, json)
    if not verdict.ok:
        raise typer.Exit(1)


@app.command(
    name="list",
    cls=Command,
    epilog=examples(
        "fedloom list algorithms",
        "fedloom list algorithms ditto",
        "fedloom list algorithms ./my_method.py",
        "fedloom list settings --json",
        docs="docs/methods/README.md, docs/data.md, docs/models.md",
    ),
)
def list_(
    kind: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}",
            metavar="KIND",
            show_default=False,
            autocompletion=lambda: KINDS,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            help="one of them, with its settings; also a Python file with a method",
            metavar="NAME",
            show_default=False,
            autocompletion=completion.names_of_kind,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what there is to choose from, and all settings."""
    kind = SAME_KIND.get(kind, kind)
    if kind not in KINDS:
        raise unknown("list", kind, KINDS)
    from fedloom.cli import display
    from fedloom.cli.catalog import catalog

    display.print_catalog(out, kind, catalog(kind, name), json, details=name is not None)


app.add_typer(data.app, name="data")
sites.add_commands(app)


@app.callback()
def _without_command(
    context: typer.Context, version: Annotated[bool, option("--version", about="print the version")] = False
) -> None:
    """Print the version or, without a command, the help."""
    if version:
        from fedloom import __version__

        out.print(f"fedloom {__version__}", highlight=False)
    elif context.invoked_subcommand is None:
        out.print(context.get_help(), highlight=False, markup=False)


def _check_exclusive(out_: Path | None, resume: Path | None, no_save: bool) -> None:
    """Raise a UserError if more than one of the options about folders is given."""
    options = [name for name, value in (("--out", out_), ("--resume", resume), ("--no-save", no_save)) if value]
    if len(options) > 1:
        raise UserError(f"{options[0]} and {options[1]} exclude each other; give one of them.")


def _write_report(folder: Path | None) -> None:
    if folder is not None:
        report.write_pages([folder])


def _free_folder(name: str) -> Path:
    """The first folder runs/NAME-1, runs/NAME-2, ... that does not exist; a long name is cut."""
    number = 1
    while (folder := Path("runs") / f"{name[:80]}-{number}").exists():
        number += 1
    return folder


def _interruptible(job: Any, command: str, folder: Path | None) -> Any:
    """The result of job(). On Ctrl-C, print the command that continues it and exit with 130."""
    try:
        return job()
    except KeyboardInterrupt as stop:
        err.print(f"{str(stop).capitalize() or 'Stopped'}.", highlight=False)
        if command == "reproduce":
            err.print(f"The same command continues; runs are in {folder}.", highlight=False, soft_wrap=True)
        elif folder is not None and any((folder / name).exists() for name in RESUMABLE):
            err.print(f"Continue with: fedloom {command} --resume {folder}", highlight=False, soft_wrap=True)
        sys.exit(130)


def run_command() -> None:
    """Run the command that the arguments ask for, and exit; whatever a user can cause is reported in one sentence."""
    try:
        _check_surroundings()
        code = app(prog_name="fedloom", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as error:
        _exit_with_message(str(error))
    except UsageError as error:
        _exit_with_message(error.format_message())
    except WorkerError as error:
        if error.details:
            err.print(error.details, highlight=False, markup=False, soft_wrap=True)
        _exit_with_message(str(error), code=1)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        err.print("Stopped.")
        sys.exit(130)
    except BrokenPipeError:  # whoever reads the output has enough of it
        _discard(sys.stdout)
        sys.exit(1)
    except OSError as error:
        _discard(sys.stdout)
        _exit_with_message(system_error(error))
    except (MemoryError, RuntimeError) as error:
        from fedloom.device.memory import is_out_of_memory

        if not is_out_of_memory(error):
            _exit_for_author(error)
            raise
        _exit_with_message("There is not enough memory for this; use a smaller model, less data or fewer epochs.")
    except Exception as error:
        _exit_for_author(error)
        raise


def _exit_for_author(error: Exception) -> None:
    """If an error is one of a user's own method, report it in one sentence; with -v, after the traceback."""
    from fedloom.config.methods import blame

    if (sentence := blame(error)) is not None:
        if {"-v", "--verbose"} & set(sys.argv):
            traceback.print_exception(error)
        _exit_with_message(f"{sentence}.")


def _check_surroundings() -> None:
    """The arguments are text, the current folder exists (torch's libraries need it), and all output can be encoded."""
    for word in sys.argv[1:]:
        if not is_plain_text(word):
            raise UserError(f"The argument {word!a} is not valid UTF-8; rename what it stands for.")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("The current folder has been removed; change to another one.") from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard(stream: TextIO) -> None:
    """Let what has not been written yet go nowhere, so that Python does not fail again when it exits."""
    with contextlib.suppress(OSError, AttributeError):  # it may be no file, or closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _exit_with_message(sentence: str, code: int = 2) -> None:
    try:
        err.print(f"fedloom: {printable(sentence)}", style="red", highlight=False, markup=False, soft_wrap=True)
    except OSError:  # there is nowhere else to report to
        _discard(sys.stderr)
    sys.exit(code)
