"""`Dataset`, the base class of data sets, their registry, and where their files are looked for."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.federation import Scaling
from fedloom.core.kinds import Kind
from fedloom.core.preprocessing import Preprocessing
from fedloom.core.registry import Registry
from fedloom.storage.user_cache import cache_folder


@dataclass(frozen=True, eq=False)
class RawDataset:
    """All samples of a data set, before they are divided among clients. Rows are indices of samples."""

    x: np.ndarray  # samples along the first axis; pixels are uint8, token ids int64
    y: np.ndarray  # classes: one per sample, or one at every position of a sequence (-1 for padding); or see `target`
    classes: int  # number of classes or labels; 1 for a number
    official_test: np.ndarray | None = None  # rows that the publisher sets aside for testing
    official_val: np.ndarray | None = None  # rows that the publisher sets aside for validation
    natural: tuple[np.ndarray, ...] | None = None  # rows of every natural client (a writer, a person, ...)
    server: np.ndarray | None = None  # rows that belong to the server
    ordered: bool = False  # a client's first samples are for training and its last for test; no shuffling
    mean: tuple[float, ...] = (0.0,)  # of pixels, for all channels or each: x is used as (x / 255 - mean) / std
    std: tuple[float, ...] = (1.0,)
    vocab: int | None = None  # number of token ids, if samples are sequences of them
    unscored: tuple[int, ...] = ()  # classes that are learnt but not scored as targets (end of sentence, unknown word)
    scaling: Scaling | None = None  # columns to standardise by the training samples
    target: Kind = "classes"  # or labels: y (samples, labels) is 1 for each that a sample has, else 0; or number
    class_names: tuple[str, ...] = ()  # of classes or labels; for a number, what it is
    client_names: tuple[str, ...] = ()  # of the natural clients
    notes: tuple[str, ...] = ()  # what a user has to know, such as that the data set is not complete
    preprocessing: Preprocessing | None = None  # how new samples become like x, if it does not follow from x itself


@dataclass(frozen=True)
class Source:
    """A file that `fedloom data download` fetches, and where it is published."""

    file: str  # path in the data set's folder
    urls: tuple[str, ...]  # the publisher's first, then mirrors
    unpack: bool = False  # it is an archive, to be unpacked into the folder


@dataclass(frozen=True)
class Dataset(ABC):
    """A data set. Subclasses set the class variables, have their options as fields, and load the samples."""

    name: ClassVar[str]  # what users write
    about: ClassVar[str]  # one line for `fedloom list datasets`
    size: ClassVar[str]  # numbers of samples and classes, in words
    model: ClassVar[str]  # default model
    partition: ClassVar[str] = "dirichlet_class"  # default partition
    aliases: ClassVar[tuple[str, ...]] = ()  # other names that its folder may have
    built_in: ClassVar[bool] = False  # there is nothing to download
    has_server_data: ClassVar[bool] = False  # some samples belong to the server
    class_names: ClassVar[tuple[str, ...]] = ()  # if they are always the same
    licence: ClassVar[str] = ""
    sources: ClassVar[tuple[Source, ...]] = ()  # files to download
    debian: ClassVar[tuple[str, Path] | None] = None  # a Debian package that has the files, and their folder
    clients_setting: ClassVar[str] = ""  # a setting of its own that says how many natural clients it has
    usual: ClassVar[dict[str, Any]] = {}  # default settings of a run; those of the partition as "partition.beta"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        DATASETS.add(cls.name, cls)

    def defaults(self) -> tuple[str, str, dict[str, Any]]:
        """Model, partition and settings of a run with this data set, unless a user sets others."""
        return self.model, self.partition, self.usual

    def natural_clients(self) -> int | None:
        """The number of clients of the partition `natural`, if the data set fixes it; None if `clients` does."""
        return None

    @abstractmethod
    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read or generate all samples.

        Args:
            data_dir: folder with the files; by default they are looked for, see `locate`.
            clients: number of clients, for data that are generated or have more natural clients than are wanted.
            seed: random seed of data that are generated or drawn.
        """


DATASETS: Registry[type[Dataset]] = Registry("data set", "fedloom.data.sets")


def folders(dataset: type[Dataset], data_dir: Path | None) -> list[Path]:
    """Folders in which a data set is looked for, in this order; a download goes to the first."""
    names = (dataset.name, *dataset.aliases)
    if data_dir is not None:
        return [*(data_dir / name for name in names), data_dir]
    roots = [Path(os.environ["FEDLOOM_DATA"])] if os.environ.get("FEDLOOM_DATA") else []
    candidates = [*(root / name for root in roots for name in names), cache_folder() / dataset.name]
    return candidates + ([dataset.debian[1]] if dataset.debian else [])


def locate(dataset: type[Dataset], data_dir: Path | None, layouts: Mapping[str, tuple[str, ...]]) -> tuple[Path, str]:
    """Find the files of a data set: its folder, and the name of the layout that is complete there.

    Args:
        dataset: the data set.
        data_dir: folder to look in; by default those of `folders`.
        layouts: for each layout its files, as relative paths with `*` as in a shell. If a folder has several layouts,
            the first counts. If there are none, the error names the files of the first.
    """
    searched = folders(dataset, data_dir)
    incomplete: list[tuple[int, Path, str]] = []
    for folder in searched:
        for layout, files in layouts.items():
            missing = [file for file in files if not _exists(folder, file)]
            if not missing:
                return folder, layout
            if len(missing) < len(files):
                incomplete.append((len(files) - len(missing), folder, missing[0]))
    remedies = [f"run 'fedloom data download {dataset.name}'"] if dataset.sources else []
    if incomplete:
        _, folder, file = max(incomplete, key=lambda entry: entry[0])
        remedies.append("put it there")
        raise UserError(f"{folder} has no {file}, which data set '{dataset.name}' needs; {', or '.join(remedies)}.")
    remedies += [f"install Debian's package '{dataset.debian[0]}'"] if dataset.debian else []
    first, *rest = next(iter(layouts.values()))
    more = f" and {rest[0]}" if len(rest) == 1 else f" and the other {len(rest)} files of docs/data.md" if rest else ""
    remedies.append(f"put {first}{more} into {searched[0]}")
    places = " or ".join(str(folder) for folder in searched)
    raise UserError(f"Data set '{dataset.name}' was not found in {places}; {', or '.join(remedies)}.")


def _exists(folder: Path, file: str) -> bool:
    if "*" in file:
        return any(folder.glob(file))
    return os.path.exists(folder / file)  # also if the folder cannot be listed
