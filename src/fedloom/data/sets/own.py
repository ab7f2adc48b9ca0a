"""The data set `own`: a user's data (tables, images, arrays, a Hugging Face data set) at a path, or in Python."""

import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.data.dataset import DATASETS, Dataset, RawDataset
from fedloom.data.user_data.issues import Issues
from fedloom.data.user_data.layout import file_kind, walk
from fedloom.data.user_data.python_objects import data_name, samples_from_object
from fedloom.data.user_data.read import read_samples
from fedloom.data.user_data.samples import Samples


@dataclass(frozen=True)
class OwnData(Dataset):
    """A user's data at a path, with settings that say what the files do not say, such as the column of the label."""

    name = "own"
    about = "your own data: --dataset PATH (a table, a file or folder per client, pictures, arrays)"
    size = "as found at the path"
    model = "mlp"
    partition = "natural"
    built_in = True  # there is nothing to download
    usual = {"lr": 0.05, "rounds": 50, "stratify": True}

    path: str = setting("", "file or folder with the data")
    kind: Literal["auto", "table", "image", "text", "sequence"] = setting("auto", "what the samples are")
    label: str | None = setting(
        None, "column of what is predicted, or columns of labels such as a,b [label, target, class or y]"
    )
    target: Literal["auto", "class", "number", "labels"] = setting(
        "auto", "what is predicted: class, number, or labels, of which a sample has any number [by the values]"
    )
    client: str = setting(
        "auto",
        "column with the client of each row [client, client_id or the file's name]; none: the data have no clients",
    )
    text: str | None = setting(None, "column of the text [text]")
    split_column: str | None = setting(None, "column that says train, val or test [split]")
    ignore: tuple[str, ...] = setting((), "columns to leave out, such as a,b")
    delimiter: str | None = setting(None, "between the values of a CSV row [detected]")
    missing: Literal["refuse", "mean", "zero", "drop"] = setting(
        "refuse", "a missing number: refuse (an error), mean or zero (filled in), drop (row left out)"
    )
    normalise: bool = setting(True, "standardise columns of numbers by mean and std of the training samples")
    resize: int | None = setting(None, "side in pixels that all pictures are brought to", low=1)
    words: int | None = setting(None, "words in the vocabulary, the most frequent; others are unknown [all]", low=1)
    length: int | None = setting(None, "words of a text; longer ones are cut [the longest, up to 200]", low=1)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if cls.name != OwnData.name:  # `ObjectData` has no name of its own that users could write
            super().__init_subclass__(**kwargs)

    def __post_init__(self) -> None:
        if self.path:  # absolute, so that a run can be resumed from another folder
            object.__setattr__(self, "path", os.path.abspath(os.path.expanduser(self.path)))

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read the samples at the path."""
        if data_dir is not None:
            at = f" at {self.path}" if self.path else ""
            raise UserError(f"--data-dir is for data sets with a name, not for your own{at}.")
        return self._read().to_raw_dataset()

    def defaults(self) -> tuple[str, str, dict[str, Any]]:
        """Model, partition and settings that suit the data; the data are read for this."""
        samples = self._read()
        natural = samples.client is not None
        settings = {**self.usual, **({"pool": "separate"} if natural and _has_test_split(samples) else {})}
        settings |= {"clients": len(samples.clients)} if natural else {}
        settings |= DEFAULTS_BY_KIND.get(samples.kind, {}) | DEFAULTS_BY_TARGET.get(samples.target, {})
        return default_model(samples), "natural" if natural else "dirichlet_class", settings

    def natural_clients(self) -> int | None:
        """The number of clients that the data name, if they name any; the data are read for this."""
        return len(self._read().clients) or None

    def read_part(self) -> Samples:
        """The samples at the path as those of one site of a federation, which may have a single class."""
        return read_samples(self, Issues(part=True))

    def _read(self) -> Samples:
        if not self.path:
            raise UserError("Your own data need a path: --dataset PATH, or fedloom.OwnData('PATH').")
        samples = _cache.get((self, _fingerprint(Path(self.path))))
        if samples is None:
            samples = read_samples(self, Issues())
            cache_samples(self, samples)
        return samples


class Given:
    """An object with a user's data, and the samples that were read from it: once for all runs of a call."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self._options: OwnData | None = None
        self._samples: Samples | None = None

    def samples(self, options: OwnData) -> Samples:
        """The samples of the object, read with these settings."""
        if self._samples is None or self._options != options:
            self._samples, self._options = samples_from_object(self.data, options, Issues()), options
        return self._samples


@dataclass(frozen=True)
class ObjectData(OwnData):
    """A user's data in Python: a data frame, torch data sets, arrays; with the same settings as files."""

    given: Any = setting(None, "the object, as `Given`")  # noqa: RUF009

    def described(self) -> dict[str, Any]:
        """What a run directory records: the type of the object, and settings that are not the defaults."""
        changed = {f.name: v for f in fields(self) if f.name != "given" and (v := getattr(self, f.name)) != f.default}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
        return {"name": data_name(self.given.data), "own": True, **plain}

    def _read(self) -> Samples:
        for name in ("path", "delimiter"):
            if getattr(self, name):
                raise UserError(f"{name} is for data in files, but the data are given in Python; leave it out.")
        return self.given.samples(self)


DEFAULTS_BY_KIND: dict[str, dict[str, Any]] = {"text": {"lr": 0.1}}
DEFAULTS_BY_TARGET: dict[str, dict[str, Any]] = {"number": {"metric": "rmse"}, "labels": {"metric": "auprc"}}


def _has_test_split(samples: Samples) -> bool:
    return samples.split is not None and {"train", "test"} <= set(samples.split.tolist())


def default_model(samples: Samples) -> str:
    """The name of the model that is used for such samples unless another is set."""
    if samples.preprocessing.token_ids is not None:
        return "fasttext"
    if samples.kind == "image":
        side = min(samples.x.shape[2:])
        return "cnn4" if side >= 16 else "cnn8" if side >= 4 else "mlp"
    return "mlp"


_cache: dict[tuple[OwnData, Any], Samples] = {}


def cache_samples(options: OwnData, samples: Samples) -> None:
    """Keep the samples, so that `defaults` and `load` read the files once; they are read again when a file changes."""
    _cache.clear()
    _cache[options, _fingerprint(Path(options.path))] = samples


def _fingerprint(path: Path) -> tuple[Any, ...]:
    """Names, sizes and modification times of all files at a path."""
    found = ((str(entry.path), entry.status) for entry in walk(path))
    return tuple((name, s.st_size, s.st_mtime_ns) for name, s in found if s is not None and stat.S_ISREG(s.st_mode))


def user_data_path(name: object) -> str | None:
    """The path, if `name` is one rather than the name of a data set; None otherwise.

    A path is a path object, or a string that has a separator or a known suffix, or that exists as a file or folder.
    """
    if not isinstance(name, str | os.PathLike):
        return None
    text = os.fspath(name)
    if not isinstance(text, str) or not text or (isinstance(name, str) and text in DATASETS.names()):
        return None
    separators = [os.sep] + ([os.altsep] if os.altsep else [])
    path_like = any(c in text for c in separators) or text.startswith("~") or file_kind(Path(text)) is not None
    return text if path_like or not isinstance(name, str) or os.path.exists(text) else None
