"""Models for sequences of token ids."""

from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.core.settings import setting
from fedloom.models.zoo import Model, Shape


class _MeanOfEmbeddings(nn.Module):
    """Mean of word vectors, then two linear layers. Padding (token 0) has the vector zero and counts in the mean."""

    def __init__(self, vocab: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width, padding_idx=0)
        self.linear = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(self.embedding(x).mean(1)))


@dataclass(frozen=True)
class FastText(Model):
    """fastText's classifier for texts: the mean of word vectors."""

    name = "fasttext"
    about = "mean of word vectors and a linear layer; token 0 is padding"
    takes = "sequences of token ids"
    source = "GPFL"

    width: int = setting(32, "length of a word vector", low=1)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The classifier for a vocabulary of `vocab` tokens."""
        return _MeanOfEmbeddings(self.tokens(shape, vocab), self.width, classes)


class _Lstm(nn.Module):
    """An LSTM over token ids that predicts at every position."""

    def __init__(self, vocab: int, embedding: int, width: int, layers: int, dropout: float, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.outputs(x)))

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of the last LSTM layer, [batch, time, width]."""
        return self.lstm(self.embedding(x))[0]


class _LastStepLstm(_Lstm):
    """An LSTM that predicts once, at the last token that is not padding."""

    padding: int | None = None

    def outputs(self, x: Tensor) -> Tensor:
        """Output of the last LSTM layer at the last token, [batch, width]."""
        outputs = super().outputs(x)
        if self.padding is None:
            return outputs[:, -1]
        last = ((x != self.padding).sum(1) - 1).clamp(min=0)
        return outputs.gather(1, last[:, None, None].expand(-1, 1, outputs.shape[-1])).squeeze(1)


@dataclass(frozen=True)
class LstmShakes(Model):
    """PAGE's LSTM for Shakespeare: the next character after a window."""

    name = "lstm_shakes"
    about = "two LSTM layers of 100 units; one prediction, after the last token"
    takes = "sequences of token ids"
    source = "PAGE"

    embedding: int = setting(8, "length of a token's vector", low=1)
    width: int = setting(100, "units of an LSTM layer", low=1)
    layers: int = setting(2, "LSTM layers", low=1, high=1000)
    dropout: float = setting(0.0, "share of each LSTM layer's output that is dropped in training", low=0, high=1)
    padding: int | None = setting(None, "token id that fills up short sequences at their end [none does]", low=0)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The LSTM for a vocabulary of `vocab` tokens."""
        tokens = self.tokens(shape, vocab)
        model = _LastStepLstm(tokens, self.embedding, self.width, self.layers, self.dropout, classes)
        model.padding = self.padding
        return model


@dataclass(frozen=True)
class LstmSo(Model):
    """pFedKT's LSTM for Stack Overflow: the next word at every position."""

    name = "lstm_so"
    about = "an LSTM layer of 256 units; a prediction after every token"
    takes = "sequences of token ids"
    source = "pFedKT"

    embedding: int = setting(192, "length of a token's vector", low=1)
    width: int = setting(256, "units of an LSTM layer", low=1)
    layers: int = setting(1, "LSTM layers", low=1, high=1000)
    dropout: float = setting(0.0, "share of each LSTM layer's output that is dropped in training", low=0, high=1)

    def build(self, shape: Shape, classes: int, vocab: int | None = None) -> nn.Module:
        """The LSTM for a vocabulary of `vocab` tokens."""
        tokens = self.tokens(shape, vocab)
        return _Lstm(tokens, self.embedding, self.width, self.layers, self.dropout, classes)
