"""A data set before it is divided among clients."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedloom.core.registry import Registry


@dataclass(frozen=True, eq=False)
class Pool:
    x: np.ndarray
    y: np.ndarray
    classes: int
    official_test: np.ndarray | None = None  # rows that the publishers of the data set aside for testing
    natural: tuple[np.ndarray, ...] | None = None  # whose the samples are by nature
    server: np.ndarray | None = None  # rows that the data set itself gives to the server
    ordered: bool = False  # a client's samples are split in the order in which they are listed
    shift: tuple[float, ...] = (0.0,)
    spread: tuple[float, ...] = (1.0,)
    vocab: int | None = None  # number of token ids, where samples are sequences of them
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
    licence: ClassVar[str] = ""
    sources: ClassVar[tuple[Source, ...]] = ()  # what a download fetches
    usual: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        DATASETS.add(cls.name, cls)

    @abstractmethod
    def load(self, data_dir: Path | None, clients: int, seed: int) -> Pool:
        """Read or make the samples. `clients` and `seed` matter to generators only."""


DATASETS: Registry[type[Dataset]] = Registry("data set", "fedloom.data.sets")


def folders(name: str, data_dir: Path | None) -> list[Path]:
    """Where a data set may lie, in the order in which it is looked for."""
    if data_dir is not None:
        return [data_dir / name, data_dir]
    roots = [Path(os.environ["FEDLOOM_DATA"])] if os.environ.get("FEDLOOM_DATA") else []
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [*(root / name for root in roots), cache / "fedloom" / name]
