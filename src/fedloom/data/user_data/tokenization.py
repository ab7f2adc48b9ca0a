"""The vocabulary of a user's texts."""

from fedloom.core.preprocessing import Vocabulary
from fedloom.data.text import vocabulary

SPECIALS = ("<pad>", "<unk>")
PAD, UNK = range(2)
MAX_LENGTH = 200  # tokens of a text, unless a length is given


def fit_vocabulary(texts: list[list[str]], words: int | None, length: int | None) -> Vocabulary:
    """The vocabulary of texts.

    Args:
        texts: the tokens of every text.
        words: keep this many of the most frequent words, None for all; the others get the id of unknown words.
        length: tokens of a text, longer ones are cut; by default those of the longest text, at most MAX_LENGTH.
    """
    length = length or min(MAX_LENGTH, max(len(text) for text in texts)) or 1
    return Vocabulary(tuple(vocabulary(texts, SPECIALS, words)), "basic_english", length, unknown=UNK, padding=PAD)
