"""The notebooks of the documentation run, and what is saved in them is what the current code shows."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
TOLERANCE = 20  # percentage points: another CPU rounds differently, and the smallest clients have 9 test samples
LARGEST = 200_000  # bytes of a file
PATH = re.compile(r"(?<![\w.])/\w+/\w+")

spec = importlib.util.spec_from_file_location("make_notebooks", ROOT / "tools" / "make_notebooks.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(output):
    return output.get("text", "") or output.get("data", {}).get("text/plain", "")


def lines_of(text):
    """The numbers of each line, by the words in it; spaces follow from the widths of numbers."""
    found = {}
    for line in filter(str.strip, text.splitlines()):
        words = " ".join(NUMBER.sub("", line).split())
        found.setdefault(words, []).append([float(number) for number in NUMBER.findall(line)])
    return found


def compare(saved, shown):
    """Assert that two outputs are of one kind, and have the same lines with similar numbers, in any order: the ranks of
    methods may change. Of lines without words, such as the ids of clients, there have to be as many."""
    assert saved.output_type == shown.output_type
    assert sorted(saved.get("data", {})) == sorted(shown.get("data", {}))
    before, after = lines_of(text_of(saved)), lines_of(text_of(shown))
    assert before.keys() == after.keys()
    for words, rows in before.items():
        assert [len(row) for row in rows] == [len(row) for row in after[words]], words
        if words.strip(". "):
            for old, new in zip(rows, after[words], strict=True):
                assert new == pytest.approx(old, abs=TOLERANCE), words


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_saved(path, tmp_path):
    saved = nbformat.read(path, as_version=4)
    shown = tool.executed(path, tmp_path)
    for old, new in zip(code_cells(saved), code_cells(shown), strict=True):
        assert len(old.outputs) == len(new.outputs), old.source
        for output in zip(old.outputs, new.outputs, strict=True):
            compare(*output)


def stream(text):
    return nbformat.v4.new_output("stream", text=text)


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (stream("fedavg 89.0 %\nditto   93.5 %\n"), True),
        (stream("ditto 93.5 %\nfedavg 101 %\n"), True),  # another order, another width
        (stream("ditto 93.5 %\nfedavg 65.0 %\n"), False),
        (stream("ditto 93.5 %\n"), False),
        (stream("ditto 93.5\nfedavg 89.0\n"), False),
        (stream("ditto 93.5 %\nfedavg 89.0 90.0 %\n"), False),
        (nbformat.v4.new_output("execute_result", {"text/plain": "fedavg 89.0 %\nditto 93.5 %"}), False),
    ],
)
def test_outputs_that_differ_are_found(other, equal):
    if equal:
        compare(stream("fedavg 89.0 %\nditto 93.5 %\n"), other)
    else:
        with pytest.raises(AssertionError):
            compare(stream("fedavg 89.0 %\nditto 93.5 %\n"), other)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_saved_notebook_is_small_and_says_nothing_of_the_machine(path):
    assert path.stat().st_size < LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert re.fullmatch("# .+", notebook.cells[0].source)
    cells = code_cells(notebook)
    assert len(cells) < 12
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output.output_type != "error"
        assert not tool.is_progress(output)
        assert not PATH.search(text_of(output)), text_of(output)
        assert "\x1b" not in text_of(output)
