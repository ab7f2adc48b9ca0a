"""How progress, results and lists look in a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from fedloom.experiment import Config, OnRound, Result

VIEWS = {"pre": "personal", "post": "personal, trained", "global": "global"}
HIDDEN = ("settings", "usual", "paper")  # shown for one thing, not in a list
METRICS = {
    "acc_mean": "mean",
    "acc_low5": "lowest 5 %",
    "acc_top5": "top 5 %",
    "acc_worst": "worst",
    "client_acc_std": "std",
}


@contextmanager
def progress(console: Console, config: Config) -> Iterator[OnRound]:
    """A bar with rounds, accuracy and time left; silent where the output is not a terminal."""
    if not console.is_terminal:
        yield lambda done, total, row: None
        return
    columns = (
        TextColumn(f"{config.algorithm.name}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=config.settings.rounds, score="getting ready")

        def on_round(done: int, total: int, row: dict[str, Any] | None) -> None:
            if row is not None:
                bar.update(task, score=f"mean {row['pre_acc_mean']:.1f}  lowest 5 % {row['pre_acc_low5']:.1f}")
            bar.update(task, completed=done)

        yield on_round


def result(console: Console, found: Result) -> None:
    """Accuracy over clients for the last round, the round best on validation, and the round best on test."""
    c, last, plan = found.config, found.last(), found.plan
    clients = len({row["client"] for row in found.clients})
    console.print(
        f"[bold]{c['algorithm']['name']}[/] on {c['dataset']['name']}: {clients} clients, {_named(c['partition'])}, "
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
    console.print(table)
    console.print("(Best on test is how the papers report; it is selected on the numbers it shows.)\n", style="dim")
    if "acc_global" in last:
        console.print(f"Global model on the server's data, last round: {last['acc_global']:.2f} %", highlight=False)
    stacked = f"clients stacked ({plan['replay']}), {plan['chunk']} at once"
    how = stacked if plan["mode"] == "stacked" else "one client after another"
    traffic = f"{_bytes(last['bytes_down'])} down and {_bytes(last['bytes_up'])} up in a round"
    console.print(f"Traffic: {traffic}. Execution: {how}.", highlight=False)


def _named(section: dict[str, Any]) -> str:
    options = ", ".join(f"{k}={v}" for k, v in section.items() if k != "name")
    return f"{section['name']} ({options})" if options else section["name"]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


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
        table.add_row(*(_cell(row[column]) for column in columns))
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
        table.add_row(name, str(about["default"]), about["about"])
    console.print(table if row["settings"] else "It has no settings of its own.", highlight=False)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return "" if value is None else str(value)
