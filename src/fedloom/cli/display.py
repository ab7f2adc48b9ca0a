"""Prints progress, results and lists to a terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedloom.cli.tables import Column, number_column, print_table
from fedloom.core.errors import plural
from fedloom.core.privacy import DELTA
from fedloom.engine.plan import Plan
from fedloom.metrics.leaderboard import MAJORITY, MEAN, WITHOUT_MODEL
from fedloom.metrics.registry import METRICS, column_name, in_percent, sign
from fedloom.report import sweep as sweep_table
from fedloom.report.leaderboard import (
    COMPUTATION,
    VIEWS,
    budget_sentences,
    caption,
    columns,
    computation_caption,
    computation_rows,
    format_bytes,
    format_cell,
    format_flops,
    format_number,
    format_value,
    main_rows,
    ranking_metric,
    tails,
    unseen_caption,
    unseen_columns,
    unseen_rows,
)
from fedloom.report.reproduction import COLUMNS as TITLES
from fedloom.report.reproduction import TEXT, by_task, shown_columns
from fedloom.report.reproduction import caption as reproduction_caption
from fedloom.report.reproduction import cells as text_of
from fedloom.studies.callbacks import Callback, TrainingRun

if TYPE_CHECKING:
    import pyarrow as pa

    from fedloom.deployment.dry_run import Sent
    from fedloom.deployment.flower.overview import Overview
    from fedloom.papers.catalog import Experiment
    from fedloom.studies.compare import Comparison
    from fedloom.studies.devices import WorkItem
    from fedloom.studies.method_check import Verdict
    from fedloom.studies.reproduce import Reproduction
    from fedloom.studies.result import Result
    from fedloom.studies.sweep import Sweep

# columns of `fedloom list KIND`, and those of them that only wide terminals show; the details of one entry have all
LISTED: dict[str, tuple[str, ...]] = {
    "algorithms": ("name", "source", "shared", "private", "personal", "global", "targets"),
    "datasets": ("name", "about", "size"),
    "models": ("name", "takes", "about", "source"),
    "partitions": ("name", "about"),
    "presets": ("name", "about"),
}
WATCH_SECONDS = 2.0
MAX_VALUE = 160  # characters of a value that would be sent
ONLY_WIDE = ("personal", "global", "targets")
TEXT_WIDTH = 24  # of a column of text, before those above are shown
STATISTICS = ("mean", "low5", "top5", "worst", "std")
UNSEEN_VIEWS = {"new": "unseen, on arrival", "joined": "unseen, joined"}


@contextmanager
def round_progress(console: Console) -> Iterator[list[Callback]]:
    """A progress bar of rounds, with accuracy (or RMSE) and time left, as a callback; none if the output is not a
    terminal."""
    if not console.is_terminal:
        yield []
        return
    with _progress_bars(console) as bar:
        yield [RoundProgress(bar)]


@contextmanager
def study_progress(
    console: Console, several_devices: bool
) -> Iterator[tuple[list[Callback], Callable[[Sequence[WorkItem]], None] | None]]:
    """Progress bars of a comparison or a sweep, as callbacks or, on several devices, as a function that is called with
    all groups of runs; nothing if the output is not a terminal."""
    if not several_devices:
        with round_progress(console) as callbacks:
            yield callbacks, None
    elif not console.is_terminal:
        yield [], None
    else:
        with _progress_bars(console) as bar:
            yield [], DeviceProgress(bar)


def _progress_bars(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=console, transient=True)


class RoundProgress(Callback):
    """Shows the rounds of the runs that train at the same time as one bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._group: tuple[int, int] | None = None
        self._runs: dict[TrainingRun, Any] = {}  # metrics of the last evaluated round
        self._started = False

    def on_setup(self, run: TrainingRun) -> None:
        if run.group != self._group:
            self._group, self._runs, self._started = run.group, {}, False
            for previous in self._bar.task_ids:
                self._bar.remove_task(previous)
            self._task = self._bar.add_task(run.title, total=None, score="getting ready")
        self._runs[run] = None

    def on_planning(self, run: TrainingRun, step: str) -> None:
        self._bar.update(self._task, score=f"planning: {step}")

    def on_start(self, run: TrainingRun) -> None:
        self._show(run)

    def on_round(self, run: TrainingRun) -> None:
        self._show(run)

    def _show(self, run: TrainingRun) -> None:
        self._runs[run] = run.metrics or self._runs[run]
        done = sum(one.round for one in self._runs)
        if self._started:
            self._bar.update(self._task, completed=done)
        else:  # a resumed run does not start at 0; the time left is estimated from here
            self._bar.reset(self._task, completed=done, total=sum(one.rounds for one in self._runs))
            self._started = True
        if found := [row for row in self._runs.values() if row is not None]:
            means = {name: sum(row[name] for row in found) / len(found) for name in _PROGRESS if name in found[0]}
            self._bar.update(self._task, score=_progress(means))


class DeviceProgress:
    """Shows how many groups of runs are finished, and a bar of rounds for each that a device carries out."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._tasks: dict[int, Any] = {}  # by the position of the group
        self._all: Any = None

    def __call__(self, items: Sequence[WorkItem]) -> None:
        """Called with all groups whenever something may have changed."""
        if self._all is None:
            self._all = self._bar.add_task("all", total=len(items), score="")
        finished = [item for item in items if item.finished]
        self._bar.update(self._all, completed=len(finished), score="finished")
        for place, item in enumerate(items):
            if item.finished and place in self._tasks:
                self._bar.remove_task(self._tasks.pop(place))
            elif item.device and not item.finished:
                if place not in self._tasks:
                    title = f"{item.device} {item.title}"
                    self._tasks[place] = self._bar.add_task(title, total=item.total, score="getting ready")
                score = "getting ready" if not item.done else _progress(item.row) if item.row is not None else ""
                self._bar.update(self._tasks[place], completed=item.done, score=score)


@contextmanager
def served_rounds(console: Console, folder: Path) -> Iterator[Callable[[], None]]:
    """A function that prints what is new in the folder of a run that another process carries out: evaluated rounds, and
    warnings such as that a site did not answer."""
    yield ServedRounds(console, folder).watch


class ServedRounds:
    """Reads the files of a run again and again."""

    def __init__(self, console: Console, folder: Path) -> None:
        self.console, self.folder = console, folder
        self.rounds, self.lines = len(self._rounds()), len(self._log())

    def watch(self) -> None:
        """Print what is new."""
        log, rounds = self._log(), self._rounds()
        for line in log[self.lines :]:
            if " WARNING " in line:
                self.console.print(line.partition(" WARNING ")[2], highlight=False, markup=False, soft_wrap=True)
        for row in rounds[self.rounds :]:
            self.console.print(f"Round {row['round']}: {_progress(row)}", highlight=False, soft_wrap=True)
        self.lines, self.rounds = len(log), len(rounds)

    def _log(self) -> list[str]:
        path = self.folder / "run.log"
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def _rounds(self) -> list[dict[str, Any]]:
        from fedloom.storage.files import Damaged, read_table

        path = self.folder / "rounds.parquet"
        try:
            return read_table(path).to_pylist() if path.exists() else []
        except Damaged:  # it is being replaced
            return []


_PROGRESS = ("pre_acc_mean", "pre_acc_low5", "pre_rmse_mean", "pre_rmse_low5")  # what a progress bar shows


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
    done = f"{last['round']} of {config['rounds']}" if result.stopped else config["rounds"]
    console.print(
        f"[bold]{config['algorithm']['name']}[/] on {dataset_label(config['dataset'])}: {clients}, "
        f"{_describe(config['partition'])}, {_describe(config['model'])}, "
        f"{done} rounds in {result.seconds:.1f} s",
        highlight=False,
    )
    if result.stopped:
        console.print(f"It ended early: {result.stopped}.", highlight=False, markup=False)
    name, percent = column_name(result.metric), in_percent(result.metric)
    columns = [f"client_{name}_{s}" if (name, s) == ("acc", "std") else f"{name}_{s}" for s in STATISTICS]

    def cells(row: dict[str, Any], view: str) -> list[str]:
        values = (row.get(f"{view}_{column}", math.nan) for column in columns)
        return [str(row["round"]), *(format_value(value, percent) for value in values)]

    rows: list[list[str | Text]] = []
    reports: dict[str, Callable[[str], dict[str, Any]]] = {"last round": lambda view: last}
    if f"pre_val_{name}_mean" in last:
        reports["best on validation"] = result.best_on_validation
    reports["best on test"] = result.best_on_test
    for report, pick in reports.items():
        rows.append([Text(report, "bold")])
        for view, title in VIEWS.items():
            if f"{view}_loss" in last:
                rows.append([f"  {title}", *cells(pick(view), view)])
        row = pick("pre")  # held-out clients have no say in which round is selected
        for view, title in UNSEEN_VIEWS.items():
            if f"{view}_loss" in row:
                rows.append([f"  {title}", *cells(row, view)])
    titles = ("round", "mean", *tails(result.metric), "worst", "std")
    console.print()
    print_table(
        console,
        [Column("model"), *(number_column(title) for title in titles)],
        rows,
        f"Test {result.metric} over clients{', %' * percent}",
    )
    if result.epsilon is not None:
        console.print(
            f"Differential privacy of what a client uploads, for all of its data: epsilon {result.epsilon:.3g}, delta "
            f"{config['dp_delta'] or DELTA:g}.",
            highlight=False,
        )
    _print_metrics(console, result)
    console.print("(Best on test is how the papers report; it is selected on the numbers it shows.)\n", style="dim")
    for column, unit in (("acc_global", " %"), ("rmse_global", " (RMSE)")):
        if column in last:
            value = format_value(last[column], column == "acc_global") + unit
            console.print(f"Global model on the server's data, last round: {value}", highlight=False)
    traffic = f"{format_bytes(last['bytes_down'])} down and {format_bytes(last['bytes_up'])} up in a round"
    console.print(f"Traffic: {traffic}. Execution: {Plan.of_record(plan).summary()}.", highlight=False)
    if result.folder is not None:
        console.print(f"Everything is in {result.folder}", highlight=False, soft_wrap=True)


# columns of a leaderboard that only the files have, and ends of those that give way to long names of methods
HIDDEN = ("client_acc_cv_x1e-2", "trend", "balanced_accuracy_mean", "auprc_mean", "r2_mean")
EXTRA = ("_top5", "_worst", "_std")


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
    shown = [name for name in dict.fromkeys(m.name for m in METRICS) if name in result.metrics.column_names]
    cells = []
    for title, t in (("models", kept), (MAJORITY if result.basic_metric == "accuracy" else MEAN, 0)):
        rows = result.metrics.filter([r == t for r in result.metrics["round"].to_pylist()])
        values = {m: [v for v in rows[m].to_pylist() if v is not None and not math.isnan(v)] for m in shown}
        cells.append([title, *(_mean(m, v) if v else "" for m, v in values.items())])
    columns = [Column(""), *(number_column(SHORT.get(name, name), optional=True) for name in shown)]
    print_table(console, columns, cells, f"Metrics of personal models after round {kept}, mean over clients")


def _mean(metric: str, values: list[float]) -> str:
    return format_value(sum(values) / len(values), in_percent(metric))


def print_experiments(console: Console, found: Sequence[Experiment]) -> None:
    """Print the list of experiments of the papers."""
    cells = []
    for one in found:
        tool = " ".join(one.commands[-1].split()[: 3 if "plot" in one.commands[-1] else 2]) if one.commands else ""
        size = tool or f"{plural(len(one.tasks), 'task')}, {plural(len(one.methods), 'row')}"
        cells.append([one.id, one.about, size])
    print_table(console, [Column("experiment"), Column("about"), Column("size")], cells)
    console.print("\nRun one of them: fedloom reproduce GPFL-T1 --dataset fmnist", highlight=False)


def _reproduced(name: str) -> Column:
    """A column of a paper's table beside measured numbers."""
    if name in TEXT:
        return Column(TITLES[name], wrap=name != "metric")
    return number_column(TITLES[name], optional=name in ("last", "validation"))


def print_reproduction(console: Console, found: Reproduction) -> None:
    """Print a paper's table beside measured numbers, task by task."""
    console.print(f"[bold]{found.experiment.id}[/]: {found.experiment.about}", highlight=False)
    for task, rows, common in by_task(found.rows):
        shown = shown_columns(rows)
        texts = [text_of(row) for row in rows]
        columns = [_reproduced(name) for name in shown]
        console.print()
        print_table(console, columns, [[text[name] for name in shown] for text in texts], task)
        if common:
            console.print(f"Runs: {common}.", style="dim", highlight=False, markup=False)
    measured = dict.fromkeys(f"{row['metric']}: {row['measured']}" for row in found.rows)
    console.print(
        f"\n{'; '.join(measured)}. {reproduction_caption(found.rows)}\n", style="dim", highlight=False, markup=False
    )
    console.print(
        f"As CSV, Markdown and LaTeX: {found.folder / found.experiment.id}.csv", highlight=False, soft_wrap=True
    )


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
    cells = []
    for row in rows:
        numbers = (format_cell(row, column, with_std=False, digits=1) for column in others)
        still_moving = "*" * format_cell(row, "trend").endswith("*")
        last = format_cell(row, "last", with_std=False, digits=1) + still_moving
        mean = format_cell(row, first, separator=" ±")
        cells.append([str(row.get("rank", "")), row["method"], mean, *numbers, last])
    shown = [number_column(found[column][0], optional=column.endswith(EXTRA)) for column in (first, *others, "last")]
    title = f"Personal models, test {metric} over clients{', %' * in_percent(metric)}"
    console.print()
    print_table(console, [number_column("#"), Column("method"), *shown], cells, title)
    console.print(f"{caption(comparison.board)}\n", style="dim", highlight=False)
    if no_better := _no_better(rows, first, metric):
        console.print(f"{no_better}\n", highlight=False, markup=False)
    if held_out := unseen_rows(comparison.board):
        _print_unseen(console, held_out)
    costs = []
    for row in rows:
        seconds = (format_number(row[name]) for name in ("train_seconds", "eval_seconds"))
        costs.append([row["method"], format_bytes(row["bytes_down"]), format_bytes(row["bytes_up"]), *seconds])
    titles = ("sent down", "sent up", "training, s", "evaluation, s")
    print_table(console, [Column("method"), *(number_column(title) for title in titles)], costs, "Cost of a round")
    _print_computation(console, comparison.board)
    if comparison.folder is not None:
        text = f"Leaderboard as CSV, Markdown and LaTeX, and all runs: {comparison.folder}"
        console.print(text, highlight=False, soft_wrap=True)


def _print_computation(console: Console, board: list[dict[str, Any]]) -> None:
    """Print what clients compute with each method, and whether that was the same for all."""
    rows = computation_rows(board)
    if not rows:
        return
    cells = [[row["method"], *(format_number(row[name]) for name in COMPUTATION)] for row in rows]
    columns = [Column("method"), *(number_column(title) for title in COMPUTATION.values())]
    print_table(console, columns, cells, "Local computation of a client")
    console.print(f"{computation_caption()}\n", style="dim", highlight=False)
    for sentence in (found := budget_sentences(board)):
        hint = " --equal-budget fedavg gives all methods the same." if "equal_budget" not in rows[0] else ""
        console.print(f"{sentence}{hint}", highlight=False, markup=False)
    if found:
        console.print()


def print_costs(console: Console, rows: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Print what methods cost, as `fedloom.studies.costs.cost_rows` counts it."""
    known = [row for row in rows if not row["problem"]]
    one = known[0]
    console.print(
        f"[bold]{plural(len(known), 'method')}[/] on {dataset_label(config['dataset'])}: "
        f"{_describe(config['partition'])}, {plural(one['cohort'], 'client')} in a round, {_describe(config['model'])}",
        highlight=False,
    )
    console.print(
        f"Model: {one['parameters']:,} parameters, {format_flops(one['flops_forward'])} for a sample\n", highlight=False
    )
    clients, servers = [], []
    for row in known:
        sent = (format_bytes(row[name]) for name in ("bytes_down", "bytes_up"))
        computed = (format_number(row[name]) for name in ("gradients", "samples"))
        state, method = format_bytes(row["client_bytes"]), row["method"] + "*" * (not row["exact"])
        clients.append([method, *sent, *computed, format_flops(row["flops"]), state])
        servers.append([row["method"], format_flops(row["server_flops"]), format_bytes(row["server_bytes"])])
    for title, titles, cells in (
        ("A client in a round", ("sent down", "sent up", "gradients", "samples", "FLOPs", "state"), clients),
        ("The server in a round", ("FLOPs", "state"), servers),
    ):
        print_table(console, [Column("method"), *(number_column(name) for name in titles)], cells, title)
    caption = COSTS_CAPTION if all(row["exact"] for row in known) else f"{COSTS_CAPTION} {CHOSEN_EPOCHS}"
    console.print(f"{caption}\n", style="dim", highlight=False, markup=False)
    for row in rows:
        if row["problem"]:
            console.print(f"{row['method']} has no costs here: {row['problem']}", highlight=False, markup=False)


COSTS_CAPTION = (
    "FLOPs are those of products, 2 for each multiply-add; elementwise operations and sums count as 0. State is what "
    "is kept between rounds."
)
CHOSEN_EPOCHS = (
    "*: the method chooses how many epochs it trains; local_epochs are counted, or one where it stops by a condition."
)
SHOWN_PREDICTIONS = 20


def print_predictions(console: Console, table: pa.Table, warnings: Sequence[str], complete: bool) -> None:
    """Print the first predictions of a table; `complete` says whether a file has all of them."""
    for sentence in warnings:
        console.print(f"Note: {sentence}", highlight=False, markup=False, soft_wrap=True)
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        number = str(column.type) in ("double", "float")
        columns.append(Column(name, right=number, wrap=not number, optional=name.startswith("p(")))
    cells = [
        [_cell_of_prediction(v) if isinstance(v, float) else "" if v is None else str(v) for v in row.values()]
        for row in table.slice(0, SHOWN_PREDICTIONS).to_pylist()
    ]
    left_out = print_table(console, columns, cells)
    if left_out and not complete:
        text = "The terminal is too narrow for all probabilities; --out FILE keeps all."
        console.print(text, highlight=False)
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
    rows: list[list[str | Text]] = []
    for row in evaluation["clients"][:MAX_CLIENTS]:
        cells = ("" if row[name] is None else format_value(row[name], in_percent(name)) for name in names)
        rows.append([row["client"], str(row["samples"]), *cells])
    if len(evaluation["clients"]) > 1:
        for statistic in ("mean", "worst"):
            over = {name: evaluation["over_clients"][name].get(statistic) for name in names}
            cells = ("" if value is None else format_value(value, in_percent(name)) for name, value in over.items())
            rows.append([Text(cell, "bold") for cell in (statistic, "", *cells)])
    columns = [Column("client"), number_column("samples")]
    columns += [number_column(SHORT.get(name, name), optional=True) for name in names]
    if print_table(console, columns, rows):
        console.print("The terminal is too narrow for all metrics; --json has all.", highlight=False)
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
    titles = sweep_table.titles(keys, config["metric"])
    columns = [Column(title) for title in titles[: len(keys)]]
    columns += [number_column(title, optional=i > 1) for i, title in enumerate(titles[len(keys) :])]
    print_table(console, columns, [sweep_table.cells(row, keys, config["metric"], " ±") for row in sweep.table])
    console.print(f"{sweep_table.caption(config['metric'])}\n", style="dim", highlight=False)
    if sweep.command is not None:
        console.print(Text.assemble("Run the best one: ", (sweep.command, "bold")), soft_wrap=True)
    if sweep.folder is not None:
        console.print(f"The table as CSV and Markdown, and all runs: {sweep.folder}", highlight=False, soft_wrap=True)


def _print_unseen(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the leaderboard of held-out clients."""
    metric, found = ranking_metric(rows), unseen_columns(rows)
    title = f"Unseen clients, test {metric}{', %' * in_percent(metric)}"
    cells = [[row["method"], *(format_cell(row, column, with_std=False, digits=1) for column in found)] for row in rows]
    numbers = [number_column(name, optional=column.endswith("_low5")) for column, (name, _) in found.items()]
    print_table(console, [Column("method"), *numbers], cells, title)
    console.print(f"{unseen_caption(rows)}\n", style="dim", highlight=False)


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
    titles = ["samples", "train", "val", "test", *(("mean", "std") if numbers else (noun,))]
    columns = [Column("client", right=True)]
    columns += [number_column(title, optional=title in ("train", "val", "test")) for title in titles]
    width = 1 if numbers else -(-statistics["classes"] // MAX_BARS)
    if not numbers:
        one = {"classes": "class", "labels": "label"}[noun]
        columns.append(Column(f"share of each {one if width == 1 else f'{width} {noun}'}", wrap=False))
    if held_out:
        columns.append(Column(""))
    rows = []
    for client in clients[:MAX_CLIENTS]:
        cells = [str(client.get("name", client["client"])), *(str(client[name]) for name in titles[:4])]
        if numbers:
            cells += [format_value(client[name], False) for name in ("mean", "std")]
        else:
            cells += [str(client["classes"]), _bars(client["labels"], width)]
        rows.append([*cells, *(["out" if client["held_out"] else ""] if held_out else [])])
    print_table(console, columns, rows)
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
    elif kind == "settings":
        _print_settings(console, {row["name"]: row for row in rows})
        console.print("Set one with --set NAME=VALUE; 'fedloom run --help' has options for some.", highlight=False)
    elif details:
        for row in rows:
            _print_details(console, row)
    else:
        _print_list(console, kind, rows)


def _print_list(console: Console, kind: str, rows: list[dict[str, Any]]) -> None:
    columns = [
        Column(name, wrap=name != "name", optional=name in ONLY_WIDE, wanted=TEXT_WIDTH) for name in LISTED[kind]
    ]
    print_table(console, columns, [[_cell(_listed(row, name)) for name in LISTED[kind]] for row in rows])
    console.print(f"Settings of one of them: fedloom list {kind} {rows[0]['name']}", highlight=False)


def _listed(row: dict[str, Any], column: str) -> Any:
    """The cell of an entry in a list; the source of a method includes the year."""
    if column == "source" and row.get("year"):
        return f"{row['source']} {row['year']}"
    return row[f"{column}_model" if f"{column}_model" in row else column]


def _print_details(console: Console, row: dict[str, Any]) -> None:
    for name, value in row.items():
        if name not in ("settings", "name"):
            console.print(f"{name.replace('_', ' ')}: {_cell(value)}", highlight=False, markup=False)
    if row["settings"]:
        _print_settings(console, row["settings"])
    else:
        console.print("It has no settings of its own.", highlight=False)


def _print_settings(console: Console, settings: dict[str, dict[str, Any]]) -> None:
    """Print names, defaults and meanings; a meaning that does not name all choices is followed by them."""
    cells = []
    for name, about in settings.items():
        choices = about.get("choices", [])
        unnamed = any(choice not in about["about"] for choice in choices)
        cells.append([name, _default(about["default"]), about["about"] + f" ({', '.join(choices)})" * unnamed])
    print_table(console, [Column("setting", wrap=False), Column("default"), Column("meaning")], cells)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return "" if value is None else str(value)


def _default(value: Any) -> str:
    """A default as a user would type it."""
    if isinstance(value, tuple | list):
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


def print_overview(console: Console, find: Callable[[], Overview], watch: bool) -> None:
    """Print how far a federation is, again and again if it is watched."""
    while True:
        found = find()
        if watch and console.is_terminal:
            console.clear()
        for sentence in found.sentences:
            console.print(sentence, highlight=False, markup=False, soft_wrap=True)
        if found.run is not None and found.run.rounds:
            row, rounds = found.run.last(), found.run.config["rounds"]
            text = f"Round {row['round']} of {rounds}: {_progress(row)}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        if found.sites:
            columns = [number_column("Site"), Column("State"), Column("Last answer"), Column("Problem")]
            print_table(console, columns, found.sites)
        if not watch:
            return
        time.sleep(WATCH_SECONDS)


def print_sent(console: Console, sent: Sequence[Sent], as_json: bool) -> None:
    """Print what a site would send, by message."""
    if as_json:
        console.print_json(json.dumps([one._asdict() for one in sent]))
        return
    for when in dict.fromkeys(one.when for one in sent):
        rows = [(one.name, _cut(one.what), one.meaning) for one in sent if one.when == when]
        columns = [Column("Name", wrap=False), Column("Value, or type of a tensor"), Column("Meaning")]
        print_table(console, columns if any(row[2] for row in rows) else columns[:2], rows, f"Sent {when}")
        console.print()
    console.print(
        "Scores are correct predictions, summed loss, samples; n is the number of training samples. Nothing else is "
        "sent. --json shows long values in full.",
        highlight=False,
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."
