"""From text to numbers: words, vocabularies, sequences of one length, windows of characters."""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import UserError
from fedloom.data.dataset import RawDataset
from fedloom.data.divide import split_sizes

# of torchtext's "basic_english", in its order: what is put in place of what
ENGLISH = (
    ("'", " ' "), ('"', ""), (".", " . "), ("<br />", " "), (",", " , "), ("(", " ( "), (")", " ) "), ("!", " ! "),
    ("?", " ? "), (";", " "), (":", " "),
)  # fmt: skip
NEXT_WORD = ("<pad>", "<bos>", "<eos>", "<oov>")
PAD, BOS, EOS, OOV = range(4)
UNKNOWN_TARGET = -1  # padding among the labels of a sequence


def basic_english(text: str) -> list[str]:
    """The words of a text: lower case, punctuation apart, double quotes, colons and semicolons left out."""
    text = text.lower()
    for old, new in ENGLISH:
        text = text.replace(old, new)
    return text.split()


def sentences(text: str) -> list[str]:
    """A text cut at line ends, and behind full stops, question and exclamation marks that white space follows."""
    return [piece for piece in re.split(r"(?<=[.!?])\s+|\n+", text) if piece.strip()]


def vocabulary(texts: Iterable[Iterable[str]], specials: Sequence[str], limit: int | None = None) -> dict[str, int]:
    """Numbers of words: the specials, then by frequency (of equals, in alphabetical order), `limit` words at most."""
    count = Counter(chain.from_iterable(texts))
    for word in specials:
        count.pop(word, None)
    ranked = sorted(count, key=lambda word: (-count[word], word))[:limit]
    return {word: i for i, word in enumerate([*specials, *ranked])}


def padded(rows: Sequence[Sequence[int]], length: int, fill: int) -> np.ndarray:
    """Rows cut or filled up to one length."""
    sizes = np.minimum([len(row) for row in rows], length).astype(np.int64)
    made = np.full((len(rows), length), fill, dtype=np.int64)
    flat = np.fromiter(chain.from_iterable(row[:length] for row in rows), np.int64, int(sizes.sum()))
    made[np.arange(length) < sizes[:, None]] = flat
    return made


def windows(codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Every run of `length` numbers and the one behind it, as views."""
    if len(codes) <= length:
        return np.zeros((0, length), codes.dtype), np.zeros(0, codes.dtype)
    runs = np.lib.stride_tricks.sliding_window_view(codes, length + 1)
    return runs[:, :-1], runs[:, -1]


def next_words(users: Sequence[Sequence[Sequence[str]]], words: int, length: int) -> RawDataset:
    """The next word at every position of the users' sentences, which are lists of words in time order.

    The vocabulary has the most frequent words of the first 80 % of every user's sentences. The end of a sentence and
    words outside the vocabulary are learnt, but not scored."""
    early = (said[: split_sizes(len(said), (0.8, 0.1, 0.1))[0]] for said in users)
    numbers = vocabulary(chain.from_iterable(early), NEXT_WORD, words)
    rows = [[BOS, *(numbers.get(word, OOV) for word in one), EOS] for said in users for one in said]
    ends = np.cumsum([0, *(len(said) for said in users)])
    return RawDataset(
        padded([row[:-1] for row in rows], length, PAD),
        padded([row[1:] for row in rows], length, UNKNOWN_TARGET),
        classes=len(numbers),
        natural=tuple(np.arange(a, b) for a, b in pairwise(ends)),
        ordered=True,
        vocab=len(numbers),
        unscored=(EOS, OOV),
    )


def read_text(path: Path) -> str:
    """A file in UTF-8, also one packed with xz."""
    try:
        raw = path.read_bytes()
        raw = lzma.decompress(raw) if path.suffix == ".xz" else raw
    except (OSError, lzma.LZMAError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise UserError(f"{path} is damaged or cannot be read ({reason}); fetch it again.") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        row = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, row {row}: byte {raw[error.start]:#04x} is not UTF-8; fetch it again.") from None


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        row = getattr(error, "lineno", 1)
        raise UserError(f"{path}, row {row}: this is not JSON; fetch it again.") from None
