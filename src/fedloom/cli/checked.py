"""How the check of somebody's own data looks in a terminal."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

MOST = 10  # sentences of one kind
WIDEST = 8  # classes that are columns of a table
ENDS = 8  # rows at either end of a long list
Row = dict[str, Any]


def checked(console: Console, found: Row, given: list[str], as_json: bool) -> None:
    """What is there, what is wrong with it, and how it is used; `given` are the options that were."""
    if as_json:
        console.print_json(json.dumps(found))
        return
    if "kind" in found:
        _contents(console, found)
    for title, sentences in (("Worth knowing", found["remarks"]), ("To be corrected", found["problems"])):
        if sentences:
            console.print(f"[bold]{title}[/]", highlight=False)
        for sentence in _shortened(sentences):
            console.print(Text(f"  {sentence}"), soft_wrap=True)
    if found["ready"]:
        path = found["path"] if os.sep in found["path"] or found["path"] == "." else f".{os.sep}{found['path']}"
        words = ["fedloom", "run", "--dataset", path, *given]
        console.print(Text.assemble(("ready", "bold"), f": {shlex.join(words)}"), soft_wrap=True)
    else:
        count = len(found["problems"])
        text = f": {count} {'thing' if count == 1 else 'things'} to correct"
        console.print(Text.assemble(("not ready", "bold"), text))


def _shortened(sentences: list[dict[str, str]]) -> Iterator[str]:
    """All of them, unless there are very many of a kind."""
    for kind in dict.fromkeys(one["kind"] for one in sentences):
        mine = [one["text"] for one in sentences if one["kind"] == kind]
        yield from mine[:MOST]
        if len(mine) > MOST:
            yield f"... and {len(mine) - MOST} more like this; --json has all."


def _contents(console: Console, found: Row) -> None:
    clients, classes = found["clients"], found["classes"]
    console.print(Text(f"{found['path']}: {found['layout']}"), soft_wrap=True)
    whose = f"{len(clients)} clients" if clients else "no clients"
    text = f"{found['samples']} samples, {len(classes)} classes, {whose}; {_what(found)}"
    console.print(text, highlight=False, soft_wrap=True)
    if found["parts"]:
        parts = ", ".join(f"{count} {name}" for name, count in found["parts"].items() if count)
        console.print(f"Parts: {parts}", highlight=False)
    divided = "" if clients else f", divided by {found['partition']} (--partition, --clients)"
    console.print(f"Unless told otherwise: model {found['model']}{divided}", highlight=False)
    used = [c for c, one in enumerate(classes) if one["samples"]]
    if clients and len(used) <= WIDEST:
        rows = [[one["client"], one["samples"], *(one["labels"][c] for c in used)] for one in clients]
        total = ["all", found["samples"], *(classes[c]["samples"] for c in used)]
        _print(console, ["client", "samples", *(classes[c]["class"] for c in used)], rows, total)
        return
    columns = ["class", "samples", *(["clients"] if clients else [])]
    _print(console, columns, [[one[column] for column in columns] for one in classes])
    if clients:
        columns = ["client", "samples", "classes"]
        _print(console, columns, [[one[column] for column in columns] for one in clients])


def _what(found: Row) -> str:
    shape, vocabulary = "x".join(map(str, found["shape"])), found["vocabulary"]
    if found["kind"] == "image":
        return f"pictures of {shape} (channels, height, width)"
    if found["kind"] == "text":
        return f"texts of up to {shape} words, {vocabulary} in the vocabulary"
    if found["kind"] == "sequence":
        return f"sequences of {shape}" + (f" tokens, {vocabulary} in the vocabulary" if vocabulary else "")
    return f"{shape} numbers each"


def _print(console: Console, columns: list[str], rows: list[list[Any]], total: list[Any] | None = None) -> None:
    """All rows, or those with the most and the fewest samples."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if i else "left", overflow="ellipsis", no_wrap=True)
    if len(rows) > 2 * ENDS + 4:
        ranked = sorted(rows, key=lambda row: -row[1])
        rows = [*ranked[:ENDS], [f"... {len(rows) - 2 * ENDS} more"], *ranked[-ENDS:]]
    for row in [*rows, *([total] if total else [])]:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)
