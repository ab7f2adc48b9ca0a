"""Models by name. A model is a `torch.nn.Module` whose last operation is a named head."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fedloom.core.errors import UserError
from fedloom.core.registry import Registry
from fedloom.core.settings import setting

MODELS: Registry[type[Model]] = Registry("model", "fedloom.models")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model(ABC):
    """An architecture by name; its fields are its options. Every built module calls its head `head`."""

    name: ClassVar[str]
    about: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        MODELS.add(cls.name, cls)

    @abstractmethod
    def build(self, shape: Shape, classes: int) -> nn.Module: ...


def _body_and_head(head: nn.Linear, *body: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*body)
    model.add_module("head", head)
    return model


def _image(name: str, shape: Shape, least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UserError(
            f"Model '{name}' needs images of at least {least}x{least} pixels, not samples of shape {shape}."
        )
    return shape[0], shape[1], shape[2]


@dataclass(frozen=True)
class LogReg(Model):
    name = "logreg"
    about = "logistic regression, initially zero (PAGE)"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        head = nn.Linear(math.prod(shape), classes)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return _body_and_head(head, nn.Flatten())


@dataclass(frozen=True)
class Mlp(Model):
    name = "mlp"
    about = "one hidden layer with ReLU"

    width: int = setting(64, "units of the hidden layer", low=1)

    def build(self, shape: Shape, classes: int) -> nn.Module:
        return _body_and_head(
            nn.Linear(self.width, classes), nn.Flatten(), nn.Linear(math.prod(shape), self.width), nn.ReLU()
        )


@dataclass(frozen=True)
class Cnn8(Model):
    name = "cnn8"
    about = "two 3x3 convolutions and a hidden layer, for images from 8x8"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        channels, height, width = _image(self.name, shape, 4)
        return _body_and_head(
            nn.Linear(64, classes),
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (height // 4) * (width // 4), 64),
            nn.ReLU(),
        )


@dataclass(frozen=True)
class Cnn4(Model):
    name = "cnn4"
    about = "two 5x5 convolutions, Linear 512 and the head (GPFL)"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        channels, height, width = _image(self.name, shape, 16)
        side = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
        return _body_and_head(
            nn.Linear(512, classes),
            nn.Conv2d(channels, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * side[0] * side[1], 512),
            nn.ReLU(),
        )
