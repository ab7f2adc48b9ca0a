"""AG News: titles and first sentences of news on four topics."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.preprocessing import Vocabulary
from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.text import basic_english, encode_tokens, read_text, text_preprocessing, vocabulary

SPECIALS = ("<pad>", "<cls>", "<unk>", "<eos>")
PAD, CLS, UNK, _ = range(4)
TOPICS = 4
SIZES = {"train": 120_000, "test": 7_600}  # texts, as published
LAYOUTS = {
    "csv": ("train.csv", "test.csv"),
    "parquet": ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
    "data/parquet": ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
    "tsv": ("train.tsv.xz", "test.tsv.xz"),
}
URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"
Texts = tuple[list[int], list[str]]  # topics, texts


@dataclass(frozen=True)
class AgNews(Dataset):
    """Classification of news by topic, as sequences of token ids."""

    name = "agnews"
    about = "AG News, topic of a title and its first sentences"
    size = "127,600 texts, 4 classes"
    model = "fasttext"
    aliases = ("ag_news",)
    class_names = ("World", "Sports", "Business", "Sci/Tech")
    licence = "for research and other non-commercial use (A. Gulli's AG corpus)"
    sources = tuple(Source(file, (f"{URL}/{file}",)) for file in LAYOUTS["csv"])
    usual = {"lr": 1.0, "rounds": 100, "partition.beta": 1.0}

    length: int = setting(200, "tokens of a text; longer ones are cut", low=2)
    words: int | None = setting(None, "the vocabulary's most frequent words; others are unknown [all]", low=1)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read and tokenise all texts; the published test texts are the official test set."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        parts = [READERS[layout.rpartition("/")[2]](folder / file) for file in LAYOUTS[layout]]
        tokens = [basic_english(text) for _, texts in parts for text in texts]
        words = tuple(vocabulary(tokens, SPECIALS, self.words))
        saved = Vocabulary(words, "basic_english", self.length, unknown=UNK, padding=PAD, start=CLS)
        train, test = (len(topics) for topics, _ in parts)
        return RawDataset(
            encode_tokens(tokens, saved),
            np.array(parts[0][0] + parts[1][0], dtype=np.int64),
            classes=TOPICS,
            official_test=np.arange(train, train + test),
            vocab=len(words),
            preprocessing=text_preprocessing(saved, self.class_names),
            notes=_note("training", train, SIZES["train"]) + _note("test", test, SIZES["test"]),
        )


def _note(kind: str, count: int, published: int) -> tuple[str, ...]:
    """A note for the user if there are not as many texts as were published."""
    if count == published:
        return ()
    return (f"AG News here has {count:,} of {published:,} {kind} texts, so results are not those of the papers",)


def _read_csv(path: Path) -> Texts:
    """The published files: rows of topic (from 1), title and description, which are joined as torchtext does."""
    topics, texts = [], []
    reader = csv.reader(read_text(path).splitlines(keepends=True), strict=True)
    try:
        for row in reader:
            if len(row) < 2:
                raise UserError(
                    f"{path}, row {reader.line_num}: a topic and a text are needed, but it has {len(row)} cells."
                )
            topics.append(_topic(row[0], 1, path, reader.line_num))
            texts.append(" ".join(row[1:]))
    except csv.Error as error:
        raise UserError(f"{path}, row {reader.line_num}: this is not CSV ({error}).") from None
    return _check_not_empty(topics, path), texts


def _read_tsv(path: Path) -> Texts:
    """Lines of topic (from 0), a tab and the text."""
    topics, texts = [], []
    for number, row in enumerate(read_text(path).removesuffix("\n").split("\n"), 1):
        topic, tab, text = row.partition("\t")
        if not tab:
            raise UserError(f"{path}, row {number}: there is no tab between topic and text.")
        topics.append(_topic(topic, 0, path, number))
        texts.append(text)
    return _check_not_empty(topics, path), texts


def _read_parquet(path: Path) -> Texts:
    """A table with the columns `text` and `label` (from 0)."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path, columns=["text", "label"])
        columns = table["label"].to_pylist(), table["text"].to_pylist()
    except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"{path} is no Parquet file with the columns text and label ({reason}).") from None
    for number, text in enumerate(columns[1], 1):
        if not isinstance(text, str):
            raise UserError(f"{path}, row {number}: '{text}' is no text.")
    return _check_not_empty([_topic(topic, 0, path, n) for n, topic in enumerate(columns[0], 1)], path), columns[1]


def _topic(value: str | int | None, first: int, path: Path, row: int) -> int:
    """The class of a topic, given the number of the first one."""
    known = {str(first + c): c for c in range(TOPICS)}
    if str(value) not in known:
        raise UserError(
            f"{path}, row {row}: the topic must be {first} to {first + TOPICS - 1}, not '{str(value)[:20]}'."
        )
    return known[str(value)]


def _check_not_empty(topics: list[int], path: Path) -> list[int]:
    if not topics:
        raise UserError(f"{path} has no texts; fetch it again.")
    return topics


READERS: dict[str, Callable[[Path], Texts]] = {"csv": _read_csv, "parquet": _read_parquet, "tsv": _read_tsv}
