"""The data of a federation: one pool of samples on the device, and index lists that say whose they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.transfer import onto

SPLITS = ("train", "val", "test")
COUNTS = 1 << 22  # entries of a table of all clients' labels, up to which it is kept


def channels_last(x: Tensor) -> Tensor:
    """The same images, or weights of a convolution, with the channels of a pixel side by side."""
    x = x.movedim(-3, -1).contiguous().movedim(-1, -3)
    if x.shape[-3] > 1:
        return x
    return x.as_strided(x.shape, (*x.stride()[:-3], 1, *x.stride()[-2:]))  # one channel counts by its stride alone


@dataclass(frozen=True, eq=False)
class Ragged:
    """Index lists of different lengths, one per client, kept as one flat tensor."""

    flat: Tensor  # int64, on the device of the samples
    starts: np.ndarray  # where each client's list begins; one more entry than clients

    @staticmethod
    def of(lists: Sequence[np.ndarray]) -> Ragged:
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
        return np.diff(self.starts)

    def __getitem__(self, i: int) -> Tensor:
        return self.flat[self.starts[i] : self.starts[i + 1]]

    def joined(self, ids: np.ndarray) -> Tensor:
        """The lists of some clients, one after another."""
        sizes = self.sizes[ids]
        first = self.starts[:-1][ids] - (np.cumsum(sizes) - sizes)  # of a list, less its place among all
        return self.flat[onto(self.flat.device, np.repeat(first, sizes) + np.arange(sizes.sum()))]

    def lists(self) -> list[np.ndarray]:
        flat = self.flat.cpu().numpy()
        return [flat[a:b] for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]


@dataclass(frozen=True, eq=False)
class Scaling:
    """What is done to columns of numbers once it is known which samples are for training: these alone have a say."""

    columns: np.ndarray  # which ones, a mask
    axis: int = -1  # of the samples, where the columns are
    standardise: bool = True  # to mean 0 and spread 1
    fill: bool = False  # NaN becomes the column's mean


@dataclass(frozen=True, eq=False)
class Federation:
    x: Tensor  # every sample; uint8 stays uint8 until it is used
    y: Tensor
    classes: int
    splits: dict[str, Ragged]
    server: Tensor | None = None  # indices of D_CS, the server's own data
    shift: tuple[float, ...] = (0.0,)  # per channel: x is used as (x * unit - shift) / spread
    spread: tuple[float, ...] = (1.0,)
    vocab: int | None = None  # number of token ids, where samples are sequences of them [as many as occur]
    dtype: torch.dtype = torch.float32
    unscored: tuple[int, ...] = ()  # classes that are learnt, but as targets not scored (end of sentence, unknown word)
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    scaling: Scaling | None = None  # still to be done
    notes: tuple[str, ...] = field(default=())  # what a reader of the results should know
    held_out: int = 0  # so many clients, the last ones, never take part
    channels: tuple[Tensor, Tensor] = field(init=False, repr=False)  # shift and spread, shaped to fit a sample

    def __post_init__(self) -> None:
        shape = (-1, *[1] * (self.x.dim() - 2))
        both = (onto(self.device, torch.tensor(v, dtype=self.dtype).view(shape)) for v in (self.shift, self.spread))
        object.__setattr__(self, "channels", tuple(both))

    @property
    def clients(self) -> int:
        """Those who take part."""
        return len(self.splits["train"]) - self.held_out

    def participants(self) -> Federation:
        """The same without the clients that are held out."""
        if not self.held_out:
            return self
        n = self.clients
        splits = {name: Ragged(rows.flat[: rows.starts[n]], rows.starts[: n + 1]) for name, rows in self.splits.items()}
        return replace(self, splits=splits, held_out=0)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def token_ids(self) -> int | None:
        """How many token ids there are; None where samples are numbers. Whole numbers of 64 bits are token ids."""
        if self.x.dtype != torch.int64:
            return None
        low, high = (int(v) for v in self.x.aminmax()) if self.x.numel() else (0, 0)
        if low < 0 or (self.vocab is not None and high >= self.vocab):
            wrong, range_ = (
                (low, "not negative") if low < 0 else (high, f"below {self.vocab}, the size of the vocabulary")
            )
            raise UserError(f"A sample holds the token id {wrong}; token ids must be {range_}.")
        return high + 1 if self.vocab is None else self.vocab

    def to(self, device: torch.device, dtype: torch.dtype) -> Federation:
        whole = self.x.dtype in (torch.uint8, torch.int64)  # pixels and token ids keep their type
        return replace(
            self,
            x=self.x.to(device) if whole else self.x.to(device, dtype),
            y=self.y.to(device),
            splits={name: replace(rows, flat=rows.flat.to(device)) for name, rows in self.splits.items()},
            server=None if self.server is None else self.server.to(device),
            dtype=dtype,
        )

    def prepare(self, x: Tensor) -> Tensor:
        """Samples as the model gets them: pixels become normalised numbers, the rest passes through."""
        if x.dtype != torch.uint8:
            return x
        x = x.to(self.dtype)
        if len(self.shift) == 1:
            return x * (1 / 255 / self.spread[0]) - self.shift[0] / self.spread[0]
        shift, spread = self.channels
        return (x / 255 - shift) / spread

    def samples(self, rows: Tensor) -> Tensor:
        """Samples as one model at a time gets them. On a CPU the channels of a pixel lie side by side: convolutions and
        poolings are faster for it, and all that follows keeps the layout."""
        x = self.prepare(self.x[rows])
        if self.x.dim() != 4 or x.device.type != "cpu":
            return x
        return channels_last(x)

    def counts(self, ids: np.ndarray) -> Tensor:
        """n_{i,c}: training samples per client and class."""
        train = self.splits["train"]
        if len(train) * self.classes <= COUNTS:
            return self._counts[onto(self.device, ids)]
        return self._count(train.joined(ids), train.sizes[ids])

    @cached_property
    def _counts(self) -> Tensor:
        train = self.splits["train"]
        return self._count(train.flat, train.sizes)

    def labels(self) -> np.ndarray:
        """Samples per client and class, whatever they are for."""
        return sum(self._count(rows.flat, rows.sizes) for rows in self.splits.values()).cpu().numpy()  # type: ignore[union-attr]

    def labels_of(self, rows: Tensor) -> np.ndarray:
        """Samples per class among some rows of the pool."""
        return self._count(rows, np.array([len(rows)]))[0].cpu().numpy()

    def _count(self, rows: Tensor, sizes: np.ndarray) -> Tensor:
        """Labels of consecutive lists of rows, counted per list and class."""
        labels = self.y[rows]
        owner = onto(self.device, np.repeat(np.arange(len(sizes)), sizes)).view(-1, *[1] * (labels.dim() - 1))
        known = labels >= 0  # of sequences every position is a label, padding (-1) is not
        at = (owner * self.classes + torch.where(known, labels, 0)).flatten()
        flat = torch.zeros(len(sizes) * self.classes, dtype=torch.int64, device=self.device)
        return flat.index_add_(0, at, known.flatten().long()).view(len(sizes), self.classes)

    def digest(self) -> str:
        """Identifies the partition in records."""
        h = hashlib.sha256(f"held out: {self.held_out}".encode() if self.held_out else b"")
        for name in SPLITS:
            h.update(np.ascontiguousarray(self.splits[name].starts).tobytes())
            h.update(self.splits[name].flat.cpu().numpy().tobytes())
        return h.hexdigest()[:16]

    def fingerprint(self) -> str:
        """Identifies the samples, whoever has them."""
        vocab = "" if self.vocab is None else f" {self.vocab}"
        h = hashlib.sha256(f"{self.classes} {self.shift} {self.spread}{vocab}".encode())
        if self.unscored:
            h.update(f"unscored {self.unscored}".encode())
        for values in (self.x, self.y):
            h.update(f"{values.dtype} {tuple(values.shape)}".encode())
            h.update(np.ascontiguousarray(values.cpu().numpy()).data)
        return h.hexdigest()[:16]
