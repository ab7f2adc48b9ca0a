"""How progress, results and lists look in a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedloom.report import sweep as sweep_table
from fedloom.report.leaderboard import (
    COLUMNS,
    UNSEEN,
    UNSEEN_CAPTION,
    VIEWS,
    caption,
    cell,
    main_rows,
    number,
    size,
    unseen_rows,
)

if TYPE_CHECKING:
    from fedloom.studies.compare import Comparison
    from fedloom.studies.execute import OnRound
    from fedloom.studies.result import Result
    from fedloom.studies.sweep import Sweep

HIDDEN = ("settings", "usual", "paper", "licence", "model", "partition")  # shown for one thing, not in a list
METRICS = {
    "acc_mean": "mean",
    "acc_low5": "lowest 5 %",
    "acc_top5": "top 5 %",
    "acc_worst": "worst",
    "client_acc_std": "std",
}
NEWCOMERS = {"new": "unseen, on arrival", "joined": "unseen, joined"}


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], OnRound | None]]:
    """A bar for each run: rounds, accuracy, time left; silent where the output is not a terminal."""
    if not console.is_terminal:
        yield lambda title: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as bar:

        def start(title: str) -> OnRound:
            for old in bar.task_ids:
                bar.remove_task(old)
            task = bar.add_task(title, total=None, score="getting ready")
            started = False

            def on_round(done: int, total: int, row: dict[str, Any] | None) -> None:
                nonlocal started
                if started:
                    bar.update(task, completed=done)
                else:  # a resumed run does not start at 0, and what it does not do takes no time
                    bar.reset(task, completed=done, total=total)
                    started = True
                if row is not None:
                    bar.update(task, score=f"mean {row['pre_acc_mean']:.1f}  lowest 5 % {row['pre_acc_low5']:.1f}")

            return on_round

        yield start


def counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


@contextmanager
def transfer(console: Console) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """A bar for each file that is downloaded; silent where the output is not a terminal."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def watch(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total, completed=done)
            bar.update(tasks[file], completed=done, total=total)

        yield watch


def result(console: Console, found: Result) -> None:
    """Accuracy over clients for the last round, the round best on validation, and the round best on test."""
    c, last, plan = found.config, found.last(), found.plan
    unseen = len(found.unseen)
    evaluated = len(found.clients["client"].unique()) - unseen
    clients = counted(evaluated, "client") + ("" if c["eval_clients"] is None else " evaluated")
    clients += f" and {unseen} unseen" if unseen else ""
    console.print(
        f"[bold]{c['algorithm']['name']}[/] on {data_name(c['dataset'])}: {clients}, {_named(c['partition'])}, "
        f"{_named(c['model'])}, {c['rounds']} rounds in {found.seconds:.1f} s",
        highlight=False,
    )
    table = Table(title="\nTest accuracy over clients, %", title_justify="left", title_style="", box=SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for column in ("round", *METRICS.values()):
        table.add_column(column, justify="right")
    reports: dict[str, Callable[[str], dict[str, Any]]] = {"last round": lambda view: last}
    if "pre_val_acc_mean" in last:
        reports["best on validation"] = found.best_on_validation
    reports["best on test"] = found.best_on_test
    for report, pick in reports.items():
        table.add_row(f"[bold]{report}[/]")
        for view, name in VIEWS.items():
            if f"{view}_acc_mean" in last:
                row = pick(view)
                table.add_row(f"  {name}", str(row["round"]), *(f"{row[f'{view}_{metric}']:.2f}" for metric in METRICS))
        row = pick("pre")  # nothing is selected by clients that are held out
        for view, name in NEWCOMERS.items():
            if f"{view}_acc_mean" in row:
                table.add_row(f"  {name}", str(row["round"]), *(f"{row[f'{view}_{metric}']:.2f}" for metric in METRICS))
    console.print(table)
    console.print("(Best on test is how the papers report; it is selected on the numbers it shows.)\n", style="dim")
    if "acc_global" in last:
        console.print(f"Global model on the server's data, last round: {last['acc_global']:.2f} %", highlight=False)
    stacked = f"clients stacked ({plan['replay']}), {plan['chunk']} at once"
    how = stacked if plan["mode"] == "stacked" else "one client after another"
    traffic = f"{size(last['bytes_down'])} down and {size(last['bytes_up'])} up in a round"
    console.print(f"Traffic: {traffic}. Execution: {how}.", highlight=False)
    if found.folder is not None:
        console.print(f"Everything is in {found.folder}", highlight=False, soft_wrap=True)


# what fits a narrow terminal; the files have more
SHORT = ("acc_mean", "acc_low5", "acc_top5", "acc_worst", "client_acc_std", "gain", "harmed", "last")


def comparison(console: Console, found: Comparison) -> None:
    """The leaderboard of the personal models; the files have the others too."""
    rows, c = main_rows(found.board), found.config
    console.print(
        f"[bold]{len(rows)} methods[/] on {data_name(c['dataset'])}: {_named(c['partition'])}, {_named(c['model'])}, "
        f"{c['rounds']} rounds, {counted(len(c['seeds']), 'seed')}",
        highlight=False,
    )
    title = "\nPersonal models, test accuracy over clients, %"
    table = Table(
        title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("method", overflow="fold", min_width=8)
    for column in SHORT:
        table.add_column(COLUMNS[column][0], justify="right", no_wrap=column == "acc_mean")
    for row in rows:
        numbers = (cell(row, column, spread=False, digits=1) for column in SHORT[1:-1])
        still_moving = "*" * cell(row, "trend").endswith("*")
        last = cell(row, "last", spread=False, digits=1) + still_moving
        table.add_row(row["method"], cell(row, "acc_mean", between=" ±"), *numbers, last)
    console.print(table)
    console.print(f"{caption(found.board)}\n", style="dim", highlight=False)
    if rows_ := unseen_rows(found.board):
        _unseen(console, rows_)
    costs = Table(title="Cost of a round", title_justify="left", title_style="", box=SIMPLE_HEAD)
    costs.add_column("method", overflow="fold")
    for title in ("sent down", "sent up", "training, s", "evaluation, s"):
        costs.add_column(title, justify="right")
    for row in rows:
        seconds = (number(row[name]) for name in ("train_seconds", "eval_seconds"))
        costs.add_row(row["method"], size(row["bytes_down"]), size(row["bytes_up"]), *seconds)
    console.print(costs)
    if found.folder is not None:
        names = f"Leaderboard as CSV, Markdown and LaTeX, and all runs: {found.folder}"
        console.print(names, highlight=False, soft_wrap=True)


def sweep(console: Console, found: Sweep) -> None:
    """All combinations, the best on validation data first."""
    c, keys = found.config, [line.partition("=")[0] for line in found.config["grid"]]
    console.print(
        f"[bold]{c['algorithm']['name']}[/] on {data_name(c['dataset'])}: "
        f"{counted(len(found.table), 'combination')} of {', '.join(keys)}, {c['rounds']} rounds, "
        f"{counted(len(c['seeds']), 'seed')}",
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, title in enumerate(sweep_table.titles(keys)):
        table.add_column(Text(title), justify="left" if i < len(keys) else "right")
    for row in found.table:
        table.add_row(*(Text(text) for text in sweep_table.cells(row, keys, between=" ±")))
    console.print(table)
    console.print(f"{sweep_table.CAPTION}\n", style="dim", highlight=False)
    if found.command is not None:
        console.print(Text.assemble("Run the best one: ", (found.command, "bold")), soft_wrap=True)
    if found.folder is not None:
        console.print(f"The table as CSV and Markdown, and all runs: {found.folder}", highlight=False, soft_wrap=True)


def _unseen(console: Console, rows: list[dict[str, Any]]) -> None:
    title = "Unseen clients, test accuracy, %"
    table = Table(
        title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("method", overflow="fold", min_width=8)
    for title, _ in UNSEEN.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(row["method"], *(cell(row, column, spread=False, digits=1) for column in UNSEEN))
    console.print(table)
    console.print(f"{UNSEEN_CAPTION}\n", style="dim", highlight=False)


SHADES = " ▁▂▃▄▅▆▇█"
SHOWN = 50  # clients in a table
BARS = 25  # fit a terminal of 80 columns; more classes than that are taken together


def partition(console: Console, found: dict[str, Any], as_json: bool) -> None:
    if as_json:  # colours and indents of a million numbers would take a minute
        console.out(json.dumps(found), highlight=False)
        return
    clients = found["clients"]
    sizes = sorted(one["samples"] for one in clients)
    console.print(
        f"{found['samples']} samples"
        + (f" with {found['positions']} labels" if "positions" in found else "")
        + f" of {found['classes']} classes at {len(clients)} clients"
        + (f", {found['server']} at the server" if found["server"] else ""),
        highlight=False,
    )
    console.print(
        f"Samples per client: {sizes[0]} to {sizes[-1]}, median {sizes[len(sizes) // 2]}. Skew of classes: "
        f"{found['skew']:.2f} (0: as in all data, 1: nothing in common).",
        highlight=False,
    )
    if out := [one["client"] for one in clients if one.get("held_out")]:
        which = f"client {out[0]}" if len(out) == 1 else f"clients {out[0]} to {out[-1]}"
        console.print(f"Held out, so that they never train: {which}.", highlight=False)
    table = Table(box=SIMPLE_HEAD)
    for column in ("client", "samples", "train", "val", "test", "classes"):
        table.add_column(column, justify="right")
    width = -(-found["classes"] // BARS)
    share = "share of each class" if width == 1 else f"share of each {width} classes"
    table.add_column(share, no_wrap=True)
    if out:
        table.add_column("", no_wrap=True)
    for one in clients[:SHOWN]:
        numbers = [str(one[name]) for name in ("samples", "train", "val", "test", "classes")]
        name = Text(str(one.get("name", one["client"])))
        table.add_row(name, *numbers, _bars(one["labels"], width), *(["out" if one["held_out"] else ""] if out else []))
    console.print(table)
    if len(clients) > SHOWN:
        console.print(f"The first {SHOWN} of {len(clients)} clients; --json has all, --picture FILE shows all.")


def data_name(section: dict[str, Any]) -> str:
    """A data set's name; of somebody's own, what the path ends in."""
    return Path(section["path"]).absolute().name if section.get("path") else section.get("name", "digits")


def _bars(labels: list[int], width: int) -> str:
    """A bar for every so many classes."""
    counts = [sum(labels[c : c + width]) for c in range(0, len(labels), width)]
    most = max(counts)
    return "".join(SHADES[-(-n * (len(SHADES) - 1) // most)] for n in counts) if most else ""


def _named(section: dict[str, Any]) -> str:
    options = ", ".join(f"{k}={v}" for k, v in section.items() if k != "name")
    return f"{section['name']} ({options})" if options else section["name"]


def catalog(console: Console, kind: str, rows: list[dict[str, Any]], as_json: bool, details: bool) -> None:
    if as_json:
        console.print_json(json.dumps(rows))
    elif details:
        for row in rows:
            _details(console, row)
    else:
        _table(console, kind, rows)


def _table(console: Console, kind: str, rows: list[dict[str, Any]]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = [column for column in rows[0] if column not in HIDDEN]
    for column in columns:
        table.add_column(column.removesuffix("_model"), no_wrap=column == "name", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[column])) for column in columns))  # brackets are text, not markup
    console.print(table)
    console.print(f"Settings of one of them: fedloom list {kind} {rows[0]['name']}", highlight=False)


def _details(console: Console, row: dict[str, Any]) -> None:
    for name, value in row.items():
        if name not in ("settings", "name"):
            console.print(f"{name.replace('_', ' ')}: {_cell(value)}", highlight=False, markup=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("setting", "default", "meaning"):
        table.add_column(column)
    for name, about in row["settings"].items():
        table.add_row(*(Text(text) for text in (name, _default(about["default"]), about["about"])))
    console.print(table if row["settings"] else "It has no settings of its own.", highlight=False)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return "" if value is None else str(value)


def _default(value: Any) -> str:
    """As it is typed."""
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else _cell(value)
