"""A user's own data: a table, files or folders per client, pictures, arrays, a Hugging Face data set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.data.dataset import DATASETS, Dataset, RawDataset
from fedloom.data.user_data.findings import Findings
from fedloom.data.user_data.layout import kind_of
from fedloom.data.user_data.read import read
from fedloom.data.user_data.samples import Samples


@dataclass(frozen=True)
class OwnData(Dataset):
    name = "own"
    about = "your own data: --dataset PATH (a table, a file or folder per client, pictures, arrays)"
    size = "as found at the path"
    model = "mlp"
    partition = "natural"
    built_in = True  # there is nothing to download
    usual = {"lr": 0.05, "rounds": 50}

    path: str = setting("", "file or folder with the data")
    kind: Literal["auto", "table", "image", "text", "sequence"] = setting("auto", "what the samples are")
    label: str | None = setting(None, "column of the class [label, target, class or y]")
    client: str = setting(
        "auto", "column that says whose a row is [client, client_id or the file's name]; none: nobody's"
    )
    text: str | None = setting(None, "column of the text [text]")
    split_column: str | None = setting(None, "column that says train, val or test [split]")
    ignore: tuple[str, ...] = setting((), "columns to leave out, such as a,b")
    delimiter: str | None = setting(None, "between the values of a CSV row [found out]")
    missing: Literal["refuse", "mean", "zero", "drop"] = setting(
        "refuse", "what a missing number becomes; drop: no row"
    )
    normalise: bool = setting(True, "bring columns of numbers to mean 0 and spread 1 over the training samples")
    resize: int | None = setting(None, "side in pixels that all pictures are brought to", low=1)
    words: int | None = setting(None, "most frequent words of texts that are known [all]", low=1)
    length: int | None = setting(None, "words of a text; longer ones are cut [the longest, up to 200]", low=1)

    def __post_init__(self) -> None:
        if self.path:  # a run is continued from anywhere
            object.__setattr__(self, "path", os.path.abspath(os.path.expanduser(self.path)))

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        if data_dir is not None:
            raise UserError(f"--data-dir is for data sets with a name, not for your own at {self.path}.")
        return self._read().pool()

    def defaults(self) -> tuple[str, str, dict[str, Any]]:
        samples = self._read()
        natural = samples.client is not None
        usual = {**self.usual, **({"pool": "separate"} if natural and _tests(samples) else {})}
        return default_model(samples), "natural" if natural else "dirichlet_class", usual | USUAL.get(samples.kind, {})

    def _read(self) -> Samples:
        if not self.path:
            raise UserError("Your own data need a path: --dataset PATH, or fedloom.OwnData('PATH').")
        samples = _kept.get((self, _stamp(Path(self.path))))
        if samples is None:
            samples = read(self, Findings())
            keep(self, samples)
        return samples


USUAL: dict[str, dict[str, Any]] = {"text": {"lr": 0.1}}


def _tests(samples: Samples) -> bool:
    return samples.split is not None and {"train", "test"} <= set(samples.split.tolist())


def default_model(samples: Samples) -> str:
    if samples.vocab is not None:
        return "fasttext"
    if samples.kind == "image":
        side = min(samples.x.shape[2:])
        return "cnn4" if side >= 16 else "cnn8" if side >= 4 else "mlp"
    return "mlp"


_kept: dict[tuple[OwnData, Any], Samples] = {}


def keep(asked: OwnData, samples: Samples) -> None:
    """Read once, though model, partition and samples are asked for one after another."""
    _kept.clear()
    _kept[asked, _stamp(Path(asked.path))] = samples


def _stamp(path: Path) -> tuple[Any, ...]:
    """Changes when a file does."""
    files = [path]
    if path.is_dir():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    found = []
    for file in files:
        try:
            now = file.stat()
        except OSError:
            continue
        found.append((str(file), now.st_size, now.st_mtime_ns))
    return tuple(sorted(found))


def own_path(name: object) -> str | None:
    """The path that a data set's name is, if it is one: something with a separator, or that is there and is no name."""
    if not isinstance(name, str | os.PathLike):
        return None
    text = os.fspath(name)
    if not isinstance(text, str) or not text or (isinstance(name, str) and text in DATASETS.names()):
        return None
    separators = [os.sep] + ([os.altsep] if os.altsep else [])
    path_like = any(c in text for c in separators) or text.startswith("~") or kind_of(Path(text)) is not None
    return text if path_like or not isinstance(name, str) or os.path.exists(text) else None
