"""Stack Exchange: the next word in posts and comments on six small sites. A client is a user."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset, locate
from fedloom.data.sets.stackoverflow import too_few
from fedloom.data.text import basic_english, next_words, read_json, sentences

FILE = "users.json.xz"
LAYOUTS = {"users": (FILE,)}


@dataclass(frozen=True)
class StackExchange(Dataset):
    """Prediction of the next word at every position of a sentence; a client is a user."""

    name = "stackexchange"
    about = "posts on six Stack Exchange sites, next word, a client for each user"
    size = "1,394 users with 1.48 million words; 2,004 classes"
    model = "lstm_so"
    partition = "natural"
    licence = "CC BY-SA 3.0 and 4.0 (Stack Exchange)"
    usual = {"lr": 3.0, "rounds": 50, "clip": 1.0, "split": (0.8, 0.1, 0.1), "clients": 50}

    words: int = setting(2_000, "words of the vocabulary, besides pad, bos, eos, oov", low=1)
    length: int = setting(20, "words of a sentence; longer ones are cut", low=2)
    min_sentences: int = setting(100, "only users with at least so many sentences are clients", low=2)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read the sentences of the first `clients` users that have enough of them."""
        folder, _ = locate(type(self), data_dir, LAYOUTS)
        users = []
        for messages in _users(folder / FILE):
            tokens = [words for text in messages for sentence in sentences(text) if (words := basic_english(sentence))]
            if len(tokens) >= self.min_sentences:
                users.append(tokens)
            if len(users) == clients:
                return next_words(users, self.words, self.length, "basic_english")
        raise too_few(len(users), clients, self.min_sentences)


def _users(path: Path) -> list[list[str]]:
    """The messages of every user, in time order; users are sorted by number, then site, so that the sites mix."""
    entries = read_json(path)
    if not isinstance(entries, list):
        raise UserError(f"{path} must hold a list of users, not a {type(entries).__name__}.")
    users = [(_messages(path, number, user), user) for number, user in enumerate(entries, 1)]
    users.sort(key=lambda pair: (pair[1]["user"], pair[1]["site"]))
    return [messages for messages, _ in users]


def _messages(path: Path, number: int, user: Any) -> list[str]:
    """The texts of one user, in time order, after checking the entry with this number."""
    where = f"{path}, entry {number}"
    types = {"messages": list, "site": str}
    if not isinstance(user, dict) or not all(isinstance(user.get(key), kind) for key, kind in types.items()):
        raise UserError(f"{where}: a user has 'site', 'user' and a list of 'messages'.")
    if not isinstance(user.get("user"), int):
        raise UserError(f"{where}: 'user' must be a whole number, not '{user.get('user')}'.")
    if not user["messages"]:
        raise UserError(f"{where}: user {user['user']} of {user['site']} has no messages.")
    for k, message in enumerate(user["messages"], 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("date", "text")):
            raise UserError(f"{where}, message {k}: a message has a 'date' and a 'text'.")
    return [message["text"] for message in sorted(user["messages"], key=lambda message: message["date"])]
