"""Residual networks. Those that the experiments take from torchvision are initialised as there, the others as torch
does by default."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.models.zoo import Model, Shape

Norm = Callable[[int], nn.Module]
Layers = list[nn.Module]
GROUPS = 2  # as in PAGE's code
_group_norm: Norm = partial(nn.GroupNorm, GROUPS)


class _Block(nn.Module):
    """Convolutions beside a shortcut, which is the identity where the shape stays."""

    def __init__(self, main: Layers, shortcut: Layers) -> None:
        super().__init__()
        self.main, self.shortcut = nn.Sequential(*main), nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return (self.main(x) + self.shortcut(x)).relu()


def _basic(inputs: int, width: int, stride: int, norm: Norm) -> _Block:
    main = [
        _conv(inputs, width, 3, stride), norm(width), nn.ReLU(),
        _conv(width, width, 3), norm(width),
    ]  # fmt: skip
    return _Block(main, _shortcut(inputs, width, stride, norm))


def _bottleneck(inputs: int, width: int, stride: int, norm: Norm) -> _Block:
    main = [
        _conv(inputs, width, 1), norm(width), nn.ReLU(),
        _conv(width, width, 3, stride), norm(width), nn.ReLU(),
        _conv(width, 4 * width, 1), norm(4 * width),
    ]  # fmt: skip
    return _Block(main, _shortcut(inputs, 4 * width, stride, norm))


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> Layers:
    return [] if stride == 1 and inputs == outputs else [_conv(inputs, outputs, 1, stride), norm(outputs)]


def _resnet(
    stem: Layers, depths: tuple[int, ...], width: int, norm: Norm, classes: int, deep: bool = False
) -> nn.Module:
    """A stem that gives `width` channels, then stages of so many blocks, each twice as wide as the one before."""
    block, factor = (_bottleneck, 4) if deep else (_basic, 1)
    parts: dict[str, nn.Module] = {"stem": nn.Sequential(*stem)}
    channels = width
    for stage, depth in enumerate(depths):
        blocks = []
        for first in (True, *[False] * (depth - 1)):
            blocks.append(block(channels, width << stage, 2 if first and stage else 1, norm))
            channels = factor * (width << stage)
        parts[f"stage{stage + 1}"] = nn.Sequential(*blocks)
    return _topped(parts, channels, classes)


def _topped(parts: dict[str, nn.Module], channels: int, classes: int) -> nn.Module:
    """Mean over all pixels, and the head."""
    top = {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(channels, classes)}
    return nn.Sequential(OrderedDict({**parts, **top}))


def _as_torchvision(model: nn.Module) -> nn.Module:
    for m in model.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
    return model


def _grouped(width: int) -> int:
    if width % GROUPS:
        raise UserError(f"width must be an even number for normalisation in two groups, not {width}.")
    return width


WIDTH = "channels of the first stage; each of the others has twice as many as the one before"


@dataclass(frozen=True)
class ResNet18Bn(Model):
    name = "resnet18_bn"
    about = "ResNet-18 as in torchvision: 7x7 convolution of stride 2 and max-pooling first, BatchNorm"
    takes = "images"
    source = "GPFL"

    width: int = setting(64, WIDTH, low=1)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        channels, _, _ = self.image(shape, vocab, 1)
        return _as_torchvision(_torchvision18(channels, self.width, nn.BatchNorm2d, classes))


@dataclass(frozen=True)
class ResNet18Gn(Model):
    name = "resnet18_gn"
    about = "resnet18_bn with GroupNorm of two groups in place of BatchNorm"
    takes = "images"
    source = "PAGE"

    width: int = setting(64, WIDTH, low=2)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        channels, _, _ = self.image(shape, vocab, 1)
        return _as_torchvision(_torchvision18(channels, _grouped(self.width), _group_norm, classes))


def _torchvision18(channels: int, width: int, norm: Norm, classes: int) -> nn.Module:
    stem = [_conv(channels, width, 7, 2), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    return _resnet(stem, (2, 2, 2, 2), width, norm, classes)


@dataclass(frozen=True)
class ResNet18GnC(Model):
    name = "resnet18_gn_c"
    about = "ResNet-18 for small images: 3x3 convolution first and no max-pooling, GroupNorm of two groups"
    takes = "images"
    source = "PLGU"

    width: int = setting(64, WIDTH, low=2)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        channels, _, _ = self.image(shape, vocab, 1)
        width = _grouped(self.width)
        stem = [_conv(channels, width, 3), _group_norm(width), nn.ReLU()]
        return _resnet(stem, (2, 2, 2, 2), width, _group_norm, classes)


@dataclass(frozen=True)
class ResNet50GnT(Model):
    name = "resnet50_gn_t"
    about = "ResNet-50: 3x3 convolution and max-pooling first, GroupNorm of two groups"
    takes = "images"
    source = "PLGU"

    width: int = setting(64, WIDTH, low=2)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        channels, _, _ = self.image(shape, vocab, 1)
        width = _grouped(self.width)
        stem = [_conv(channels, width, 3), _group_norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        return _resnet(stem, (3, 4, 6, 3), width, _group_norm, classes, deep=True)


class _WideBlock(nn.Module):
    """Normalisation and ReLU come before each convolution; a shortcut that changes the shape starts after the first."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Sequential(_group_norm(inputs), nn.ReLU())
        self.main = nn.Sequential(
            _conv(inputs, outputs, 3, stride), _group_norm(outputs), nn.ReLU(),
            *([nn.Dropout(dropout)] if dropout else []),
            _conv(outputs, outputs, 3),
        )  # fmt: skip
        self.shortcut = None if stride == 1 and inputs == outputs else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        ready = self.enter(x)
        return self.main(ready) + (x if self.shortcut is None else self.shortcut(ready))


@dataclass(frozen=True)
class WideResNet(Model):
    name = "wrn28_10_gn"
    about = "WideResNet-28-10, pre-activation, GroupNorm of two groups"
    takes = "images"
    source = "PLGU"

    depth: int = setting(28, "convolutions on the longest way plus the head: 10, 16, 22, ...", low=10)
    widen: int = setting(10, "the three stages have 16, 32 and 64 times as many channels", low=1)
    dropout: float = setting(0.0, "share that is dropped between the convolutions of a block", low=0, high=1)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        channels, _, _ = self.image(shape, vocab, 1)
        if (self.depth - 4) % 6:
            raise UserError(f"depth must be 4 more than a multiple of 6, such as 16 or 28, not {self.depth}.")
        parts: dict[str, nn.Module] = {"stem": _conv(channels, 16, 3)}
        inputs = 16
        for stage in range(3):
            outputs, blocks = (16 << stage) * self.widen, []
            for first in (True, *[False] * ((self.depth - 4) // 6 - 1)):
                blocks.append(_WideBlock(inputs, outputs, 2 if first and stage else 1, self.dropout))
                inputs = outputs
            parts[f"stage{stage + 1}"] = nn.Sequential(*blocks)
        parts["last"] = nn.Sequential(_group_norm(inputs), nn.ReLU())
        return _topped(parts, inputs, classes)
