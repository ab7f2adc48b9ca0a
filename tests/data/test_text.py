"""From text to numbers, worked out by hand."""

import json
import lzma

import numpy as np
import pytest
from sentences import user_error

from fedloom.data.text import basic_english, next_words, padded, read_json, read_text, sentences, vocabulary, windows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Basic English Normalization for a Line of Text", "basic english normalization for a line of text"),
        ("Don't stop.", "don ' t stop ."),
        ('He said: "No!"', "he said no !"),
        ('a"b;c:d', "ab c d"),  # a quote leaves nothing behind, the others a space
        ("U.S. (Reuters), why?", "u . s . ( reuters ) , why ?"),
        ("one<br />two<br/>three", "one two<br/>three"),  # only the tag with a space
        ("<br;/>", "<br />"),  # a semicolon becomes a space after tags were taken out
        ("#36;3.50 - up 10%\tto-day\\now\u00a0", "#36 3 . 50 - up 10% to-day\\now"),
        (" \n ", ""),
    ],
    ids=repr,
)
def test_basic_english(text, words):
    assert basic_english(text) == words.split()


def test_a_vocabulary_has_specials_first_then_words_by_frequency_then_alphabet():
    texts = [["b", "d", "<unk>", "c"], ["c", "b", "a"], ["c"]]  # c 3, b 2, a 1, d 1
    assert vocabulary(texts, ("<pad>", "<unk>")) == {"<pad>": 0, "<unk>": 1, "c": 2, "b": 3, "a": 4, "d": 5}
    assert vocabulary(texts, ("<pad>", "<unk>"), limit=3) == {"<pad>": 0, "<unk>": 1, "c": 2, "b": 3, "a": 4}


def test_rows_are_filled_up_and_cut():
    assert padded([[1, 2], [], [3, 4, 5, 6]], 3, -1).tolist() == [[1, 2, -1], [-1, -1, -1], [3, 4, 5]]
    assert padded([], 3, 0).shape == (0, 3)


def test_windows_are_followed_by_the_next_character():
    x, y = windows(np.arange(5), 3)
    assert x.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert y.tolist() == [3, 4]
    assert [values.shape for values in windows(np.arange(3), 3)] == [(0, 3), (0,)]


def test_sentences_end_at_marks_before_white_space_and_at_line_ends():
    text = "What? It is 3.5 p.c.  Yes!\n\nA title\n...and 'so on'."
    assert sentences(text) == ["What?", "It is 3.5 p.c.", "Yes!", "A title", "...and 'so on'."]


def test_next_words_of_two_users():
    """Of ten sentences the first eight, of two the first one, make the vocabulary: x 9, a 8, b 2; y and z are new."""
    first = [["a", "x"]] * 7 + [["a", "x", "b", "x"]] + [["z"], ["a", "y"]]
    raw = next_words([first, [["b"], ["z", "a"]]], words=2, length=3, tokenizer="spaces")
    assert (raw.classes, raw.vocab) == (6, 6)  # pad 0, bos 1, eos 2, oov 3, x 4, a 5
    assert raw.unscored == (2, 3)
    assert raw.ordered
    assert [rows.tolist() for rows in raw.natural] == [list(range(10)), [10, 11]]
    assert raw.x[[0, 7, 8, 9, 10, 11]].tolist() == [[1, 5, 4], [1, 5, 4], [1, 3, 0], [1, 5, 3], [1, 3, 0], [1, 3, 5]]
    assert raw.y[[0, 7, 8, 9, 10, 11]].tolist() == [[5, 4, 2], [5, 4, 3], [3, 2, -1], [5, 3, 2], [3, 2, -1], [3, 5, 2]]


def test_files_are_read_packed_or_not(tmp_path):
    text = "naïve\nJürgen\n"
    (tmp_path / "plain.txt").write_bytes(text.encode())
    (tmp_path / "packed.txt.xz").write_bytes(lzma.compress(text.encode()))
    assert read_text(tmp_path / "plain.txt") == read_text(tmp_path / "packed.txt.xz") == text


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("a.xz", lzma.compress(b"a" * 1000)[:-20], ["damaged", "fetch it again"]),
        ("a.xz", b"<html>", ["damaged"]),
        ("a.xz", lzma.compress(b"[\n\n\xff]"), ["row 3", "0xff", "UTF-8"]),
        ("a.json", b"[1,\n2,\n3", ["row 3", "not JSON"]),
        ("a.json", b"", ["row 1", "not JSON"]),
        ("a.json", b"[" * 200_000, ["not JSON"]),
    ],
)
def test_files_that_cannot_be_read_are_named_with_the_row(name, raw, words, tmp_path):
    (tmp_path / name).write_bytes(raw)
    with user_error(str(tmp_path / name), *words):
        read_json(tmp_path / name)


def test_json_is_read(tmp_path):
    (tmp_path / "a.json.xz").write_bytes(lzma.compress(json.dumps([{"a": "ä"}]).encode()))
    assert read_json(tmp_path / "a.json.xz") == [{"a": "ä"}]
