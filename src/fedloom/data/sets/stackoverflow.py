"""Stack Overflow: the next word in sentences, as TensorFlow Federated publishes them. A client is a user."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import readable, require
from fedloom.data.limits import check_inflated
from fedloom.data.text import next_words

FILE = "stackoverflow_train.h5"
LAYOUTS = {"tff": (FILE,)}
TEXT = 64  # bytes of a text in memory at least


@dataclass(frozen=True)
class StackOverflow(Dataset):
    """Prediction of the next word at every position of a sentence; a client is a user."""

    name = "stackoverflow"
    about = "Stack Overflow, next word, a client for each user"
    size = "342,477 users; 10,004 classes"
    model = "lstm_so"
    partition = "natural"
    licence = "CC BY-SA 3.0 (Stack Exchange)"
    sources = (
        Source(
            "stackoverflow.tar.bz2",
            (
                "https://storage.googleapis.com/tff-datasets-public/stackoverflow.tar.bz2",
                "https://fedml.s3-us-west-1.amazonaws.com/stackoverflow.tar.bz2",
            ),
            unpack=True,
        ),
    )
    usual = {"lr": 3.0, "rounds": 100, "clip": 1.0, "split": (0.8, 0.1, 0.1), "clients": 100}

    words: int = setting(10_000, "words of the vocabulary, besides pad, bos, eos, oov", low=1)
    length: int = setting(20, "words of a sentence; longer ones are cut", low=2)
    min_sentences: int = setting(100, "only users with at least so many sentences are clients", low=2)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read the sentences of the first `clients` users that have enough of them."""
        folder, _ = locate(type(self), data_dir, LAYOUTS)
        return next_words(_users(folder / FILE, clients, self.min_sentences), self.words, self.length, "spaces")


def _users(path: Path, clients: int, min_sentences: int) -> list[list[list[str]]]:
    """The tokenised sentences, in time order, of the first users by name that have at least `min_sentences`."""
    try:
        import h5py
    except ImportError:
        raise UserError(f"{path} is an HDF5 file; install its reader with pip install 'fedloom[hdf5]'.") from None
    users: list[list[list[str]]] = []
    size = 0
    with readable(path, "TFF's file"), h5py.File(path, "r") as file:
        for user in sorted(file["examples"]):
            if len(file["examples"][user]["tokens"]) >= min_sentences:
                dates, texts = (file["examples"][user][name] for name in ("creation_date", "tokens"))
                require(dates.shape == texts.shape == (len(texts),), f"user {user} has no list of texts and dates")
                size += sum(
                    max(c.size, math.prod(c.chunks or ())) * max(c.dtype.itemsize, TEXT) for c in (dates, texts)
                )
                check_inflated(path, size, path.stat().st_size, "fetch it again")
                order = np.argsort(dates.asstr()[:], kind="stable")
                users.append([text.split() for text in texts.asstr()[:][order]])
            if len(users) == clients:
                return users
    raise too_few(len(users), clients, min_sentences)


def too_few(users: int, clients: int, min_sentences: int) -> UserError:
    """The error if fewer users than clients have enough sentences."""
    return UserError(
        f"{users} users have at least {min_sentences} sentences, fewer than the {clients} clients; use fewer clients "
        "or a smaller min_sentences."
    )
