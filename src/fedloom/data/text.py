"""Texts as numbers: tokens, vocabularies, sequences of one length, windows of characters."""

import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedloom.core.errors import UserError, reason
from fedloom.core.preprocessing import Preprocessing, Vocabulary
from fedloom.data.dataset import RawDataset
from fedloom.data.divide import split_sizes
from fedloom.data.limits import read_blocks, require_file

# torchtext's "basic_english", in its order: text -> replacement
REPLACEMENTS = (
    ("'", " ' "), ('"', ""), (".", " . "), ("<br />", " "), (",", " , "), ("(", " ( "), (")", " ) "), ("!", " ! "),
    ("?", " ? "), (";", " "), (":", " "),
)  # fmt: skip
SPECIALS = ("<pad>", "<bos>", "<eos>", "<oov>")
PAD, BOS, EOS, OOV = range(4)
NO_TARGET = -1  # label of padding


def basic_english(text: str) -> list[str]:
    """Tokenise a text as torchtext's "basic_english": lower case, punctuation as tokens of its own, without double
    quotes, colons and semicolons."""
    text = text.lower()
    for old, new in REPLACEMENTS:
        text = text.replace(old, new)
    return text.split()


def characters(text: str) -> list[str]:
    """The characters of a text; line ends and repeated spaces become one space, as in LEAF."""
    return list(re.sub("  +", " ", text.replace("\n", " ")))


TOKENIZERS: dict[str, Callable[[str], list[str]]] = {
    "basic_english": basic_english, "spaces": str.split, "characters": characters,
}  # fmt: skip


def sentences(text: str) -> list[str]:
    """Split a text at line ends, and after full stops, question and exclamation marks before white space."""
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+|\n+", text) if sentence.strip()]


def vocabulary(texts: Iterable[Iterable[str]], specials: Sequence[str], limit: int | None = None) -> dict[str, int]:
    """Token ids by word: the specials, then at most `limit` words by frequency (ties in alphabetical order)."""
    count = Counter(chain.from_iterable(texts))
    for word in specials:
        count.pop(word, None)
    ranked = sorted(count, key=lambda word: (-count[word], word))[:limit]
    return {word: i for i, word in enumerate([*specials, *ranked])}


def encode_tokens(texts: Sequence[Sequence[str]], vocabulary: Vocabulary) -> np.ndarray:
    """Texts, given as tokens, as token ids [texts, length]. Without padding, none may be shorter than that."""
    ids, length = vocabulary.ids, vocabulary.length
    start = [] if vocabulary.start is None else [vocabulary.start]
    cut = slice(length) if vocabulary.padding is not None else slice(-length, None)
    rows = [[*start, *(ids.get(word, vocabulary.unknown) for word in text[cut])] for text in texts]
    return padded(rows, length, vocabulary.padding or 0)


def text_preprocessing(vocabulary: Vocabulary, classes: tuple[str, ...]) -> Preprocessing:
    """The preprocessing of texts."""
    shape = (vocabulary.length,)
    return Preprocessing("text", shape, "int64", classes, vocabulary=vocabulary, token_ids=len(vocabulary.words))


def padded(rows: Sequence[Sequence[int]], length: int, fill: int) -> np.ndarray:
    """Sequences as an array [sequences, length]: longer ones are cut, shorter ones padded with `fill` at the end."""
    sizes = np.minimum([len(row) for row in rows], length).astype(np.int64)
    result = np.full((len(rows), length), fill, dtype=np.int64)
    flat = np.fromiter(chain.from_iterable(row[:length] for row in rows), np.int64, int(sizes.sum()))
    result[np.arange(length) < sizes[:, None]] = flat
    return result


def windows(codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """All windows of `length` consecutive codes, [windows, length], and the code after each; both are views."""
    if len(codes) <= length:
        return np.zeros((0, length), codes.dtype), np.zeros(0, codes.dtype)
    spans = np.lib.stride_tricks.sliding_window_view(codes, length + 1)
    return spans[:, :-1], spans[:, -1]


def next_words(
    users: Sequence[Sequence[Sequence[str]]], words: int, length: int, tokenizer: Literal["basic_english", "spaces"]
) -> RawDataset:
    """A data set for predicting the next word at every position of a sentence; a client is a user.

    The vocabulary has the most frequent words of the first 80 % of every user's sentences. The end of a sentence and
    words outside the vocabulary are learnt, but not scored.

    Args:
        users: sentences (lists of words) of every user, in time order.
        words: size of the vocabulary, without special tokens.
        length: tokens of a sentence; longer ones are cut.
        tokenizer: what split the sentences into words.
    """
    training = (user[: split_sizes(len(user), (0.8, 0.1, 0.1))[0]] for user in users)
    ids = vocabulary(chain.from_iterable(training), SPECIALS, words)
    saved = Vocabulary(tuple(ids), tokenizer, length, unknown=OOV, padding=PAD, start=BOS)
    texts = [sentence for user in users for sentence in user]
    targets = [[*(ids.get(word, OOV) for word in text), EOS] for text in texts]
    ends = np.cumsum([0, *(len(user) for user in users)])
    return RawDataset(
        encode_tokens(texts, saved),
        padded(targets, length, NO_TARGET),
        classes=len(ids),
        natural=tuple(np.arange(a, b) for a, b in pairwise(ends)),
        ordered=True,
        vocab=len(ids),
        unscored=(EOS, OOV),
        preprocessing=text_preprocessing(saved, saved.words),
    )


def read_text(path: Path, remedy: str = "fetch it again") -> str:
    """Read a text file in UTF-8, which may be compressed (.xz); `remedy` is what to do if it is damaged."""
    require_file(path)
    try:
        raw = b"".join(read_blocks(path))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"{path} is damaged or cannot be read ({reason(error)}); {remedy}.") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, row {line}: byte {raw[error.start]:#04x} is not UTF-8; {remedy}.") from None


def read_json(path: Path) -> Any:
    """Read a JSON file in UTF-8, which may be compressed (.xz)."""
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise UserError(f"{path}, row {line}: this is not JSON; fetch it again.") from None
