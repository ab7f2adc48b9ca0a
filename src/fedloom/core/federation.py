"""The data of a federation: all samples as one tensor on the device, and lists of rows that say whose they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.kinds import Kind
from fedloom.core.preprocessing import Preprocessing, channel_tensors, preprocessing_of_arrays, scale_pixels
from fedloom.core.targets import Classes, Number, Targets
from fedloom.device.memory import available_memory
from fedloom.device.transfer import to_device

SPLITS = ("train", "val", "test")
MAX_CACHED_COUNTS = 1 << 22  # entries (clients x classes) up to which class counts are computed once and kept


def channels_last(x: Tensor) -> Tensor:
    """Images, or weights of a convolution, in channels-last memory format; leading axes are allowed."""
    x = x.movedim(-3, -1).contiguous().movedim(-1, -3)
    if x.shape[-3] > 1:
        return x
    # with one channel, torch recognises channels-last only by a channel stride of 1
    return x.as_strided(x.shape, (*x.stride()[:-3], 1, *x.stride()[-2:]))


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], in a half to a twelfth of the time on a CPU."""
    if x.device.type != "cpu":
        return x[rows]
    return x.index_select(0, rows.reshape(-1)).view(*rows.shape, *x.shape[1:])


@dataclass(frozen=True, eq=False)
class Ragged:
    """Lists of row indices of different lengths, one per client, stored as one flat tensor."""

    flat: Tensor  # int64, on the device of the samples
    starts: np.ndarray  # where each client's list begins; one more entry than clients

    @staticmethod
    def of(lists: Sequence[np.ndarray]) -> Ragged:
        """From one list of rows per client."""
        sizes = np.array([len(rows) for rows in lists], dtype=np.int64)
        flat = (
            np.concatenate([np.asarray(rows, dtype=np.int64) for rows in lists])
            if len(lists)
            else np.zeros(0, np.int64)
        )
        return Ragged(torch.from_numpy(flat), np.concatenate([[0], np.cumsum(sizes)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of rows of every client."""
        return np.diff(self.starts)

    def __getitem__(self, i: int) -> Tensor:
        return self.flat[self.starts[i] : self.starts[i + 1]]

    def joined(self, ids: np.ndarray) -> Tensor:
        """The lists of the given clients, concatenated."""
        sizes = self.sizes[ids]
        # start of each list in `flat`, minus its start in the result
        first = self.starts[:-1][ids] - (np.cumsum(sizes) - sizes)
        return self.flat[to_device(self.flat.device, np.repeat(first, sizes) + np.arange(sizes.sum()))]

    def to(self, device: torch.device) -> Ragged:
        """The lists on another device."""
        return Ragged(self.flat.to(device), self.starts)

    def lists(self) -> list[np.ndarray]:
        """One list of rows per client."""
        flat = self.flat.cpu().numpy()
        return [flat[a:b] for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]


@dataclass(frozen=True, eq=False)
class Scaling:
    """How numeric columns are scaled, by statistics of the training samples only."""

    columns: np.ndarray  # boolean mask of the columns to scale
    axis: int = -1  # axis of the samples along which the columns lie
    standardise: bool = True  # to mean 0 and standard deviation 1
    fill: Literal["mean", "zero"] | None = None  # what NaN becomes; None if there is none


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The samples of all clients, who owns them and what each is for.

    Images stay uint8 and are normalised when a batch is taken; token ids are int64; everything else is floating point.
    """

    x: Tensor  # all samples
    y: Tensor  # class of every sample, or of every position of a sequence (-1: padding); or other targets, see below
    classes: int  # number of classes or labels; 1 for a number
    splits: dict[str, Ragged]  # train, val, test -> rows of x by client
    server: Tensor | None = None  # rows of D_CS, the server's own data
    server_holdout: Tensor | None = None  # those of them that only test the global model; None: all test, and teach
    mean: tuple[float, ...] = (0.0,)  # per channel of images: x is used as (x / 255 - mean) / std
    std: tuple[float, ...] = (1.0,)
    vocab: int | None = None  # number of token ids, where samples are sequences of them [largest id + 1]
    dtype: torch.dtype = torch.float32
    unscored: tuple[int, ...] = ()  # classes that are trained on but not scored (end of sentence, unknown word)
    targets: Targets = field(default_factory=Classes)  # labels: y is 1 for each that a sample has, else 0; or a number
    class_names: tuple[str, ...] = ()  # of classes or labels; for a number, what it is
    client_names: tuple[str, ...] = ()
    scaling: Scaling | None = None  # of columns of x, to be applied before training
    notes: tuple[str, ...] = field(default=())  # what a reader of the results should know
    held_out: int = 0  # number of clients, the last ones, that do not take part in training
    preprocessing: Preprocessing | None = None  # how new samples become like x; see also `preprocessing_or_default`
    mean_samples_of_all: float | None = None  # where not all clients' data are here, see `mean_samples`
    channels: tuple[Tensor, Tensor] = field(init=False, repr=False)  # mean and std, shaped to broadcast over a sample

    def __post_init__(self) -> None:
        both = channel_tensors(self.mean, self.std, self.x.dim() - 1, self.dtype)
        object.__setattr__(self, "channels", tuple(to_device(self.device, values) for values in both))

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.x.shape[1:])) or "a number"
        what = {"classes": f"{self.classes} classes", "labels": f"{self.classes} labels", "number": "a number"}
        sizes = ", ".join(f"{int(rows.sizes.sum())} {name}" for name, rows in self.splits.items())
        held = f" and {self.held_out} held out" if self.held_out else ""
        return f"Federation({self.clients} clients{held}, samples of {shape}: {sizes}; target: {what[self.kind]})"

    @property
    def clients(self) -> int:
        """Number of participating clients."""
        return len(self.splits["train"]) - self.held_out

    @property
    def mean_samples(self) -> float:
        """Training samples of a participating client, on average."""
        if self.mean_samples_of_all is not None:
            return self.mean_samples_of_all
        return float(self.splits["train"].sizes[: self.clients].mean())

    @property
    def kind(self) -> Kind:
        """What is predicted of a sample: one of classes, any number of labels, or a number."""
        return self.targets.kind

    @property
    def sequences(self) -> bool:
        """True if samples have a class at every position."""
        return self.kind == "classes" and self.y.dim() > 1

    def participants(self) -> Federation:
        """The federation without the clients that are held out."""
        if not self.held_out:
            return self
        n = self.clients
        splits = {name: Ragged(rows.flat[: rows.starts[n]], rows.starts[: n + 1]) for name, rows in self.splits.items()}
        return replace(self, splits=splits, held_out=0)

    def only(self, ids: Sequence[int]) -> Federation:
        """What a site has that holds the data of some clients: the others are there, without samples."""
        here, lists = set(ids), {name: rows.lists() for name, rows in self.splits.items()}
        mine = {name: [rows[i] if i in here else rows[i][:0] for i in range(len(rows))] for name, rows in lists.items()}
        kept = np.unique(np.concatenate([rows for each in mine.values() for rows in each]))
        at = self.tensor(kept)
        return replace(
            self,
            x=self.x[at],
            y=self.y[at],
            splits={
                name: Ragged.of([np.searchsorted(kept, rows) for rows in each]).to(self.device)
                for name, each in mine.items()
            },
            server=None,
            server_holdout=None,
            vocab=self.token_ids(),
            mean_samples_of_all=self.mean_samples,
        )

    def without_samples(self) -> Federation:
        """What a server has that knows how many samples each client has, but not these: they are zeros instead. Its own
        samples are there."""
        most = max(int(rows.sizes.max(initial=0)) for rows in self.splits.values())
        own = torch.zeros(0, dtype=torch.int64, device=self.device) if self.server is None else self.server
        place = torch.full((len(self.x),), -1, device=self.device)
        place[own] = most + torch.arange(len(own), device=self.device)
        zeros = (self.x.new_zeros((most, *self.x.shape[1:])), self.y.new_zeros((most, *self.y.shape[1:])))
        return replace(
            self,
            x=torch.cat([zeros[0], self.x[own]]),
            y=torch.cat([zeros[1], self.y[own]]),
            splits={
                name: Ragged.of([np.arange(n) for n in rows.sizes]).to(self.device)
                for name, rows in self.splits.items()
            },
            server=None if self.server is None else place[self.server],
            server_holdout=None if self.server_holdout is None else place[self.server_holdout],
            vocab=self.token_ids(),
        )

    @cached_property
    def server_signal(self) -> Tensor | None:
        """The server's samples that methods may learn from."""
        if self.server is None or self.server_holdout is None:
            return self.server
        return self.server[~torch.isin(self.server, self.server_holdout)]

    @property
    def server_test(self) -> Tensor | None:
        """The server's samples that test the global model."""
        return self.server if self.server_holdout is None else self.server_holdout

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return self.x.device

    def token_ids(self) -> int | None:
        """Number of token ids; None where samples are not int64, the type of token ids."""
        if self.x.dtype != torch.int64:
            return None
        low, high = (int(v) for v in self.x.aminmax()) if self.x.numel() else (0, 0)
        if low < 0 or (self.vocab is not None and high >= self.vocab):
            wrong, range_ = (
                (low, "not negative") if low < 0 else (high, f"below {self.vocab}, the size of the vocabulary")
            )
            raise UserError(f"A sample holds the token id {wrong}; token ids must be {range_}.")
        return high + 1 if self.vocab is None else self.vocab

    def tensor(self, values: np.ndarray) -> Tensor:
        """An array as a tensor on the device of the samples."""
        return to_device(self.device, values)

    def available_memory(self) -> int:
        """Bytes that are free on the device of the samples."""
        return available_memory(self.device)

    def to(self, device: torch.device, dtype: torch.dtype) -> Federation:
        """The federation on another device, with floating-point samples in another type."""
        whole = self.x.dtype in (torch.uint8, torch.int64)  # pixels and token ids keep their type
        return replace(
            self,
            x=self.x.to(device) if whole else self.x.to(device, dtype),
            y=self.y.to(device) if self.kind == "classes" else self.y.to(device, dtype),
            splits={name: rows.to(device) for name, rows in self.splits.items()},
            server=None if self.server is None else self.server.to(device),
            server_holdout=None if self.server_holdout is None else self.server_holdout.to(device),
            dtype=dtype,
        )

    def prepare(self, x: Tensor) -> Tensor:
        """Samples as the model receives them: pixels are normalised, other samples are returned unchanged."""
        if x.dtype != torch.uint8:
            return x
        return scale_pixels(x.to(self.dtype), self.mean, self.std, self.channels)

    def preprocessing_or_default(self) -> Preprocessing:
        """How new samples become like x; what follows from x, mean, std and vocab if nobody has said more."""
        made = self.preprocessing
        if made is None:
            shape, dtype = tuple(self.x.shape[1:]), str(self.x.dtype).removeprefix("torch.")
            names = self.class_names or tuple(map(str, range(self.classes)))
            made = preprocessing_of_arrays(
                shape, dtype, names, mean=self.mean, std=self.std, token_ids=self.token_ids()
            )
        scale = (self.targets.mean, self.targets.std) if isinstance(self.targets, Number) else None
        names = self.class_names or made.classes
        return replace(made, classes=names, positive=self.positive, target=self.kind, target_scale=scale)

    def samples(self, rows: Tensor) -> Tensor:
        """Rows as input of a single model. On a CPU images are in channels-last format, which makes convolutions and
        poolings faster; later layers keep the format."""
        x = self.prepare(gather_rows(self.x, rows))
        if self.x.dim() != 4 or x.device.type != "cpu":
            return x
        return channels_last(x)

    def counts(self, ids: np.ndarray) -> Tensor:
        """n_{i,c}: training samples per client and class or label; for a number, all of them."""
        train = self.splits["train"]
        if len(train) * self.classes <= MAX_CACHED_COUNTS:
            return self._counts[to_device(self.device, ids)]
        return self._count(train.joined(ids), train.sizes[ids])

    @cached_property
    def _counts(self) -> Tensor:
        train = self.splits["train"]
        return self._count(train.flat, train.sizes)

    def labels(self) -> np.ndarray:
        """Samples per client and class or label, over all splits; for a number, all samples of a client."""
        return sum(self._count(rows.flat, rows.sizes) for rows in self.splits.values()).cpu().numpy()  # type: ignore[union-attr]

    def labels_of(self, rows: Tensor) -> np.ndarray:
        """Samples per class among the given rows."""
        return self._count(rows, np.array([len(rows)]))[0].cpu().numpy()

    def _count(self, rows: Tensor, sizes: np.ndarray) -> Tensor:
        """Samples per list and class, for consecutive lists of rows."""
        if self.kind != "classes":
            return self._count_labels(rows, sizes)
        labels = self.y[rows]
        owner = to_device(self.device, np.repeat(np.arange(len(sizes)), sizes)).view(-1, *[1] * (labels.dim() - 1))
        known = labels >= 0  # of sequences every position is a label, padding (-1) is not
        at = (owner * self.classes + torch.where(known, labels, 0)).flatten()
        flat = torch.zeros(len(sizes) * self.classes, dtype=torch.int64, device=self.device)
        return flat.index_add_(0, at, known.flatten().long()).view(len(sizes), self.classes)

    def _count_labels(self, rows: Tensor, sizes: np.ndarray) -> Tensor:
        """Samples per list that have a label; for a number, all samples."""
        there = self.y[rows] > 0.5 if self.kind == "labels" else torch.ones_like(rows)[:, None]
        owner = to_device(self.device, np.repeat(np.arange(len(sizes)), sizes))
        found = torch.zeros(len(sizes), self.classes, dtype=torch.int64, device=self.device)
        return found.index_add_(0, owner, there.long())

    @cached_property
    def positive(self) -> int:
        """Of two classes, the one that metrics such as AUPRC are of: the rarer one, in doubt the second."""
        if self.classes != 2 or self.kind != "classes" or self.sequences:
            return 1
        first, second = torch.bincount(self.y, minlength=2)[:2].tolist()
        return 0 if first < second else 1

    def digest(self) -> str:
        """A hash that identifies the partition."""
        h = hashlib.sha256(f"held out: {self.held_out}".encode() if self.held_out else b"")
        for name in SPLITS:
            h.update(np.ascontiguousarray(self.splits[name].starts).tobytes())
            h.update(self.splits[name].flat.cpu().numpy().tobytes())
        return h.hexdigest()[:16]

    def fingerprint(self) -> str:
        """A hash that identifies the samples, whoever owns them."""
        vocab = "" if self.vocab is None else f" {self.vocab}"
        h = hashlib.sha256(f"{self.classes} {self.mean} {self.std}{vocab}".encode())
        if self.unscored:
            h.update(f"unscored {self.unscored}".encode())
        if self.kind != "classes":
            h.update(self.kind.encode())
        for values in (self.x, self.y):
            h.update(f"{values.dtype} {tuple(values.shape)}".encode())
            h.update(np.ascontiguousarray(values.cpu().numpy()).data)
        return h.hexdigest()[:16]
