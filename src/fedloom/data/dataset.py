"""A data set before it is divided among clients."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.federation import Scaling
from fedloom.core.registry import Registry


@dataclass(frozen=True, eq=False)
class RawDataset:
    x: np.ndarray
    y: np.ndarray
    classes: int
    official_test: np.ndarray | None = None  # rows that the publishers of the data set side_stream_warmup for testing
    official_val: np.ndarray | None = None  # and for validation
    natural: tuple[np.ndarray, ...] | None = None  # whose the samples are by nature
    server: np.ndarray | None = None  # rows that the data set itself gives to the server
    ordered: bool = False  # a client's samples are split in the order in which they are listed
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    vocab: int | None = None  # number of token ids, where samples are sequences of them
    unscored: tuple[int, ...] = ()  # classes that are learnt, but as targets not scored (end of sentence, unknown word)
    scaling: Scaling | None = None
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()  # of the natural clients
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Source:
    """A file that a data set is made from, and where it is published."""

    file: str  # its path in the data set's folder
    urls: tuple[str, ...]  # the publisher's, then mirrors
    unpack: bool = False  # an archive whose members go into the folder


@dataclass(frozen=True)
class Dataset(ABC):
    """A data set by name. Subclasses set the class variables and add fields for their options."""

    name: ClassVar[str]
    about: ClassVar[str]
    size: ClassVar[str]
    model: ClassVar[str]  # the model and the settings of local training that are used when none are given
    partition: ClassVar[str] = "dirichlet_class"
    aliases: ClassVar[tuple[str, ...]] = ()  # other names that its folder may have
    built_in: ClassVar[bool] = False  # made or installed with the package: there are no files
    licence: ClassVar[str] = ""
    sources: ClassVar[tuple[Source, ...]] = ()  # what a download fetches
    debian: ClassVar[tuple[str, Path] | None] = None  # a package that has it, and where that puts it
    usual: ClassVar[dict[str, Any]] = {}  # also of its partition: "partition.beta"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        DATASETS.add(cls.name, cls)

    def defaults(self) -> tuple[str, str, dict[str, Any]]:
        """Model, partition and settings that are used when none are given."""
        return self.model, self.partition, self.usual

    @abstractmethod
    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read or make the samples. `clients` and `seed` matter where they are made, or where so many of many natural
        clients are taken."""


DATASETS: Registry[type[Dataset]] = Registry("data set", "fedloom.data.sets")


def folders(dataset: type[Dataset], data_dir: Path | None) -> list[Path]:
    """Where a data set may lie, in the order in which it is looked for; a download goes to the first."""
    names = (dataset.name, *dataset.aliases)
    if data_dir is not None:
        return [*(data_dir / name for name in names), data_dir]
    roots = [Path(os.environ["FEDLOOM_DATA"])] if os.environ.get("FEDLOOM_DATA") else []
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"
    found = [*(root / name for root in roots for name in names), cache / dataset.name]
    return found + ([dataset.debian[1]] if dataset.debian else [])


def locate(dataset: type[Dataset], data_dir: Path | None, layouts: Mapping[str, tuple[str, ...]]) -> tuple[Path, str]:
    """The folder of a data set, and the name of the layout whose files (relative paths, `*` as in a shell) are all
    there. Layouts that come first are preferred, and named to somebody who has none."""
    looked = folders(dataset, data_dir)
    begun: list[tuple[int, Path, str]] = []
    for folder in looked:
        for layout, files in layouts.items():
            absent = [file for file in files if not _there(folder, file)]
            if not absent:
                return folder, layout
            if len(absent) < len(files):
                begun.append((len(files) - len(absent), folder, absent[0]))
    ways = [f"run 'fedloom data download {dataset.name}'"] if dataset.sources else []
    if begun:
        _, folder, file = max(begun, key=lambda found: found[0])
        ways.append("put it there")
        raise UserError(f"{folder} has no {file}, which data set '{dataset.name}' needs; {', or '.join(ways)}.")
    ways += [f"install Debian's package '{dataset.debian[0]}'"] if dataset.debian else []
    first, *rest = next(iter(layouts.values()))
    more = f" and {rest[0]}" if len(rest) == 1 else f" and the other {len(rest)} files of docs/data.md" if rest else ""
    ways.append(f"put {first}{more} into {looked[0]}")
    places = " or ".join(str(folder) for folder in looked)
    raise UserError(f"Data set '{dataset.name}' was not found in {places}; {', or '.join(ways)}.")


def _there(folder: Path, file: str) -> bool:
    if "*" in file:
        return any(folder.glob(file))
    return os.path.exists(folder / file)  # also where the folder must not be read
