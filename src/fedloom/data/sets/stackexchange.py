"""Stack Exchange: the next word in the posts and comments of users of six small sites."""

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
        folder, _ = locate(type(self), data_dir, LAYOUTS)
        found = []
        for messages in _users(folder / FILE):
            said = [words for text in messages for one in sentences(text) if (words := basic_english(one))]
            if len(said) >= self.min_sentences:
                found.append(said)
            if len(found) == clients:
                return next_words(found, self.words, self.length)
        raise too_few(len(found), clients, self.min_sentences)


def _users(path: Path) -> list[list[str]]:
    """What each user wrote, in time order; users by number, then site, so that the sites mix."""
    users = read_json(path)
    if not isinstance(users, list):
        raise UserError(f"{path} must hold a list of users, not a {type(users).__name__}.")
    found = [(_checked(path, number, one), one) for number, one in enumerate(users, 1)]
    found.sort(key=lambda pair: (pair[1]["user"], pair[1]["site"]))
    return [messages for messages, _ in found]


def _checked(path: Path, number: int, one: Any) -> list[str]:
    where = f"{path}, entry {number}"
    if not isinstance(one, dict) or not isinstance(one.get("messages"), list) or not isinstance(one.get("site"), str):
        raise UserError(f"{where}: a user has 'site', 'user' and a list of 'messages'.")
    if not isinstance(one.get("user"), int):
        raise UserError(f"{where}: 'user' must be a whole number, not '{one.get('user')}'.")
    if not one["messages"]:
        raise UserError(f"{where}: user {one['user']} of {one['site']} has no messages.")
    for k, message in enumerate(one["messages"], 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("date", "text")):
            raise UserError(f"{where}, message {k}: a message has a 'date' and a 'text'.")
    return [message["text"] for message in sorted(one["messages"], key=lambda message: message["date"])]
