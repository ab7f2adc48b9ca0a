"""Progress in a notebook: in a real kernel, and what it shows."""

import nbformat
import pytest
from nbclient import NotebookClient

import fedloom
from fedloom.studies.notebook import NotebookProgress, in_notebook, with_progress

CELL = """
import fedloom
settings = dict(rounds=2, clients=4, engine="reference", dataset="synthetic")
fedloom.run("ditto", **settings)
"""
COMPARE = 'fedloom.compare(["fedavg"], seeds=2, **settings)'


def test_a_run_and_a_comparison_in_a_notebook():
    cells = [nbformat.v4.new_code_cell(text) for text in (CELL, COMPARE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    run, comparison = ([output.get("data", {}) for output in cell.outputs] for cell in notebook.cells)
    bar, result = run
    assert bar["text/plain"].startswith("ditto, 2/2 rounds, accuracy mean ")
    assert "<progress value='2' max='2'></progress> ditto" in bar["text/html"]
    assert result["text/plain"].startswith("Result(ditto on synthetic, 4 clients, round 2 of 2")
    *bars, board = [data["text/plain"] for data in comparison]
    assert [bar.split(", accuracy")[0] for bar in bars] == [
        "1/2 local, 2 runs, 4/4 rounds", "2/2 fedavg, 2 runs, 4/4 rounds",
    ]  # fmt: skip
    assert board.startswith("Comparison(2 methods on synthetic, seeds 0, 1")


def test_there_is_no_bar_elsewhere(capsys):
    assert not in_notebook()
    assert with_progress([]) == []
    fedloom.run("fedavg", rounds=1, clients=4, dataset="synthetic", engine="reference")
    assert capsys.readouterr() == ("", "")


def test_a_bar_of_your_own_is_the_only_one(monkeypatch):
    monkeypatch.setattr("fedloom.studies.notebook.in_notebook", lambda: True)
    mine = NotebookProgress()
    assert with_progress([mine]) == [mine]
    (added,) = with_progress([])
    assert isinstance(added, NotebookProgress)


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, instead of displaying it."""
    found = []

    class Handle:
        def update(self, data, raw):
            found[-1].append(data["text/plain"])

    def display(data, raw, display_id):
        found.append([data["text/plain"]])
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr("fedloom.studies.notebook.SECONDS_BETWEEN", 0)
    return found


def test_a_bar_shows_where_a_run_is_and_why_it_ended(shown):
    settings = {"rounds": 9, "clients": 4, "dataset": "synthetic", "engine": "reference"}
    fedloom.run("fedavg", callbacks=[NotebookProgress()], on_round=lambda done, *_: done == 2, **settings)
    ((first, *later),) = shown
    assert first == "fedavg, getting ready"
    assert [text.split(", accuracy")[0] for text in later] == [
        "fedavg, 1/9 rounds", "fedavg, 2/9 rounds", "fedavg, 2/2 rounds",
    ]  # fmt: skip
    assert later[-1].endswith("(ended early: on_round returned True)")
