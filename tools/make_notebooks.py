"""Executes the notebooks of docs/notebooks and saves them with what they show.

python tools/make_notebooks.py
"""

import argparse
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """A notebook with what its cells show when they are executed in a folder; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        record_timing=False, coalesce_streams=True,
    ).execute()  # fmt: skip
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [plain(output) for output in cell.outputs if not is_progress(output)]
    return notebook


def is_progress(output: nbformat.NotebookNode) -> bool:
    """True for the bar below a cell that trains. Nobody needs it when training is over."""
    return "<progress" in output.get("data", {}).get("text/html", "")


def plain(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """An output without the colours of terminals, which pages cannot show."""
    if "text" in output:
        output.text = COLOUR.sub("", output.text)
    return output


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder))
        notebook.metadata.language_info = {"name": "python"}  # without the version of this machine
        nbformat.write(notebook, path)
        print(path.name, f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
