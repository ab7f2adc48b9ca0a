"""Models that have dense layers only."""

from dataclasses import dataclass

from torch import nn

from fedloom.core.settings import setting
from fedloom.models.zoo import Model, Shape, body_and_head


@dataclass(frozen=True)
class LogReg(Model):
    """Logistic regression: one dense layer, which is the head."""

    name = "logreg"
    about = "logistic regression, initially zero"
    takes = "numbers"
    source = "PAGE"

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """Logistic regression on the flattened sample."""
        head = nn.Linear(self.numbers(shape, vocab), classes)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return body_and_head(head, nn.Flatten())


@dataclass(frozen=True)
class Mlp(Model):
    """A multilayer perceptron with one hidden layer."""

    name = "mlp"
    about = "one hidden layer with ReLU"
    takes = "numbers"

    width: int = setting(64, "units of the hidden layer", low=1)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The perceptron on the flattened sample."""
        inputs = self.numbers(shape, vocab)
        return body_and_head(nn.Linear(self.width, classes), nn.Flatten(), nn.Linear(inputs, self.width), nn.ReLU())


@dataclass(frozen=True)
class Mlp3(Model):
    """GPFL's multilayer perceptron, with three hidden layers by default."""

    name = "mlp3"
    about = "hidden layers of 1000, 500 and 100 units with ReLU"
    takes = "numbers"
    source = "GPFL"

    widths: tuple[int, ...] = setting((1000, 500, 100), "units of the hidden layers, such as 200/50", low=1)
    dropout: float = setting(0.0, "share of each hidden layer that is dropped in training", low=0, high=1)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The perceptron on the flattened sample."""
        inputs = self.numbers(shape, vocab)
        body: list[nn.Module] = [nn.Flatten()]
        for width in self.widths:
            body += [nn.Linear(inputs, width), nn.ReLU(), *([nn.Dropout(self.dropout)] if self.dropout else [])]
            inputs = width
        return body_and_head(nn.Linear(inputs, classes), *body)
