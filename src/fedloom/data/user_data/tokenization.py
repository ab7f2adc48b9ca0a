"""Texts as token ids."""

import numpy as np

from fedloom.data.text import basic_english, padded, vocabulary

SPECIALS = ("<pad>", "<unk>")
PAD, UNK = range(2)
MAX_LENGTH = 200  # tokens of a text, unless a length is given


def token_ids(texts: list[str], words: int | None, length: int | None) -> tuple[np.ndarray, int]:
    """Token ids [texts, length], padded with 0, and the size of the vocabulary.

    Args:
        texts: the texts.
        words: keep this many of the most frequent words, None for all; the others get the id of unknown words.
        length: tokens of a text, longer ones are cut; by default those of the longest text, at most MAX_LENGTH.
    """
    tokenized = [basic_english(text) for text in texts]
    ids = vocabulary(tokenized, SPECIALS, words)
    length = length or min(MAX_LENGTH, max(len(text) for text in tokenized)) or 1
    return padded([[ids.get(word, UNK) for word in text] for text in tokenized], length, PAD), len(ids)
