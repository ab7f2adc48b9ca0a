"""What the report page shows, as plain data: collected from finished and unfinished runs."""

from __future__ import annotations

import base64
import datetime
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedloom import __version__
from fedloom.config.files import to_yaml
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.errors import UserError, plural
from fedloom.core.federation import SPLITS
from fedloom.metrics.leaderboard import BASELINE, WITHOUT_MODEL, leaderboard
from fedloom.metrics.registry import column_name, in_percent, sign
from fedloom.report.leaderboard import (
    COMPUTATION,
    COSTS,
    VIEWS,
    budget_sentences,
    format_cell,
    format_number,
    main_rows,
    tables,
    tails,
)
from fedloom.runs.directory import RunDirectory
from fedloom.runs.folders import reported_damage
from fedloom.storage.files import read_json, read_table
from fedloom.studies.compare import score, without_model
from fedloom.studies.found_runs import FoundRun, FoundRuns, about_progress, by_label
from fedloom.studies.result import Result

Json = dict[str, Any]
MOST_CELLS = 1_000_000  # values of clients over rounds, of all methods and models
MOST_CLIENTS = 2000  # with more, the page shows some of them
MOST_POINTS = 400  # rounds of a curve
MOST_LABELS = 100_000  # numbers of samples by client and class
MISSING = 65535  # stands for NaN
BUDGET = {key: COMPUTATION[key] for key in ("gradients_in_all", "samples_in_all")}
SCREENED = ("diverged", "left_out")  # reported by the engine, not by a method
HELD_OUT = {"new": "held-out clients, on arrival", "joined": "held-out clients, joined"}  # further views
AGENT = {"eta": "learning rate eta", "alpha": "local epochs alpha", "reward": "reward of a client's agent"}
REPORTED = {  # method -> number that it reports -> what that is; others are called by their names
    "dap-fl": {**AGENT, "acc": "accuracy that a client's agent sees", "loss": "loss that a client's agent sees"},
    "page": {
        **AGENT,
        "U": "discounted rewards U of a client",
        "state": "accuracy that a client's agent sees",
        "p": "weight p of a client in the average",
        "reward_CS": "reward of the server's agent",
        "U_CS": "discounted rewards U of the server",
    },
    "plgu-grep": {"xi": "layer scores xi"},
    "plgu-lf": {"xi": "layer scores xi"},
}


def collect(found: FoundRuns) -> Json:
    """Everything that the page shows of these runs."""
    methods = by_label(found.runs)
    first = found.runs[0].result
    board = _board(methods, first.metric, found.equal_budget)
    partition = _Partition(found.runs[0].folder, first, methods)
    rows = sum(len(_rounds(mine)) for mine in methods.values()) * len(VIEWS)
    thin = max(1, math.ceil(rows * max(1, len(partition.shown)) / MOST_CELLS))
    described = [_method(label, mine, partition, thin) for label, mine in methods.items()]
    data = {
        "title": _title(first, methods),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "progress": about_progress(found),
        "task": _task(first, partition),
        "views": {
            k: text for k, text in (VIEWS | HELD_OUT).items() if any(k in method["curves"] for method in described)
        },
        "partition": partition.described(),
        "methods": described,
        "tables": _tables(board),
        "runs": [_run(run, found.folder) for run in found.runs],
    }
    return _clean({**data, "findings": findings(data, board)})


def _title(result: Result, methods: Mapping[str, Sequence[FoundRun]]) -> str:
    names = {str(runs[0].result.config["algorithm"]["name"]) for runs in methods.values()}
    kind = f"settings of {names.pop()}" if len(names) == 1 else "methods"
    what = next(iter(methods)) if len(methods) == 1 else f"{len(methods)} {kind}"
    return f"{what} on {_dataset(result)}"


def _dataset(result: Result) -> str:
    section = result.config["dataset"]
    return Path(section["path"]).name if section.get("path") else str(section["name"])


def _task(result: Result, partition: _Partition) -> Json:
    metric, config = result.metric, result.config
    return {
        "dataset": _dataset(result),
        "partition": " ".join(f"{k}={v}" if k != "name" else str(v) for k, v in config.get("partition", {}).items()),
        "model": str(config.get("model", {}).get("name", "")),
        "clients": partition.clients,
        "metric": metric,
        "column": column_name(metric),
        "percent": in_percent(metric),
        "higher": sign(metric) > 0,
        "tails": list(tails(metric)),
    }


# -- leaderboard ------------------------------------------------------------------------------------------------------


def _board(methods: Mapping[str, Sequence[FoundRun]], metric: str, equal_budget: str | None) -> list[Json]:
    runs = []
    for label, mine in methods.items():
        for run in mine:
            runs.append(score(label, run.seed, run.result))
            if label == BASELINE and (baseline := without_model(runs[-1], run.result)) is not None:
                runs.append(baseline)
    return leaderboard(runs, metric, equal_budget)


def _tables(board: list[Json]) -> list[Json]:
    """The tables of the leaderboard, as they are printed, with what was computed: each cell has a number to sort by,
    and its text."""
    found = []
    for table in tables(board):
        budget = BUDGET if table.ranked or table.costs == COSTS else {}
        titles = {key: title for key, (title, _) in table.columns.items()} | dict(table.costs) | budget
        shown = [key for key in titles if any(row.get(key) is not None for row in table.rows)]
        rows = []
        for row in table.rows:
            cells = [format_cell(row, column, with_std) for column, (_, with_std) in table.columns.items()]
            spent = [format_number(row[key]) if key in row else "" for key in budget]
            texts = dict(zip(titles, [*cells, *table.cost_cells(row), *spent], strict=True))
            found_cells = [[row.get(key), texts[key]] for key in shown]
            rows.append({"method": row["method"], "rank": row.get("rank"), "cells": found_cells})
        columns = [{"key": key, "title": titles[key]} for key in shown]
        found.append(
            {"title": table.title, "about": table.about, "ranked": table.ranked, "columns": columns, "rows": rows}
        )
    return found


# -- clients ----------------------------------------------------------------------------------------------------------


class _Partition:
    """Clients of a run, and their samples. Of very many, `shown` are some."""

    def __init__(self, folder: Path, result: Result, methods: Mapping[str, Sequence[FoundRun]]) -> None:
        path = folder / "names.json"
        with reported_damage(folder):
            table = read_table(folder / "partition.parquet")
            self.names = read_json(path) if path.exists() else {"clients": [], "classes": []}
        self.table, self.has_classes = table.filter(pc.field("client") >= 0), result.basic_metric == "accuracy"
        self.clients = len(self.table)
        evaluated = np.unique(result.clients["client"].to_numpy())
        self.shown = self._chosen(evaluated, result)

    def _chosen(self, evaluated: np.ndarray, result: Result) -> np.ndarray:
        """Of very many clients some, from the worst to the best served by the first method at equal distances: their
        scores are distributed as those of all."""
        if len(evaluated) <= MOST_CLIENTS:
            return evaluated
        ids, values = _values(result, result.best_on_validation("pre")["round"], "pre")
        scores = np.full(len(evaluated), np.nan)
        scores[np.searchsorted(evaluated, ids)] = values
        order = evaluated[np.argsort(sign(result.metric) * scores, kind="stable")]
        return np.sort(order[np.linspace(0, len(order) - 1, MOST_CLIENTS).round().astype(int)])

    def described(self) -> Json:
        rows = self.table.filter(pc.is_in(pc.field("client"), pa.array(self.shown)))
        sizes = {name: pc.list_value_length(rows[name]).to_pylist() for name in SPLITS}
        labels = rows["labels"].to_pylist()
        names, classes = self.names["clients"], self.names["classes"]
        held_out = rows["held_out"].to_pylist() if "held_out" in rows.column_names else None
        width = len(labels[0]) if labels and self.has_classes else 0
        return {
            "ids": self.shown.tolist(),
            "names": [str(names[i]) if i < len(names) else f"client {i}" for i in self.shown],
            "classes": [str(classes[c]) if c < len(classes) else str(c) for c in range(width)],
            "samples": [sum(each) for each in zip(*sizes.values(), strict=True)],
            "sizes": sizes,
            "labels": labels if 0 < width * len(labels) <= MOST_LABELS else None,
            "held_out": held_out,
            "clients": self.clients,
        }


# -- methods ----------------------------------------------------------------------------------------------------------


def _method(label: str, runs: Sequence[FoundRun], partition: _Partition, thin: int) -> Json:
    """Everything about one method, with means over its seeds."""
    results = [run.result for run in runs]
    column = column_name(results[0].metric)
    rounds = _rounds(runs)
    views = [view for view in (*VIEWS, *HELD_OUT) if all(f"{view}_{column}" in r.clients.column_names for r in results)]
    at = rounds[:: max(1, math.ceil(len(rounds) / MOST_POINTS))]
    at = sorted({*at, *rounds[-1:]})
    kept = sorted({*rounds[::thin], *rounds[-1:]})
    name = str(results[0].config["algorithm"]["name"])
    uploads = dict(ALGORITHMS[name].uploads) if name in ALGORITHMS.names() else None
    return {
        "label": label,
        "name": name,
        "seeds": [run.seed for run in runs],
        "finished": all(run.finished for run in runs),
        "stopped": next((r.stopped for r in results if r.stopped), ""),
        "curves": {view: _curves(results, view, at) for view in views},
        "axes": _axes(results, at),
        "rounds": kept,
        "scores": {view: _scores(results, view, kept, partition.shown) for view in views},
        "final": {view: _final(results, view, partition.shown) for view in views},
        "validation": _validation(results),
        "reports": _reports(results, at, REPORTED.get(name, {})),
        "screened": _screened(results, partition.shown),
        "confusion": _confusion(results),
        "reliability": _reliability(results),
        "uploads": uploads,
        "epsilon": max((r.epsilon for r in results if r.epsilon is not None), default=None),
    }


def _rounds(runs: Sequence[FoundRun]) -> list[int]:
    """Rounds that were evaluated with all seeds."""
    common = set.intersection(*({row["round"] for row in run.result.rounds} for run in runs))
    if not common:
        raise UserError(
            f"The runs of {runs[0].label} have no evaluated round in common; wait for the next one, or give the folder "
            "of one of them."
        )
    return sorted(common)


def _curves(results: Sequence[Result], view: str, at: Sequence[int]) -> Json:
    """Statistics over clients in every round, as means over seeds."""
    column, found = column_name(results[0].metric), {}
    rows = [{row["round"]: row for row in result.rounds} for result in results]
    for key in ("mean", "low5", "top5", "worst"):
        name = f"{view}_{column}_{key}"
        found[key] = [_mean([by_round[t].get(name) for by_round in rows]) for t in at]
    found["loss"] = [_mean([by_round[t].get(f"{view}_loss") for by_round in rows]) for t in at]
    return found


def _axes(results: Sequence[Result], at: Sequence[int]) -> Json:
    """What was spent up to each round: rounds, gradients of a client, bytes of all clients, seconds."""
    found: Json = {"rounds": list(at)}
    spent: dict[str, list[np.ndarray]] = {"gradients": [], "seconds": [], "bytes": []}
    for result in results:
        timings, last = result.timings, max(at)
        columns = {name: np.zeros(last + 1) for name in spent}
        for row in timings[:last]:
            seconds = sum(v for name, v in row.items() if name.endswith("_seconds") and v is not None)
            columns["seconds"][row["round"]] = seconds
            columns["gradients"][row["round"]] = (row.get("gradients") or 0.0) * (row.get("participation") or 0.0)
        before = 0
        for row in result.rounds:  # rounds between two evaluations count as the later one
            if row["round"] <= last:
                columns["bytes"][before + 1 : row["round"] + 1] = row["bytes_down"] + row["bytes_up"]
                before = row["round"]
        for name, values in columns.items():
            spent[name].append(np.cumsum(values)[list(at)])
    return found | {name: np.mean(values, axis=0).tolist() for name, values in spent.items()}


def _values(result: Result, t: int, view: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the clients that were evaluated after round t, and the metric of each of them."""
    table = result.clients.filter(pc.field("round") == t)
    return table["client"].to_numpy(), _column(table, f"{view}_{column_name(result.metric)}")


def _column(table: pa.Table, name: str) -> np.ndarray:
    if name not in table.column_names:
        return np.full(len(table), np.nan)
    return table[name].to_numpy().astype(np.float64)


def _scores(results: Sequence[Result], view: str, rounds: Sequence[int], ids: np.ndarray) -> Json:
    """The metric of every client in every round, as a mean over seeds: 16-bit numbers between `low` and `high`, in
    base64, round by round."""
    column = f"{view}_{column_name(results[0].metric)}"
    found = []
    for result in results:
        table = result.clients
        t, client = table["round"].to_numpy(), table["client"].to_numpy()
        values = np.full((len(rounds), len(ids)), np.nan)
        known = np.isin(t, rounds) & np.isin(client, ids)
        places = np.searchsorted(rounds, t[known]), np.searchsorted(ids, client[known])
        values[places] = _column(table, column)[known]
        found.append(values)
    mean = _mean_of_known(np.stack(found))
    low, high = _limits(mean)
    scaled = np.where(np.isnan(mean), MISSING, np.round((mean - low) / max(high - low, 1e-12) * (MISSING - 1)))
    return {"low": low, "high": high, "data": base64.b64encode(scaled.astype("<u2").tobytes()).decode()}


def _final(results: Sequence[Result], view: str, ids: np.ndarray) -> Json:
    """The metric of every client in the round that is best on validation data: mean, lowest and highest over seeds; and
    the mean over all clients. Held-out clients have no say in which round that is."""
    rows = np.full((len(results), len(ids)), np.nan)
    best = [result.best_on_validation("pre" if view in HELD_OUT else view) for result in results]
    for row, result, chosen in zip(rows, results, best, strict=True):
        clients, values = _values(result, chosen["round"], view)
        known = np.isin(clients, ids)
        row[np.searchsorted(ids, clients[known])] = values[known]
    mean = _mean_of_known(rows)
    low, high = (f(np.where(np.isnan(rows), mean, rows), axis=0) for f in (np.min, np.max))
    return {
        "score": _mean([chosen.get(f"{view}_{column_name(results[0].metric)}_mean") for chosen in best]),
        **{name: np.round(v, 4).tolist() for name, v in (("mean", mean), ("low", low), ("high", high))},
    }


def _validation(results: Sequence[Result]) -> Json:
    """Metric and loss of the personal models on validation data, in the round that is best there."""
    rows = [result.best_on_validation() for result in results]
    names = {"score": f"pre_val_{column_name(results[0].metric)}_mean", "loss": "pre_val_loss"}
    return {key: _mean([row.get(name) for row in rows]) for key, name in names.items()}


def _reports(results: Sequence[Result], at: Sequence[int], texts: Mapping[str, str]) -> list[Json]:
    """Numbers that the method reports. Of clients, mean and range over the cohort; of vectors, the mean."""
    tables, found = [result.reports for result in results], []
    for name in tables[0].column_names:
        if name in ("round", "client", *SCREENED):
            continue
        kind, about = tables[0].schema.field(name).type, texts.get(name, name.replace("_", " "))
        if pa.types.is_list(kind):
            found.append({"name": about, "who": "vector", **_vector_report(name, tables, at)})
        elif pa.types.is_floating(kind) or pa.types.is_integer(kind):
            for who, keep in (("clients", pc.field("client") >= 0), ("server", pc.field("client") < 0)):
                part = [t.filter(keep & pc.field(name).is_valid()) for t in tables if name in t.column_names]
                if any(len(t) for t in part):
                    found.append({"name": about, "who": who, **_report_curve(name, part, at)})
    return found


def _report_curve(name: str, tables: Sequence[pa.Table], at: Sequence[int]) -> Json:
    table = pa.concat_tables([t.select(["round", name]) for t in tables])
    groups = table.group_by("round").aggregate([(name, "mean"), (name, "min"), (name, "max")]).to_pylist()
    rows = {row["round"]: row for row in groups}
    known = [t for t in at if t in rows]
    return {"rounds": known, **{key: [rows[t][f"{name}_{key}"] for t in known] for key in ("mean", "min", "max")}}


def _vector_report(name: str, tables: Sequence[pa.Table], at: Sequence[int]) -> Json:
    means: dict[int, list[np.ndarray]] = {}
    for table in tables:
        part = table.filter(pc.field(name).is_valid() & pc.is_in(pc.field("round"), pa.array(list(at))))
        for t, row in zip(part["round"].to_pylist(), part[name].to_pylist(), strict=True):
            means.setdefault(t, []).append(np.asarray(row, dtype=np.float64))
    rounds = [t for t in at if t in means]
    return {"rounds": rounds, "values": [np.mean(means[t], 0).tolist() for t in rounds]}


def _screened(results: Sequence[Result], ids: np.ndarray) -> Json:
    """How often uploads of each client were not used, over all seeds: because they were not finite, or too large."""
    found: Json = {}
    for name in SCREENED:
        counts = np.zeros(len(ids))
        for result in results:
            if name in result.reports.column_names:
                rows = result.reports.filter((pc.field(name) > 0) & pc.is_in(pc.field("client"), pa.array(ids)))
                np.add.at(counts, np.searchsorted(ids, rows["client"].to_numpy()), 1)
        if counts.any():
            found[name] = {str(i): int(counts[i]) for i in np.flatnonzero(counts)}  # by position in `ids`
    return found


def _kept_metrics(result: Result) -> pa.Table | None:
    """Metrics of the clients' models in the round that is best on validation data, if they were kept."""
    if result.metrics is None:
        return None
    found = result.metrics.filter(pc.field("round") == result.best_on_validation()["round"])
    return found if len(found) else None


def _confusion(results: Sequence[Result]) -> list[list[int]] | None:
    """The confusion matrix of all clients, summed over seeds."""
    tables = [_kept_metrics(result) for result in results]
    if any(t is None or "confusion" not in t.column_names for t in tables):
        return None
    counts = sum(np.array(t["confusion"].to_pylist()).sum(0) for t in tables if t is not None)
    width = math.isqrt(len(counts))
    return counts.reshape(width, width).tolist()


def _reliability(results: Sequence[Result]) -> list[list[float]] | None:
    """Samples, mean confidence and accuracy of each bin of confidence, over all clients and seeds."""
    tables = [_kept_metrics(result) for result in results]
    if any(t is None or "reliability" not in t.column_names for t in tables):
        return None
    rows = [np.array(t["reliability"].to_pylist(), dtype=np.float64) for t in tables if t is not None]
    samples, confidence, correct = np.nansum(np.concatenate(rows), axis=0).reshape(-1, 3).T
    with np.errstate(invalid="ignore"):
        return np.stack([samples, confidence / samples, correct / samples], axis=1).tolist()


# -- runs -------------------------------------------------------------------------------------------------------------


def _run(run: FoundRun, folder: Path) -> Json:
    """How a run was made."""
    starts = run.folder / "environment.json"
    with reported_damage(run.folder):
        found = read_json(starts, "starts") if starts.exists() else []
    last = found[-1] if found else {}
    command = [Path(word).name if j == 0 else word for j, word in enumerate(last.get("command", []))]
    plan = RunDirectory(run.folder).plan()
    return {
        "label": run.label,
        "seed": run.seed,
        "folder": run.folder.name if run.folder == folder else run.folder.relative_to(folder).as_posix(),
        "finished": run.finished,
        "round": run.result.last()["round"],
        "rounds": run.result.config.get("rounds"),
        "seconds": run.result.seconds,
        "command": shlex.join(command),
        "packages": last.get("packages", {}),
        "machine": " ".join(str(last[key]) for key in ("processor", "device") if last.get(key)),
        "plan": {} if plan is None else {k: v for k, v in plan.record().items() if isinstance(v, str | int | float)},
        "config": to_yaml(run.result.config),
    }


# -- findings ---------------------------------------------------------------------------------------------------------


def findings(data: Json, board: list[Json]) -> list[str]:
    """What a reader should know first, in sentences: who is best, who is left behind, what it cost, what is sent."""
    task = data["task"]
    rows = [row for row in main_rows(board) if row["method"] not in WITHOUT_MODEL]
    return [
        *_best(rows, task), *_by_validation(data), *_left_behind(rows, data), *budget_sentences(board),
        *_not_used(data), *_sent(data),
    ]  # fmt: skip


def _best(rows: list[Json], task: Json) -> list[str]:
    name = f"{task['column']}_mean"
    if len(rows) < 2:
        return [f"Mean {task['metric']} of clients: {_number(row[name], task)}." for row in rows]
    first = rows[0]
    ties = [row["method"] for row in rows[1:] if row.get("rank") == 1]
    told = f"{first['method']} serves clients best on average ({_number(first[name], task)})"
    if ties:
        return [f"{told}; {_listed(ties)} {'is' if len(ties) == 1 else 'are'} a tie with it, by the paired test."]
    return [f"{told}, by more than chance." if "rank" in first else f"{told}."]


def _by_validation(data: Json) -> list[str]:
    """Which setting of a method to choose: the leaderboard, which has test scores, must not select it."""
    task, methods = data["task"], [m for m in data["methods"] if m["validation"]["score"] is not None]
    if len(methods) < 2 or len({method["name"] for method in data["methods"]}) > 1:
        return []
    direction = -1 if task["higher"] else 1

    def rank(method: Json) -> tuple[float, float]:
        score, loss = method["validation"]["score"], method["validation"]["loss"]
        return direction * score, math.inf if loss is None else loss

    best = min(methods, key=rank)
    told = f"On validation data {best['label']} is best ({_number(best['validation']['score'], task)})"
    return [f"{told}; choose settings by that, as all other scores here are on test data."]


def _left_behind(rows: list[Json], data: Json) -> list[str]:
    task, found = data["task"], [*_worst_served(rows[0], data)] if rows else []
    low = f"{task['column']}_low5"
    scored = [row for row in rows if row.get(low) is not None]
    if scored:
        pick = max if task["higher"] else min
        best = pick(scored, key=lambda row: row[low])
        what = f"for the {task['tails'][0]} of clients"
        if len(scored) > 1:
            found.append(f"Best {what}: {best['method']} ({_number(best[low], task)}).")
        else:
            found.append(f"Mean {task['metric']} of the {task['tails'][0]} of clients: {_number(best[low], task)}.")
    harmed = [row for row in rows if row.get("harmed") is not None and row["method"] != BASELINE]
    if harmed:
        least, most = (f(harmed, key=lambda row: row["harmed"]) for f in (min, max))
        if least is most:
            found.append(f"With {most['method']}, {most['harmed']:.0f} % of clients do worse than by training alone.")
        else:
            found.append(
                f"Clients that do worse than by training alone: fewest with {least['method']} "
                f"({least['harmed']:.0f} %), most with {most['method']} ({most['harmed']:.0f} %)."
            )
    return found


def _worst_served(first: Json, data: Json) -> list[str]:
    """The client that the best method serves worst, if all clients are shown."""
    task, partition = data["task"], data["partition"]
    final = next((m["final"].get(first["model"]) for m in data["methods"] if m["label"] == first["method"]), None)
    known = [(v, i) for i, v in enumerate(final["mean"]) if v is not None and math.isfinite(v)] if final else []
    if len(known) < 2 or len(partition["ids"]) >= MOST_CLIENTS:
        return []
    worst = (min if task["higher"] else max)(v for v, _ in known)
    some = [partition["names"][i] for v, i in known if v == worst]
    who = some[0] if len(some) == 1 else f"{some[0]} and {plural(len(some) - 1, 'other client')}"
    return [f"With {first['method']}, {who} {'is' if len(some) == 1 else 'are'} worst off ({_number(worst, task)})."]


def _not_used(data: Json) -> list[str]:
    lost = {m["label"]: sum(sum(counts.values()) for counts in m["screened"].values()) for m in data["methods"]}
    told = [f"{n} of {label}" for label, n in lost.items() if n]
    return [f"Uploads that the server did not use: {_listed(told)} (below, under Uploads not used)."] if told else []


def _sent(data: Json) -> list[str]:
    sending = [method for method in data["methods"] if method["uploads"]]
    if not sending:
        return []
    without = [method["label"] for method in sending if method["epsilon"] in (None, math.inf)]
    if not without:
        epsilon = max(method["epsilon"] for method in sending)
        return [f"Uploads have differential privacy, with epsilon {epsilon:.3g} at most."]
    of = f" of {_listed(without)}" if len(without) < len(sending) else ""
    return [f"Uploads{of} have no differential privacy: the server sees what each client sends (below, under Cost)."]


def _number(value: float, task: Json) -> str:
    return f"{value:.1f} %" if task["percent"] else f"{value:.4g}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# -- numbers ----------------------------------------------------------------------------------------------------------


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else None


def _mean_of_known(values: np.ndarray) -> np.ndarray:
    """The mean over the first axis of what is not NaN; NaN where nothing is known."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0).sum(0) / known.sum(0)


def _limits(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)


def _clean(value: Any) -> Any:
    """A value for JSON: numbers with six significant digits, and None for what is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return _clean(value.item())
    if isinstance(value, Mapping):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value
