"""Names for shell completion. They are read from the source files, because importing those imports torch, which takes
seconds."""

import re
from pathlib import Path

import typer

PACKAGE = Path(__file__).parents[1]
SOURCES = {  # where the classes are whose names can be given
    "algorithms": "algorithms/*.py",
    "datasets": "data/sets/*.py",
    "models": "models/*.py",
    "partitions": "data/partitions.py",
}
EXPERIMENT = re.compile(r"^(\w+-\w.*):$", re.MULTILINE)  # an id in the files of the papers' experiments
NAME = re.compile(r'^    name = "(.+)"$', re.MULTILINE)  # in the body of a class


def names(kind: str) -> list[str]:
    """All names of a kind that `fedloom list` knows, without those of other packages; also of "metrics"."""
    if kind == "presets":
        return sorted(f"{file.parent.name}/{file.stem}" for file in PACKAGE.glob("presets/*/*.yaml"))
    if kind == "experiments":
        papers = (PACKAGE / "papers").glob("*.yaml")
        return sorted(name for file in papers for name in EXPERIMENT.findall(file.read_text(encoding="utf-8")))
    if kind == "settings":
        from fedloom.config.settings import Settings
        from fedloom.core.settings import fields

        return list(fields(Settings))
    if kind == "metrics":
        from fedloom.metrics.registry import METRICS  # imports numpy only

        return sorted({metric.name for metric in METRICS})
    files = PACKAGE.glob(SOURCES[kind]) if kind in SOURCES else []
    return sorted(name for file in files for name in NAME.findall(file.read_text(encoding="utf-8")))


def names_of_kind(context: typer.Context) -> list[str]:
    """Names for `fedloom list KIND`."""
    return names(context.params.get("kind") or "")
