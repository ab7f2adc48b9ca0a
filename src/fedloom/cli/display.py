"""Prints progress, results and lists to a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedloom.core.errors import plural
from fedloom.metrics.leaderboard import MAJORITY, MEAN, WITHOUT_MODEL
from fedloom.metrics.registry import METRICS, column_name, in_percent, sign
from fedloom.report import sweep as sweep_table
from fedloom.report.leaderboard import (
    VIEWS,
    caption,
    columns,
    format_bytes,
    format_cell,
    format_number,
    format_value,
    main_rows,
    ranking_metric,
    tails,
    unseen_caption,
    unseen_columns,
    unseen_rows,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from fedloom.studies.compare import Comparison
    from fedloom.studies.execute import OnRound
    from fedloom.studies.method_check import Verdict
    from fedloom.studies.result import Result
    from fedloom.studies.sweep import Sweep

DETAILS = ("settings", "usual", "paper", "licence", "model", "partition")  # columns of `fedloom list KIND NAME` only
STATISTICS = ("mean", "low5", "top5", "worst", "std")
UNSEEN_VIEWS = {"new": "unseen, on arrival", "joined": "unseen, joined"}


@contextmanager
def round_progress(console: Console) -> Iterator[Callable[[str], OnRound | None]]:
    """A progress bar of rounds, with accuracy (or RMSE) and time left; nothing if the output is not a terminal.

    Yields a function that starts the bar of a run, given its title, and returns the run's `on_round` callback.
    """
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
            for previous in bar.task_ids:
                bar.remove_task(previous)
            task = bar.add_task(title, total=None, score="getting ready")
            started = False

            def on_round(done: int, total: int, row: dict[str, Any] | None) -> None:
                nonlocal started
                if started:
                    bar.update(task, completed=done)
                else:  # a resumed run does not start at 0; the time left is estimated from here
                    bar.reset(task, completed=done, total=total)
                    started = True
                if row is not None:
                    bar.update(task, score=_progress(row))

            return on_round

        yield start


def _progress(row: dict[str, Any]) -> str:
    """What a progress bar says of an evaluated round."""
    name = "acc" if "pre_acc_mean" in row else "rmse"
    mean, low = (row.get(f"pre_{name}_{statistic}") for statistic in ("mean", "low5"))
    if mean is None or low is None:
        return ""
    metric = "accuracy" if name == "acc" else name
    title = "" if name == "acc" else "RMSE "
    mean, low = (format_value(value, name == "acc", 1) for value in (mean, low))
    return f"{title}mean {mean}  {tails(metric)[0]} {low}"


@contextmanager
def download_progress(console: Console) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """A progress bar for each file that is downloaded; nothing if the output is not a terminal.

    Yields the callback of `fedloom.data.fetch.download`.
    """
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def on_progress(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total, completed=done)
            bar.update(tasks[file], completed=done, total=total)

        yield on_progress


def print_result(console: Console, result: Result) -> None:
    """Print the metric over clients in the last round, the round best on validation data, and the best on test."""
    config, last, plan = result.config, result.last(), result.plan
    unseen = len(result.unseen)
    evaluated = len(result.clients["client"].unique()) - unseen
    clients = plural(evaluated, "client") + ("" if config["eval_clients"] is None else " evaluated")
    clients += f" and {unseen} unseen" if unseen else ""
    console.print(
        f"[bold]{config['algorithm']['name']}[/] on {dataset_label(config['dataset'])}: {clients}, "
        f"{_describe(config['partition'])}, {_describe(config['model'])}, "
        f"{config['rounds']} rounds in {result.seconds:.1f} s",
        highlight=False,
    )
    name, percent = column_name(result.metric), in_percent(result.metric)
    columns = [f"client_{name}_{s}" if (name, s) == ("acc", "std") else f"{name}_{s}" for s in STATISTICS]

    def cells(row: dict[str, Any], view: str) -> list[str]:
        values = (row.get(f"{view}_{column}", math.nan) for column in columns)
        return [str(row["round"]), *(format_value(value, percent) for value in values)]

    table = _titled_table(f"\nTest {result.metric} over clients{', %' * percent}")
    table.add_column("model", no_wrap=True)
    for column in ("round", "mean", *tails(result.metric), "worst", "std"):
        table.add_column(column, justify="right")
    reports: dict[str, Callable[[str], dict[str, Any]]] = {"last round": lambda view: last}
    if f"pre_val_{name}_mean" in last:
        reports["best on validation"] = result.best_on_validation
    reports["best on test"] = result.best_on_test
    for report, pick in reports.items():
        table.add_row(f"[bold]{report}[/]")
        for view, title in VIEWS.items():
            if f"{view}_loss" in last:
                table.add_row(f"  {title}", *cells(pick(view), view))
        row = pick("pre")  # held-out clients have no say in which round is selected
        for view, title in UNSEEN_VIEWS.items():
            if f"{view}_loss" in row:
                table.add_row(f"  {title}", *cells(row, view))
    console.print(table)
    _print_metrics(console, result)
    console.print("(Best on test is how the papers report; it is selected on the numbers it shows.)\n", style="dim")
    for column, unit in (("acc_global", " %"), ("rmse_global", " (RMSE)")):
        if column in last:
            value = format_value(last[column], column == "acc_global") + unit
            console.print(f"Global model on the server's data, last round: {value}", highlight=False)
    stacked = f"clients stacked ({plan['replay']}), {plan['chunk']} at once"
    how = stacked if plan["mode"] == "stacked" else "one client after another"
    traffic = f"{format_bytes(last['bytes_down'])} down and {format_bytes(last['bytes_up'])} up in a round"
    console.print(f"Traffic: {traffic}. Execution: {how}.", highlight=False)
    if result.folder is not None:
        console.print(f"Everything is in {result.folder}", highlight=False, soft_wrap=True)


# those that fit a narrow terminal; the files have more
HIDDEN = ("client_acc_cv_x1e-2", "trend", "balanced_accuracy_mean", "auprc_mean", "r2_mean")


SHORT = {  # titles of metrics that fit a narrow terminal
    "balanced_accuracy": "balanced", "macro_f1": "macro F1", "auroc": "AUROC", "auprc": "AUPRC", "log_loss": "log loss",
    "calibration_error": "ECE", "exact_match": "exact match", "rmse": "RMSE", "mae": "MAE", "r2": "R2",
}  # fmt: skip


def _no_better(rows: list[dict[str, Any]], column: str, metric: str) -> str:
    """A sentence about methods whose mean does not beat that of the baseline without a model; "" if all do."""
    baseline = next((row for row in rows if row["method"] in WITHOUT_MODEL), None)
    if baseline is None:
        return ""
    others = [row for row in rows if row is not baseline and row.get(column) is not None]
    found = [row["method"] for row in others if sign(metric) * (row[column] - baseline[column]) <= 0]
    return f"No better than the {baseline['method']} baseline: {', '.join(found)}." if found else ""


def _print_metrics(console: Console, result: Result) -> None:
    """Print all metrics of the personal models that `Result.model` returns, and those of the baseline without a
    model."""
    if result.metrics is None or not len(result.metrics):
        return
    best = result.best_on_validation()["round"]
    kept = best if best in result.metrics["round"].to_pylist() else result.last()["round"]
    table = _titled_table(f"Metrics of personal models after round {kept}, mean over clients", pad_edge=False)
    shown = [name for name in dict.fromkeys(m.name for m in METRICS) if name in result.metrics.column_names]
    table.add_column("")
    for name in shown:
        table.add_column(SHORT.get(name, name), justify="right")
    for title, t in (("models", kept), (MAJORITY if result.basic_metric == "accuracy" else MEAN, 0)):
        rows = result.metrics.filter([r == t for r in result.metrics["round"].to_pylist()])
        values = {m: [v for v in rows[m].to_pylist() if v is not None and not math.isnan(v)] for m in shown}
        table.add_row(title, *(_mean(m, v) if v else "" for m, v in values.items()))
    console.print(table)


def _mean(metric: str, values: list[float]) -> str:
    return format_value(sum(values) / len(values), in_percent(metric))


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the leaderboard of the personal models; the files have those of the other models, too."""
    rows, config = main_rows(comparison.board), comparison.config
    metric, found = ranking_metric(rows), columns(rows)
    first, *rest = found
    others = [column for column in rest if column not in (*HIDDEN, "last")]
    console.print(
        f"[bold]{len(config['methods'])} methods[/] on {dataset_label(config['dataset'])}: "
        f"{_describe(config['partition'])}, {_describe(config['model'])}, {config['rounds']} rounds, "
        f"{plural(len(config['seeds']), 'seed')}",
        highlight=False,
    )
    title = f"\nPersonal models, test {metric} over clients{', %' * in_percent(metric)}"
    table = _titled_table(title, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    table.add_column("method", overflow="fold", min_width=8)
    for column in (first, *others, "last"):
        table.add_column(found[column][0], justify="right", no_wrap=column == first)
    for row in rows:
        numbers = (format_cell(row, column, with_std=False, digits=1) for column in others)
        still_moving = "*" * format_cell(row, "trend").endswith("*")
        last = format_cell(row, "last", with_std=False, digits=1) + still_moving
        mean = format_cell(row, first, separator=" ±")
        table.add_row(str(row.get("rank", "")), row["method"], mean, *numbers, last)
    console.print(table)
    console.print(f"{caption(comparison.board)}\n", style="dim", highlight=False)
    if no_better := _no_better(rows, first, metric):
        console.print(f"{no_better}\n", highlight=False, markup=False)
    if held_out := unseen_rows(comparison.board):
        _print_unseen(console, held_out)
    costs = _titled_table("Cost of a round")
    costs.add_column("method", overflow="fold")
    for title in ("sent down", "sent up", "training, s", "evaluation, s"):
        costs.add_column(title, justify="right")
    for row in rows:
        seconds = (format_number(row[name]) for name in ("train_seconds", "eval_seconds"))
        costs.add_row(row["method"], format_bytes(row["bytes_down"]), format_bytes(row["bytes_up"]), *seconds)
    console.print(costs)
    if comparison.folder is not None:
        text = f"Leaderboard as CSV, Markdown and LaTeX, and all runs: {comparison.folder}"
        console.print(text, highlight=False, soft_wrap=True)


SHOWN_PREDICTIONS = 20


def print_predictions(console: Console, table: pa.Table, warnings: Sequence[str], complete: bool) -> None:
    """Print the first predictions of a table; `complete` says whether a file has all of them."""
    for sentence in warnings:
        console.print(f"Note: {sentence}", highlight=False, markup=False, soft_wrap=True)
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name, column in zip(table.column_names, table.columns, strict=True):
        number = str(column.type) in ("double", "float")
        shown.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for row in table.slice(0, SHOWN_PREDICTIONS).to_pylist():
        cells = (_cell_of_prediction(v) if isinstance(v, float) else "" if v is None else str(v) for v in row.values())
        shown.add_row(*(Text(cell) for cell in cells))
    console.print(shown)
    if table.num_rows > SHOWN_PREDICTIONS:
        rest = "" if complete else "; --out FILE keeps all"
        console.print(f"The first {SHOWN_PREDICTIONS} of {table.num_rows} samples{rest}.", highlight=False)


def _cell_of_prediction(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.6g}"


def print_evaluation(console: Console, evaluation: dict[str, Any], as_json: bool) -> None:
    """Print all metrics of every client on new samples, as `fedloom.studies.predict.evaluate` computes them."""
    if as_json:
        console.out(json.dumps(evaluation), highlight=False)
        return
    names = list(evaluation["over_clients"])
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("client", overflow="fold")
    for title in ("samples", *(SHORT.get(name, name) for name in names)):
        table.add_column(title, justify="right")
    for row in evaluation["clients"][:MAX_CLIENTS]:
        cells = ("" if row[name] is None else format_value(row[name], in_percent(name)) for name in names)
        table.add_row(Text(row["client"]), str(row["samples"]), *cells)
    if len(evaluation["clients"]) > 1:
        for title, statistic in (("mean", "mean"), ("worst", "worst")):
            over = {name: evaluation["over_clients"][name].get(statistic) for name in names}
            cells = ("" if value is None else format_value(value, in_percent(name)) for name, value in over.items())
            table.add_row(title, "", *cells, style="bold")
    console.print(table)
    if "recall" not in evaluation:
        return
    recalls = ", ".join(f"{name} {value:.1f} %" for name, value in evaluation["recall"].items() if value is not None)
    noun = "class" if "confusion" in evaluation else "label"
    console.print(f"Found of each {noun}, over all samples: {recalls}.", highlight=False, markup=False)


def print_sweep(console: Console, sweep: Sweep) -> None:
    """Print all combinations of settings, the best on validation data first."""
    config, keys = sweep.config, [line.partition("=")[0] for line in sweep.config["grid"]]
    console.print(
        f"[bold]{config['algorithm']['name']}[/] on {dataset_label(config['dataset'])}: "
        f"{plural(len(sweep.table), 'combination')} of {', '.join(keys)}, {config['rounds']} rounds, "
        f"{plural(len(config['seeds']), 'seed')}",
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, title in enumerate(sweep_table.titles(keys, config["metric"])):
        table.add_column(Text(title), justify="left" if i < len(keys) else "right")
    for row in sweep.table:
        table.add_row(*(Text(text) for text in sweep_table.cells(row, keys, config["metric"], " ±")))
    console.print(table)
    console.print(f"{sweep_table.caption(config['metric'])}\n", style="dim", highlight=False)
    if sweep.command is not None:
        console.print(Text.assemble("Run the best one: ", (sweep.command, "bold")), soft_wrap=True)
    if sweep.folder is not None:
        console.print(f"The table as CSV and Markdown, and all runs: {sweep.folder}", highlight=False, soft_wrap=True)


def _print_unseen(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the leaderboard of held-out clients."""
    metric, found = ranking_metric(rows), unseen_columns(rows)
    title = f"Unseen clients, test {metric}{', %' * in_percent(metric)}"
    table = _titled_table(title, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold", min_width=8)
    for title, _ in found.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(row["method"], *(format_cell(row, column, with_std=False, digits=1) for column in found))
    console.print(table)
    console.print(f"{unseen_caption(rows)}\n", style="dim", highlight=False)


def _titled_table(title: str, **style: Any) -> Table:
    return Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, **style)


SHADES = " ▁▂▃▄▅▆▇█"
MAX_CLIENTS = 50  # rows of a table
MAX_BARS = 25  # as many fit a terminal of 80 columns; with more classes, a bar stands for several


def print_partition(console: Console, statistics: dict[str, Any], as_json: bool) -> None:
    """Print how samples are distributed over clients, as `fedloom.report.partition.describe` computes it."""
    if as_json:  # colours and indents of a million numbers would take a minute
        console.out(json.dumps(statistics), highlight=False)
        return
    clients = statistics["clients"]
    sizes = sorted(client["samples"] for client in clients)
    numbers, noun = statistics["target"] == "number", {"labels": "labels"}.get(statistics["target"], "classes")
    console.print(
        f"{statistics['samples']} samples"
        + (f" with {statistics['positions']} labels" if "positions" in statistics else "")
        + ("" if numbers else f" of {statistics['classes']} {noun}")
        + f" at {len(clients)} clients"
        + (f", {statistics['server']} at the server" if statistics["server"] else ""),
        highlight=False,
    )
    if numbers:
        low, mean, high = (format_value(statistics[name], False) for name in ("min", "mean", "max"))
        skew = f"Targets: {low} to {high}, mean {mean}; {100 * statistics['skew']:.0f} % of their variance is between"
        skew += " clients."
    else:
        skew = f"Skew of {noun}: {statistics['skew']:.2f} (0: as in all data, 1: nothing in common)."
    console.print(
        f"Samples per client: {sizes[0]} to {sizes[-1]}, median {sizes[len(sizes) // 2]}. {skew}", highlight=False
    )
    if held_out := [client["client"] for client in clients if client.get("held_out")]:
        which = f"client {held_out[0]}" if len(held_out) == 1 else f"clients {held_out[0]} to {held_out[-1]}"
        console.print(f"Held out, so that they never train: {which}.", highlight=False)
    table = Table(box=SIMPLE_HEAD)
    columns = ["client", "samples", "train", "val", "test", *(("mean", "std") if numbers else (noun,))]
    for column in columns:
        table.add_column(column, justify="right")
    width = 1 if numbers else -(-statistics["classes"] // MAX_BARS)
    if not numbers:
        one = {"classes": "class", "labels": "label"}[noun]
        table.add_column(f"share of each {one if width == 1 else f'{width} {noun}'}", no_wrap=True)
    if held_out:
        table.add_column("", no_wrap=True)
    for client in clients[:MAX_CLIENTS]:
        cells = [str(client[name]) for name in ("samples", "train", "val", "test")]
        if numbers:
            cells += [format_value(client[name], False) for name in ("mean", "std")]
        else:
            cells += [str(client["classes"]), _bars(client["labels"], width)]
        cells += ["out" if client["held_out"] else ""] if held_out else []
        table.add_row(Text(str(client.get("name", client["client"]))), *cells)
    console.print(table)
    if len(clients) > MAX_CLIENTS:
        console.print(f"The first {MAX_CLIENTS} of {len(clients)} clients; --json has all, --picture FILE shows all.")


def dataset_label(section: dict[str, Any]) -> str:
    """The name of the data set in a config dict; for a user's data, the last part of their path."""
    return Path(section["path"]).absolute().name if section.get("path") else section.get("name", "digits")


def _bars(labels: list[int], width: int) -> str:
    """A bar chart of samples per class in one line of text; a bar stands for `width` classes."""
    counts = [sum(labels[start : start + width]) for start in range(0, len(labels), width)]
    most = max(counts)
    return "".join(SHADES[-(-n * (len(SHADES) - 1) // most)] for n in counts) if most else ""


def _describe(section: dict[str, Any]) -> str:
    """A section of a config dict as text, such as "dirichlet_class (beta=0.1)"."""
    options = ", ".join(f"{k}={v}" for k, v in section.items() if k != "name")
    return f"{section['name']} ({options})" if options else section["name"]


def print_catalog(console: Console, kind: str, rows: list[dict[str, Any]], as_json: bool, details: bool) -> None:
    """Print entries of `fedloom.cli.catalog`: as JSON, with all their settings (`details`), or as a table."""
    if as_json:
        console.print_json(json.dumps(rows))
    elif details:
        for row in rows:
            _print_details(console, row)
    else:
        _print_list(console, kind, rows)


def _print_list(console: Console, kind: str, rows: list[dict[str, Any]]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = [column for column in rows[0] if column not in DETAILS]
    for column in columns:
        table.add_column(column.removesuffix("_model"), no_wrap=column == "name", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[column])) for column in columns))  # brackets are text, not markup
    console.print(table)
    console.print(f"Settings of one of them: fedloom list {kind} {rows[0]['name']}", highlight=False)


def _print_details(console: Console, row: dict[str, Any]) -> None:
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
    """A default as a user would type it."""
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else _cell(value)


def print_verdict(console: Console, verdict: Verdict, as_json: bool) -> None:
    """Print what the checks of a method found, one line each, and the verdict."""
    if as_json:
        console.print_json(json.dumps(verdict.to_json()))
        return
    width = max(len(finding.name) for finding in verdict.findings)
    for finding in verdict.findings:
        mark, style = {True: ("ok", "green"), False: ("failed", "bold red"), None: ("-", "dim")}[finding.ok]
        line = Text.assemble((f"{mark:<8}", style), f"{finding.name:<{width}}  {finding.sentence}")
        console.print(line, soft_wrap=True)
    console.print(Text(verdict.sentence, "bold"), soft_wrap=True)
