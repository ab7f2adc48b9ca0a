"""The report of runs as one HTML page, see docs/report.md."""

from __future__ import annotations

from pathlib import Path

from fedloom.core.errors import UserError, check_path
from fedloom.report.page.assemble import page
from fedloom.storage.files import text_writer, write_file
from fedloom.studies.found_runs import find_runs
from fedloom.studies.report_data import collect

FILE = "report.html"


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write a page about the runs in a folder: who is served how well, at what cost, and who is left behind.

    >>> fedloom.write_report("runs/compare-digits-1")  # doctest: +SKIP

    The page is one file, which needs no network. An older page is replaced.

    Args:
        folder: of a run, a comparison, a sweep, or any folder with runs on one task. They need not be finished.
        out: the file, `report.html` in the folder by default.

    Returns:
        The path of the file.
    """
    source = Path(folder)
    path = source / FILE if out is None else Path(out)
    check_path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file for the report, such as {path / FILE}.")
    if not path.parent.is_dir() and out is not None:
        raise UserError(f"There is no folder {path.parent} for the report; make it, or give another file.")
    write_file(path, text_writer(page(collect(find_runs(source)))))
    return path
