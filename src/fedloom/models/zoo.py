"""Models by name. A model is a `torch.nn.Module` whose last operation is a named head."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fedloom.core.errors import UserError
from fedloom.core.registry import Registry

MODELS: Registry[type[Model]] = Registry("model", "fedloom.models")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model(ABC):
    """An architecture by name; its fields are its options. Every built module calls its head `head`."""

    name: ClassVar[str]
    about: ClassVar[str]
    takes: ClassVar[str] = ""  # which samples
    source: ClassVar[str] = ""  # the paper whose experiments have it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        MODELS.add(cls.name, cls)

    @abstractmethod
    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """A module for samples of a shape; `vocab` is the number of token ids where they are sequences of such."""

    # What an architecture asks of samples. Each raises a sentence where they are others.

    def numbers(self, shape: Shape, vocab: int | None) -> int:
        """How many numbers a sample has."""
        if vocab is not None:
            raise UserError(
                f"Model '{self.name}' takes {self.takes}, but the samples are sequences of token ids; use fasttext, "
                "lstm_shakes or lstm_so."
            )
        return math.prod(shape)

    def image(self, shape: Shape, vocab: int | None, least: int) -> tuple[int, int, int]:
        """Channels, height, width."""
        self.numbers(shape, vocab)
        if len(shape) != 3 or min(shape[1:]) < least:
            raise UserError(f"Model '{self.name}' takes {self.takes}, not samples of shape {shape}.")
        return shape[0], shape[1], shape[2]

    def tokens(self, shape: Shape, vocab: int | None) -> int:
        """The size of the vocabulary."""
        if vocab is None or len(shape) != 1:
            raise UserError(
                f"Model '{self.name}' takes {self.takes}, not samples of shape {shape}"
                + ("; use mlp, or cnn4 for images." if vocab is None else ".")
            )
        return vocab


def body_and_head(head: nn.Module, *body: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*body)
    model.add_module("head", head)
    return model
