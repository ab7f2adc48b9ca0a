"""Progress in notebooks: a bar below the cell that calls `run`, `compare` or `sweep`."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Sequence
from typing import Any

from fedloom.metrics.registry import column_name
from fedloom.studies.callbacks import Callback, TrainingRun, checked
from fedloom.studies.devices import OnProgress, WorkItem
from fedloom.studies.result import Result

SECONDS_BETWEEN = 0.2  # updates of a bar


def with_progress(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks and, in a notebook, a progress bar, unless there is one among them."""
    found = checked(callbacks)
    if in_notebook() and not any(isinstance(one, NotebookProgress) for one in found):
        found.append(NotebookProgress())
    return found


def in_notebook() -> bool:
    """True if the code runs in a kernel of Jupyter, whose output can be replaced."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookProgress(Callback):
    """A progress bar with the score of the last evaluated round. In notebooks it is there without being asked for."""

    def __init__(self) -> None:
        self._group: tuple[int, int] | None = None
        self._done: dict[TrainingRun, tuple[int, int]] = {}  # rounds that are done, rounds in all
        self._handle: Any = None
        self._title = self._text = ""
        self._updated = 0.0

    def on_setup(self, run: TrainingRun) -> None:
        if run.group != self._group or self._finished:
            from IPython.display import display

            self._group, self._done, self._title, self._text = run.group, {}, run.title, "getting ready"
            self._handle = display(self._bundle(), raw=True, display_id=True)
        self._done[run] = 0, run.rounds

    def on_start(self, run: TrainingRun) -> None:
        self._done[run] = run.round, run.rounds
        self._text = "" if self._text == "getting ready" else self._text

    def on_round(self, run: TrainingRun) -> None:
        self._done[run] = run.round, run.rounds
        if run.metrics is not None:
            self._text = score(run.metrics, run.metric)
        if time.monotonic() - self._updated > SECONDS_BETWEEN:
            self._update()

    def on_end(self, run: TrainingRun, result: Result) -> None:
        self._done[run] = run.round, run.round
        self._text += f" (ended early: {result.stopped})" if result.stopped and run.together == 1 else ""
        self._update()

    @property
    def _finished(self) -> bool:
        return all(done == total for done, total in self._done.values())

    def _update(self) -> None:
        self._updated = time.monotonic()
        self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        """What is displayed, as text and as HTML."""
        done, total = (sum(numbers) for numbers in zip(*self._done.values(), strict=True)) if self._done else (0, 0)
        rounds = f"{done}/{total} rounds" if total else ""
        words = [word for word in (rounds, self._text) if word]
        bar = f"<progress value='{done}' max='{max(total, 1)}'></progress>"
        return {
            "text/plain": ", ".join([self._title, *words]),
            "text/html": f"{bar} {html.escape(', '.join([self._title, *words]))}",
        }


def device_progress() -> OnProgress | None:
    """In a notebook, what shows the progress of several devices."""
    return DeviceProgress() if in_notebook() else None


class DeviceProgress:
    """A progress bar for each group of runs that a device carries out, and what is finished."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown: dict[str, str] = {}
        self._updated = 0.0

    def __call__(self, items: Sequence[WorkItem]) -> None:
        lines = [f"{sum(item.finished for item in items)}/{len(items)} finished"]
        bars = [lines[0]]
        for item in items:
            if item.device and not item.finished:
                lines.append(f"{item.device}: {item.title}, {item.done}/{item.total} rounds")
                bars.append(f"<progress value='{item.done}' max='{item.total}'></progress> {html.escape(lines[-1])}")
        shown = {"text/plain": "\n".join(lines), "text/html": "<br>".join(bars)}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, raw=True, display_id=True)
        elif shown == self._shown or (time.monotonic() - self._updated < SECONDS_BETWEEN and len(lines) > 1):
            return  # it is called again soon, unless nothing is left to do
        else:
            self._handle.update(shown, raw=True)
        self._shown, self._updated = shown, time.monotonic()


def score(row: dict[str, Any], metric: str) -> str:
    """What a progress bar says of an evaluated round, such as "accuracy mean 91.2, worst 70.0"; "" if it has none."""
    name = column_name(metric)
    found = {word: row.get(f"pre_{name}_{word}") for word in ("mean", "worst")}
    known = [f"{word} {value:.4g}" for word, value in found.items() if value is not None]
    return f"{metric} {', '.join(known)}" if known else ""
