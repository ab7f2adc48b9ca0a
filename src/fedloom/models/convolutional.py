"""Convolutional networks: convolutions, max-pooling, dense layers."""

from dataclasses import dataclass

from torch import nn

from fedloom.core.errors import UserError
from fedloom.models.zoo import Model, Shape, body_and_head


@dataclass(frozen=True)
class Cnn8(Model):
    """A small network for images from 4x4 pixels on."""

    name = "cnn8"
    about = "two 3x3 convolutions and a hidden layer of 64"
    takes = "images of at least 4x4 pixels"

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The network for images of this shape; its head is the last layer."""
        channels, height, width = self.image(shape, vocab, 4)
        return body_and_head(
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
    """GPFL's network for images."""

    name = "cnn4"
    about = "two 5x5 convolutions (32 and 64 channels) and a hidden layer of 512"
    takes = "images of at least 16x16 pixels"
    source = "GPFL"

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The network for images of this shape; its head is the last layer."""
        channels, *sides = self.image(shape, vocab, 16)
        return body_and_head(
            nn.Linear(512, classes),
            *_two_convolutions(channels, 32, 64),
            nn.Linear(64 * _pooled_side(sides[0]) * _pooled_side(sides[1]), 512),
            nn.ReLU(),
        )


@dataclass(frozen=True)
class CnnKt(Model):
    """pFedKT's network for images."""

    name = "cnn_kt"
    about = "two 5x5 convolutions (16 and 32 channels) and hidden layers of 1920 and 80"
    takes = "images of at least 16x16 pixels"
    source = "pFedKT"

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The network for images of this shape; its head is the last layer."""
        channels, *sides = self.image(shape, vocab, 16)
        return body_and_head(
            nn.Linear(80, classes),
            *_two_convolutions(channels, 16, 32),
            nn.Linear(32 * _pooled_side(sides[0]) * _pooled_side(sides[1]), 1920),
            nn.ReLU(),
            nn.Linear(1920, 80),
            nn.ReLU(),
        )


def _two_convolutions(channels: int, first: int, second: int) -> list[nn.Module]:
    """Two 5x5 convolutions with `first` and `second` output channels, each with ReLU and 2x2 max-pooling."""
    return [
        nn.Conv2d(channels, first, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]


def _pooled_side(side: int, kernel: int = 5) -> int:
    """Pixels that are left of `side` after two convolutions without padding, each followed by pooling by 2."""
    for _ in range(2):
        side = (side - kernel + 1) // 2
    return side


@dataclass(frozen=True)
class HarCnn(Model):
    """GPFL's network for signals of motion sensors (UCI HAR)."""

    name = "harcnn"
    about = "two convolutions over 9 time steps (32 and 64 channels); the head has hidden layers of 1024 and 512"
    takes = "signals, (channels, time) or (channels, 1, time), of at least 28 time steps"
    source = "GPFL"

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The network for signals of this shape; its head has three dense layers."""
        self.numbers(shape, vocab)
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[1] != 1) or shape[-1] < 28:
            raise UserError(f"Model 'harcnn' takes {self.takes}, not samples of shape {shape}.")
        body = [
            nn.Conv2d(shape[0], 32, (1, 9)),
            nn.ReLU(),
            nn.MaxPool2d((1, 2)),
            nn.Conv2d(32, 64, (1, 9)),
            nn.ReLU(),
            nn.MaxPool2d((1, 2)),
            nn.Flatten(),
        ]
        head = nn.Sequential(
            nn.Linear(64 * _pooled_side(shape[-1], kernel=9), 1024),
            nn.ReLU(),
            nn.Linear(1024, 512),
            nn.ReLU(),
            nn.Linear(512, classes),
        )
        return body_and_head(head, *([nn.Unflatten(1, (shape[0], 1))] if len(shape) == 2 else []), *body)
