"""Prints the result of `fedloom data check`."""

import json
import os
import shlex
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from fedloom.cli.tables import Column, least_width, number_column, print_table

MAX_SENTENCES = 10  # of one kind
MAX_CLASS_COLUMNS = 8  # with more classes, or long names, the table has no column for each
ROWS_AT_ENDS = 8  # shown at either end of a long table
Row = dict[str, Any]


def print_check(console: Console, report: Row, options: list[str], as_json: bool) -> None:
    """Print what a check found in a user's data, and the command that uses them.

    Args:
        console: where to print.
        report: the dictionary that `fedloom.data.user_data.check.check` returns.
        options: options of the check, which the printed command repeats.
        as_json: print the dictionary as JSON.
    """
    if as_json:
        console.print_json(json.dumps(report))
        return
    if "kind" in report:
        _print_contents(console, report)
    for title, sentences in (("Worth knowing", report["remarks"]), ("To be corrected", report["problems"])):
        if sentences:
            console.print(f"[bold]{title}[/]", highlight=False)
        for sentence in _limited(sentences):
            console.print(Text(f"  {sentence}"), soft_wrap=True)
    if report["ready"]:
        path = report["path"] if os.sep in report["path"] or report["path"] == "." else f".{os.sep}{report['path']}"
        command = ["fedloom", "run", "--dataset", path, *options]
        console.print(Text.assemble(("ready", "bold"), f": {shlex.join(command)}"), soft_wrap=True)
    else:
        count = len(report["problems"])
        text = f": {count} {'thing' if count == 1 else 'things'} to correct"
        console.print(Text.assemble(("not ready", "bold"), text))


def _limited(sentences: list[dict[str, str]]) -> Iterator[str]:
    """The texts of problems or remarks, at most MAX_SENTENCES of each kind."""
    for kind in dict.fromkeys(sentence["kind"] for sentence in sentences):
        texts = [sentence["text"] for sentence in sentences if sentence["kind"] == kind]
        yield from texts[:MAX_SENTENCES]
        if len(texts) > MAX_SENTENCES:
            yield f"... and {len(texts) - MAX_SENTENCES} more like this; --json has all."


def _print_contents(console: Console, report: Row) -> None:
    """Print what is there: samples, what is predicted, clients, and samples per client and class or label."""
    clients, classes, number = report["clients"], report["classes"], report["number"]
    console.print(Text(f"{report['path']}: {report['layout']}"), soft_wrap=True)
    count = f"{len(clients)} clients" if clients else "no clients"
    what = f"{len(classes)} {report['target']}" if classes else "a number to predict"
    text = f"{report['samples']} samples, {what}, {count}; {_sample_description(report)}"
    console.print(text, highlight=False, soft_wrap=True)
    if number:
        low, high, mean, std = (f"{number[name]:.6g}" for name in ("min", "max", "mean", "std"))
        text = f"{number['name']}: {low} to {high}, mean {mean}, standard deviation {std}"
        console.print(Text(text), soft_wrap=True)
    if report["parts"]:
        parts = ", ".join(f"{count} {name}" for name, count in report["parts"].items() if count)
        console.print(f"Parts: {parts}", highlight=False)
    divided = "" if clients else f", divided by {report['partition']} (--partition, --clients)"
    console.print(f"Unless told otherwise: model {report['model']}{divided}", highlight=False)
    if number:
        _print_numbers(console, report)
    else:
        _print_counts(console, report)


def _print_numbers(console: Console, report: Row) -> None:
    """Print mean and standard deviation of the number by client."""
    if report["clients"]:
        everyone = {"client": "all", "samples": report["samples"], **report["number"]}
        *rows, total = (
            [row["client"], row["samples"], *("" if row[m] is None else f"{row[m]:.6g}" for m in ("mean", "std"))]
            for row in [*report["clients"], everyone]
        )
        _print_table(console, ["client", "samples", "mean", "std"], rows, total)


def _print_counts(console: Console, report: Row) -> None:
    """Print samples per client and class or label."""
    clients, classes = report["clients"], report["classes"]
    used = [c for c, entry in enumerate(classes) if entry["samples"]]
    if clients and len(used) <= MAX_CLASS_COLUMNS:
        titles = ["client", "samples", *(classes[c]["class"] for c in used)]
        rows = [[row["client"], row["samples"], *(row["labels"][c] for c in used)] for row in clients]
        total = ["all", report["samples"], *(classes[c]["samples"] for c in used)]
        if least_width(_columns(titles), _texts([*rows, total])) <= console.width:
            _print_table(console, titles, rows, total)
            return
    one, many = ("class", "classes") if report["target"] == "classes" else ("label", "labels")
    columns = ["class", "samples", *(["clients"] if clients else [])]
    _print_table(console, [one, *columns[1:]], [[row[column] for column in columns] for row in classes])
    if clients:
        columns = ["client", "samples", "classes"]
        _print_table(console, [*columns[:2], many], [[row[column] for column in columns] for row in clients])


def _sample_description(report: Row) -> str:
    """What the samples are, such as "4 numbers each"."""
    shape, vocabulary = "x".join(map(str, report["shape"])), report["vocabulary"]
    if report["kind"] == "image":
        return f"pictures of {shape} (channels, height, width)"
    if report["kind"] == "text":
        return f"texts of up to {shape} words, {vocabulary} in the vocabulary"
    if report["kind"] == "sequence":
        return f"sequences of {shape}" + (f" tokens, {vocabulary} in the vocabulary" if vocabulary else "")
    return f"{shape} numbers each"


def _print_table(console: Console, titles: list[str], rows: list[list[Any]], total: list[Any] | None = None) -> None:
    """Print all rows, or of a long table those with the most and the fewest samples; `total` is the last row."""
    if len(rows) > 2 * ROWS_AT_ENDS + 4:
        ranked = sorted(rows, key=lambda row: -row[1])
        rows = [*ranked[:ROWS_AT_ENDS], [f"... {len(rows) - 2 * ROWS_AT_ENDS} more"], *ranked[-ROWS_AT_ENDS:]]
    print_table(console, _columns(titles), _texts([*rows, *([total] if total else [])]))


def _columns(titles: list[str]) -> list[Column]:
    return [Column(titles[0]), *map(number_column, titles[1:])]


def _texts(rows: list[list[Any]]) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in rows]
