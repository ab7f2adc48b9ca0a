"""`Model`, the base class of architectures, and their registry."""

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
    """An architecture. Subclasses set the class variables, have their options as fields, and build a `torch.nn.Module`
    whose last operation is a submodule called `head`."""

    name: ClassVar[str]
    about: ClassVar[str]
    takes: ClassVar[str] = ""  # the samples it accepts, for messages
    source: ClassVar[str] = ""  # the paper that uses it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        MODELS.add(cls.name, cls)

    @abstractmethod
    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """Build a module with new parameters.

        Args:
            shape: shape of one sample.
            classes: number of classes.
            vocab: number of token ids, if samples are sequences of them.
        """

    # For `build`: each of these checks that the model accepts the samples, and raises a UserError otherwise.

    def numbers(self, shape: Shape, vocab: int | None) -> int:
        """The number of values in a sample, which must not be a sequence of token ids."""
        if vocab is not None:
            raise UserError(
                f"Model '{self.name}' takes {self.takes}, but the samples are sequences of token ids; use fasttext, "
                "lstm_shakes or lstm_so."
            )
        return math.prod(shape)

    def image(self, shape: Shape, vocab: int | None, least: int) -> tuple[int, int, int]:
        """Channels, height and width of images of at least `least` x `least` pixels."""
        self.numbers(shape, vocab)
        if len(shape) != 3 or min(shape[1:]) < least:
            raise UserError(f"Model '{self.name}' takes {self.takes}, not samples of shape {shape}.")
        return shape[0], shape[1], shape[2]

    def tokens(self, shape: Shape, vocab: int | None) -> int:
        """The size of the vocabulary of sequences of token ids."""
        if vocab is None or len(shape) != 1:
            raise UserError(
                f"Model '{self.name}' takes {self.takes}, not samples of shape {shape}"
                + ("; use mlp, or cnn4 for images." if vocab is None else ".")
            )
        return vocab


def body_and_head(head: nn.Module, *body: nn.Module) -> nn.Sequential:
    """The layers of the body, followed by the head under the name `head`."""
    model = nn.Sequential(*body)
    model.add_module("head", head)
    return model
