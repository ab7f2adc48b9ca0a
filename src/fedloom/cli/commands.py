"""The program `fedloom`: its commands and their options, and one sentence for what goes wrong."""

import contextlib
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli import data, display, models
from fedloom.cli.console import begin, err, out
from fedloom.cli.options import pairs, with_settings
from fedloom.core.errors import UserError, is_plain_text, plural, printable, system_error, unknown

app = typer.Typer(
    help="Personalized federated learning: many clients train together, each ends up with a model that is good for it.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data.app, name="data")
for command in (models.predict, models.evaluate, models.export):
    app.command()(command)
RESUMABLE = ("config.yaml", "compare.yaml", "sweep.yaml")  # a folder with one of these can be resumed
UsageError: Any = typer.BadParameter.__base__  # typer exports its subclasses only

PLAIN: dict[str, Any] = {"show_default": False, "metavar": "VALUE"}
ConfigDict = dict[str, Any]
Out = Annotated[Path | None, typer.Option("--out", help="folder for the results [runs/NAME-N]", **PLAIN)]
NoSave = Annotated[bool, typer.Option("--no-save", help="write no files")]
Resume = Annotated[Path | None, typer.Option("--resume", help="continue what was started in this folder", **PLAIN)]
METHOD = "method, see 'fedloom list algorithms', or a Python file with one [ditto]"
Method = Annotated[str | None, typer.Argument(help=METHOD, show_default=False)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="log the execution plan and the kernels used")]


@app.command()
@with_settings()
def run(
    config: ConfigDict,
    algorithm: Method = None,
    out_: Out = None,
    resume: Resume = None,
    no_save: NoSave = False,
    verbose: Verbose = False,
) -> None:
    """Train and evaluate one method. Without arguments: Ditto on digits, 20 clients, Dirichlet 0.1."""
    from fedloom.config.resolve import combine, resolve
    from fedloom.runs.directory import RunDirectory
    from fedloom.studies.execute import execute

    begin(verbose)
    _check_exclusive(out_, resume, no_save)
    saved = RunDirectory(resume).config() if resume is not None else {}
    resolved = resolve(combine(saved, config, {"algorithm": algorithm} if algorithm is not None else {}))
    names = [resolved.algorithm.name, Path(display.dataset_label(config.get("dataset", {}))).stem]
    folder = None if no_save else resume or out_ or _free_folder("-".join(names))
    with display.round_progress(err) as bar:
        result = _interruptible(
            lambda: execute(resolved, out=folder, resume=resume is not None, on_round=bar(resolved.algorithm.name)),
            "run", folder,
        )  # fmt: skip
    display.print_result(out, result)
    if result.all_diverged:
        raise typer.Exit(1)  # the log says so


@app.command()
@with_settings(without="seed")
def compare(
    config: ConfigDict,
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="methods, with settings where they differ: ditto:lam=0.5 [local fedavg fedrep ditto]",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="how many (3), or which (4,7,9) [3]", **PLAIN)] = None,
    out_: Out = None,
    resume: Resume = None,
    no_save: NoSave = False,
    verbose: Verbose = False,
) -> None:
    """Train and evaluate several methods on one task, each with several seeds, and rank them."""
    from fedloom.config.resolve import combine
    from fedloom.studies.compare import METHODS, carry_out, configurations, parse_methods, read_comparison
    from fedloom.studies.study import parse_seeds

    begin(verbose)
    _check_exclusive(out_, resume, no_save)
    names, numbers, saved = read_comparison(resume) if resume is not None else (list(METHODS), [0, 1, 2], {})
    names, numbers = config.pop("methods", names), config.pop("seeds", numbers)
    names, numbers = methods or parse_methods(names), parse_seeds(numbers if seeds is None else seeds)
    configs = configurations(names, combine(saved, config))
    dataset = Path(display.dataset_label(config.get("dataset", {}))).stem
    folder = None if no_save else resume or out_ or _free_folder(f"compare-{dataset}")
    with display.round_progress(err) as bar:
        comparison = _interruptible(
            lambda: carry_out(
                configs, numbers, out=folder, resume=resume is not None,
                on_method=lambda label, seeds, done, total: bar(
                    f"{done + 1}/{total} {label}, {plural(len(seeds), 'seed')}"
                ),
            ),
            "compare", folder,
        )  # fmt: skip
    display.print_comparison(out, comparison)


@app.command()
@with_settings(without="seed")
def sweep(
    config: ConfigDict,
    algorithm: Method = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="a setting and its values: lr=0.005,0.01", metavar="KEY=VALUES")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="how many (3), or which (4,7,9) [1]", **PLAIN)] = None,
    out_: Out = None,
    resume: Resume = None,
    no_save: NoSave = False,
    verbose: Verbose = False,
) -> None:
    """Run one method with all combinations of some settings, and rank them on validation data."""
    from fedloom.config.resolve import combine
    from fedloom.studies.study import parse_seeds
    from fedloom.studies.sweep import carry_out, configurations, parse_grid, read_sweep

    begin(verbose)
    _check_exclusive(out_, resume, no_save)
    values, numbers, saved = read_sweep(resume) if resume is not None else ({}, [0], {})
    config_grid, numbers = config.pop("grid", None), config.pop("seeds", numbers)
    values = parse_grid(grid or config_grid) if grid or config_grid or not values else values
    numbers = parse_seeds(numbers if seeds is None else seeds)
    merged = combine(saved, config, {"algorithm": algorithm} if algorithm is not None else {})
    method = merged.get("algorithm", {}).get("name", "ditto")
    names = ["sweep", method, Path(display.dataset_label(config.get("dataset", {}))).stem]
    folder = None if no_save else resume or out_ or _free_folder("-".join(names))
    with display.round_progress(err) as bar:
        result = _interruptible(
            lambda: carry_out(
                configurations(merged), values, numbers, out=folder, resume=resume is not None,
                on_group=lambda name, runs, done, total: bar(f"{done + 1}/{total} {name}, {plural(runs, 'run')}"),
            ),
            "sweep", folder,
        )  # fmt: skip
    display.print_sweep(out, result)


@app.command()
def check(
    method: Annotated[
        str, typer.Argument(help="Python file with a method, package.module:Class, or a name", metavar="METHOD")
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="a setting of the method: --set lam=0.5", metavar="KEY=VALUE")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    verbose: Verbose = False,
) -> None:
    """Test a method as FedLoom's own are tested, and say what is wrong with it."""
    from fedloom.config.methods import find_method
    from fedloom.core.settings import build
    from fedloom.studies.method_check import check_method

    begin(verbose)
    cls = find_method(method)
    verdict = check_method(build(cls, pairs(set_ or []), f"algorithm '{cls.name}'"))
    display.print_verdict(out, verdict, json)
    if not verdict.ok:
        raise typer.Exit(1)


KINDS = ("algorithms", "datasets", "models", "partitions", "presets")


@app.command(name="list")
def list_(
    kind: Annotated[str, typer.Argument(help=", ".join(KINDS), metavar="KIND")],
    name: Annotated[str | None, typer.Argument(help="one of them, with its settings", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """What there is to choose from, and the settings of each."""
    if kind not in KINDS:
        raise unknown("list", kind, KINDS)
    from fedloom.cli.catalog import catalog

    display.print_catalog(out, kind, catalog(kind, name), json, details=name is not None)


@app.callback()
def _without_command(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
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
        if folder is not None and any((folder / name).exists() for name in RESUMABLE):
            err.print(f"Continue with: fedloom {command} --resume {folder}", highlight=False, soft_wrap=True)
        sys.exit(130)


def run_command() -> None:
    """Run the command that the arguments ask for, and exit; whatever a user can cause is reported in one sentence."""
    try:
        _check_surroundings()
        code = app(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as error:
        _exit_with_message(str(error))
    except UsageError as error:
        _exit_with_message(error.format_message())
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        err.print("Stopped.")
        sys.exit(130)
    except BrokenPipeError:  # whoever reads the output has enough of it
        _discard_output()
        sys.exit(1)
    except OSError as error:
        _discard_output()
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


def _discard_output() -> None:
    """Let what has not been written yet go nowhere, so that Python does not fail again when it exits."""
    with contextlib.suppress(OSError, AttributeError):  # it may be no file, or closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_with_message(sentence: str) -> None:
    with contextlib.suppress(OSError):  # there is nowhere else to report to
        err.print(f"fedloom: {printable(sentence)}", style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(2)
