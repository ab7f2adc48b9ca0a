"""Residual networks. Those that papers take from torchvision are initialised as in torchvision, the others with
PyTorch's defaults."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.models.zoo import Model, Shape

Norm = Callable[[int], nn.Module]
Layers = list[nn.Module]
GROUPS = 2  # as in PAGE's code


def _group_norm(channels: int) -> nn.Module:
    """GroupNorm of two groups."""
    if channels % GROUPS:
        raise UserError(f"width must be an even number for normalisation in two groups, not {channels}.")
    return nn.GroupNorm(GROUPS, channels)


class _Block(nn.Module):
    """A residual block: convolutions plus a shortcut, then ReLU. Without layers, the shortcut is the identity."""

    def __init__(self, main: Layers, shortcut: Layers) -> None:
        super().__init__()
        self.main, self.shortcut = nn.Sequential(*main), nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return (self.main(x) + self.shortcut(x)).relu()


def _basic(inputs: int, width: int, stride: int, norm: Norm) -> _Block:
    """ResNet-18's block: two 3x3 convolutions."""
    main = [
        _conv(inputs, width, 3, stride), norm(width), nn.ReLU(),
        _conv(width, width, 3), norm(width),
    ]  # fmt: skip
    return _Block(main, _shortcut(inputs, width, stride, norm))


def _bottleneck(inputs: int, width: int, stride: int, norm: Norm) -> _Block:
    """ResNet-50's block: 1x1, 3x3 and 1x1 convolutions, the last with 4 * width channels."""
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
    """A stem with `width` output channels, then stages of depths[i] blocks, each twice as wide as the stage before.

    `deep` uses bottleneck blocks.
    """
    block, factor = (_bottleneck, 4) if deep else (_basic, 1)
    parts: dict[str, nn.Module] = {"stem": nn.Sequential(*stem)}
    channels = width
    for stage, depth in enumerate(depths):
        blocks = []
        for first in (True, *[False] * (depth - 1)):
            blocks.append(block(channels, width << stage, 2 if first and stage else 1, norm))
            channels = factor * (width << stage)
        parts[f"stage{stage + 1}"] = nn.Sequential(*blocks)
    return _with_pooling_and_head(parts, channels, classes)


def _with_pooling_and_head(parts: dict[str, nn.Module], channels: int, classes: int) -> nn.Module:
    """The layers, followed by average pooling over all pixels and the head."""
    layers = {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(channels, classes)}
    return nn.Sequential(OrderedDict({**parts, **layers}))


def _init_as_torchvision(model: nn.Module) -> nn.Module:
    """The model with its convolutions initialised as by He et al. (Kaiming), as in torchvision."""
    for m in model.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
    return model


WIDTH = "channels of the first stage; each of the others has twice as many as the one before"


@dataclass(frozen=True)
class ResNet18Bn(Model):
    """torchvision's ResNet-18, for any number of input channels."""

    name = "resnet18_bn"
    about = "ResNet-18 as in torchvision: 7x7 convolution of stride 2 and max-pooling first, BatchNorm"
    takes = "images"
    source = "GPFL"

    width: int = setting(64, WIDTH, low=1)

    @staticmethod
    def norm(channels: int) -> nn.Module:
        """A normalisation layer."""
        return nn.BatchNorm2d(channels)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The network for images of this shape."""
        channels, _, _ = self.image(shape, vocab, 1)
        return _init_as_torchvision(_resnet18(channels, self.width, self.norm, classes))


class ResNet18Gn(ResNet18Bn):
    """torchvision's ResNet-18 with GroupNorm, which needs no running statistics."""

    name = "resnet18_gn"
    about = "resnet18_bn with GroupNorm of two groups in place of BatchNorm"
    source = "PAGE"
    norm = staticmethod(_group_norm)


def _resnet18(channels: int, width: int, norm: Norm, classes: int) -> nn.Module:
    stem = [_conv(channels, width, 7, 2), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    return _resnet(stem, (2, 2, 2, 2), width, norm, classes)


@dataclass(frozen=True)
class ResNet18GnC(Model):
    """PLGU's ResNet-18 for small images such as CIFAR's."""

    name = "resnet18_gn_c"
    about = "ResNet-18 for small images: 3x3 convolution first and no max-pooling, GroupNorm of two groups"
    takes = "images"
    source = "PLGU"
    depths: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)  # blocks per stage
    deep: ClassVar[bool] = False  # bottleneck blocks, and max-pooling after the first convolution

    width: int = setting(64, WIDTH, low=2)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The network for images of this shape."""
        channels, _, _ = self.image(shape, vocab, 1)
        stem = [_conv(channels, self.width, 3), _group_norm(self.width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        return _resnet(stem if self.deep else stem[:-1], self.depths, self.width, _group_norm, classes, self.deep)


class ResNet50GnT(ResNet18GnC):
    """PLGU's ResNet-50 for Tiny-ImageNet."""

    name = "resnet50_gn_t"
    about = "ResNet-50: 3x3 convolution and max-pooling first, GroupNorm of two groups"
    depths = (3, 4, 6, 3)
    deep = True


class _WideBlock(nn.Module):
    """A pre-activation block: GroupNorm and ReLU come before each convolution. Where the shape changes, the shortcut is
    a 1x1 convolution of the normalised input."""

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
        normalised = self.enter(x)
        return self.main(normalised) + (x if self.shortcut is None else self.shortcut(normalised))


@dataclass(frozen=True)
class WideResNet(Model):
    """PLGU's WideResNet, by default with 28 layers and a widening factor of 10."""

    name = "wrn28_10_gn"
    about = "WideResNet-28-10, pre-activation, GroupNorm of two groups"
    takes = "images"
    source = "PLGU"

    depth: int = setting(28, "convolutions on the longest way plus the head: 10, 16, 22, ...", low=10, high=1000)
    widen: int = setting(10, "the three stages have 16, 32 and 64 times as many channels", low=1)
    dropout: float = setting(0.0, "share that is dropped between the convolutions of a block", low=0, high=1)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The network for images of this shape."""
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
        return _with_pooling_and_head(parts, inputs, classes)
