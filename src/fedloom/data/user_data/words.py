"""Texts become rows of token ids."""

from __future__ import annotations

import numpy as np

from fedloom.data.text import basic_english, padded, vocabulary

SPECIALS = ("<pad>", "<unk>")
PAD, UNKNOWN = range(2)
LONGEST = 200  # tokens, unless more are asked for


def tokens(texts: list[str], words: int | None, length: int | None) -> tuple[np.ndarray, int]:
    """Token ids, padded with 0 to one length, and how many different ones there are."""
    split = [basic_english(text) for text in texts]
    numbers = vocabulary(split, SPECIALS, words)
    wanted = length or min(LONGEST, max(len(text) for text in split)) or 1
    return padded([[numbers.get(word, UNKNOWN) for word in text] for text in split], wanted, PAD), len(numbers)
