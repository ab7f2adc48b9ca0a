"""`Preprocessing`: how what a user has (a row of a table, a picture, a text, an array) becomes the input of a model.

There are two steps. The first encodes values as arrays of numbers, pixels or token ids (`fedloom.data.user_data`). The
second, `Preprocessing.scale`, consists of tensor operations only, so that it can be exported together with a model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.kinds import Kind
from fedloom.core.targets import TARGETS, Number, Targets


@dataclass(frozen=True)
class Column:
    """A column of a table: one number, or one-hot encoded words."""

    name: str
    words: tuple[str, ...] | None = None  # None for a column of numbers


@dataclass(frozen=True)
class Numbers:
    """How numbers are scaled: (x - mean) / std, by statistics of the training samples, in float64."""

    mean: tuple[float, ...]  # one for each column; 0 for columns that are not scaled
    std: tuple[float, ...]  # 1 for columns that are not scaled
    fill: tuple[float, ...] | None = None  # what NaN becomes before that; None if samples must not have NaN
    axis: int = -1  # of a batch of samples, along which the columns lie

    def scale(self, x: Tensor) -> Tensor:
        """A batch of samples, scaled, in float64."""
        shape = [1] * (x.dim() - 1)
        shape[self.axis if self.axis < 0 else self.axis - 1] = -1

        def constant(values: tuple[float, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=x.device).view(shape)

        x = x.to(torch.float64)
        if self.fill is not None:
            x = torch.where(torch.isnan(x), constant(self.fill), x)
        return (x - constant(self.mean)) / constant(self.std)


@dataclass(frozen=True)
class Vocabulary:
    """How texts are encoded: as the ids of their first words or, without padding, of their last characters."""

    words: tuple[str, ...]  # in the order of their ids
    tokenizer: Literal["basic_english", "spaces", "characters"]
    length: int  # tokens of a sample
    unknown: int  # id of words that are not in the vocabulary
    padding: int | None = None  # id at the end of short texts; None if texts must have `length` tokens or more
    start: int | None = None  # id before the first word of every text

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids of words."""
        return {word: i for i, word in enumerate(self.words)}


@dataclass(frozen=True)
class Preprocessing:
    """How samples are encoded and scaled. Everything follows from the training data, which are not needed any more."""

    kind: Literal["table", "image", "text", "array"]  # what a user has
    shape: tuple[int, ...]  # of an encoded sample
    dtype: Literal["uint8", "int64", "float32", "float64"]  # of encoded samples: pixels, token ids or numbers
    classes: tuple[str, ...]  # names of classes or labels; for a number, what it is
    columns: tuple[Column, ...] = ()  # of a table, in the order of the model's inputs
    numbers: Numbers | None = None
    mean: tuple[float, ...] = (0.0,)  # of pixels, for all channels or each: x is used as (x / 255 - mean) / std
    std: tuple[float, ...] = (1.0,)
    resize: bool = False  # pictures of the training data were resized
    vocabulary: Vocabulary | None = None
    token_ids: int | None = None  # number of token ids
    missing: str = "refuse"  # what was done with missing numbers in training: refuse, mean, zero or drop
    target: Kind = "classes"  # what is predicted
    target_scale: tuple[float, float] | None = None  # of a number: mean and standard deviation in training
    label: str | None = None  # column of the user's table with the target; of several, their names are the classes
    client: str | None = None  # column with the client
    split: str | None = None  # column that says train, val or test
    content: str | None = None  # column with the text or the picture
    positive: int = 1  # of two classes, the one that metrics such as AUPRC are of

    def scale(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A batch of encoded samples as the model receives it, computed as in training."""
        if self.dtype == "int64":
            return x
        if self.dtype == "uint8":
            return scale_pixels(x.to(dtype), self.mean, self.std)
        x = x.to(getattr(torch, self.dtype))
        return (x if self.numbers is None else self.numbers.scale(x)).to(dtype)

    @property
    def targets(self) -> Targets:
        """What is predicted, and how outputs of the model become predictions."""
        if self.target == "number":
            return Number(*(self.target_scale or (0.0, 1.0)))
        return TARGETS[self.target]()

    def to_json(self) -> dict[str, Any]:
        """As plain data, from which `from_json` makes an equal object."""
        return _plain(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Preprocessing:
        """From what `to_json` returned."""
        try:
            made = {name: _tuples(value) for name, value in values.items()}
            made["columns"] = tuple(Column(**_arguments(column)) for column in values["columns"])
            for name, part in (("numbers", Numbers), ("vocabulary", Vocabulary)):
                made[name] = None if values[name] is None else part(**_arguments(values[name]))
            return Preprocessing(**made)
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(
                f"The description of a model's samples is damaged ({type(error).__name__} {error}); copy it again."
            ) from None


def preprocessing_of_arrays(
    shape: tuple[int, ...],
    dtype: str,
    classes: tuple[str, ...],
    *,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
    token_ids: int | None = None,
) -> Preprocessing:
    """The preprocessing of samples that are given as arrays or, if these are pixels in 1 or 3 channels, as pictures."""
    known: dict[str, Literal["uint8", "int64", "float32"]] = {"uint8": "uint8", "int64": "int64", "float32": "float32"}
    picture = dtype == "uint8" and len(shape) == 3 and shape[0] in (1, 3)
    kind: Literal["image", "array"] = "image" if picture else "array"
    return Preprocessing(kind, shape, known.get(dtype, "float64"), classes, mean=mean, std=std, token_ids=token_ids)


def scale_pixels(
    x: Tensor, mean: tuple[float, ...], std: tuple[float, ...], channels: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Pixels 0 to 255, as floating-point numbers, become (x / 255 - mean) / std.

    `channels` may be the result of `channel_tensors`, if mean and std are to be on the device already; `x` may then
    have more axes than that of the batch before those of a sample.
    """
    if len(mean) == 1:
        return x * (1 / 255 / std[0]) - mean[0] / std[0]
    if channels is None:
        channels = channel_tensors(mean, std, x.dim() - 1, x.dtype, x.device)
    centre, spread = channels
    return (x / 255 - centre) / spread


def channel_tensors(
    mean: tuple[float, ...], std: tuple[float, ...], dims: int, dtype: torch.dtype, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of channels as tensors that broadcast over a sample with `dims` axes."""
    shape = (-1, *[1] * (dims - 1))
    centre, spread = (torch.tensor(values, dtype=dtype, device=device).view(shape) for values in (mean, std))
    return centre, spread


def _plain(value: Any) -> Any:
    """A value with dictionaries in place of data classes, and lists in place of tuples."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in values.items()}
