"""Shakespeare: the next character in what a role says. A client is a speaking role."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.keys import rng, stream
from fedloom.core.preprocessing import Vocabulary
from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.text import characters, read_json, text_preprocessing, windows

# LEAF's character set; other characters are encoded as its last one
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
UNKNOWN = len(CHARACTERS) - 1
CODES = np.full(128, UNKNOWN, dtype=np.uint8)
CODES[[ord(c) for c in CHARACTERS]] = np.arange(len(CHARACTERS))
LENGTH = 80
TRAIN_SHARE = 0.8  # of a role's windows are for training in LEAF; the server's windows come after them
ORDER_SEED = 0  # of the order in which roles are taken
LAYOUTS = {
    "xml": ("hamlet.xml", "macbeth.xml"),
    "shaks200/xml": ("shaks200/hamlet.xml", "shaks200/macbeth.xml"),
    "leaf": ("all_data*.json",),
    "roles": ("roles.json.xz",),
}
Windows = tuple[np.ndarray, np.ndarray]  # encoded windows of characters, the character after each
Roles = dict[str, Windows]  # by name


@dataclass(frozen=True)
class Shakespeare(Dataset):
    """Prediction of the next character in Shakespeare's plays; a client is a speaking role."""

    name = "shakespeare"
    about = "Shakespeare's plays, next character, a client for each speaking role"
    size = "7,000 windows per role, one in ten taken; 80 classes"
    model = "lstm_shakes"
    partition = "natural"
    licence = "public domain (the XML edition's markup: J. Bosak 1999, free to pass on unaltered)"
    sources = (
        Source(
            "shaks200.zip",
            (
                "https://www.ibiblio.org/bosak/xml/eg/shaks200.zip",
                "https://metalab.unc.edu/bosak/xml/eg/shaks200.zip",
            ),
            unpack=True,
        ),
    )
    usual = {"lr": 1.0, "rounds": 50}
    has_server_data = True

    windows: int | None = setting(7000, "consecutive windows of a role that are divided [none: all]", low=2)
    server_windows: int = setting(1000, "windows behind them that go to the server", low=0)
    min_windows: int = setting(8000, "only roles with more windows than this are clients", low=0)
    stride: int = setting(10, "only every n-th window is taken; 1 as in PAGE", low=1)
    length: int = setting(LENGTH, "characters of a window", low=1)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read the windows of the first `clients` roles that have enough, in an order shuffled with a fixed seed."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        inner, _, kind = layout.rpartition("/")
        roles = READERS[kind](folder / inner, self.length)
        names = sorted(name for name, (_, y) in roles.items() if self._has_enough(len(y)))
        if len(names) < clients:
            raise UserError(
                f"{len(names)} of {len(roles)} roles have enough windows, fewer than the {clients} clients; use fewer "
                "clients, or smaller windows, server_windows or min_windows."
            )
        random.Random(ORDER_SEED).shuffle(names)
        local: list[Windows] = []
        server: list[Windows] = []
        for i, name in enumerate(names[:clients]):
            draw = rng("partition", seed, stream("shakespeare"), i)
            first, second = self._parts(len(roles[name][1]))
            for selected, part, size in ((local, first, self.windows), (server, second, self.server_windows)):
                size = len(part) if size is None else size
                start = part[int(draw.integers(len(part) - size + 1))] if size else 0
                x, y = roles[name]
                selected.append((x[start : start + size : self.stride], y[start : start + size : self.stride]))
        ends = np.cumsum([0, *(len(y) for _, y in local)])
        x, y = (np.concatenate(values).astype(np.int64) for values in zip(*local, *server, strict=True))
        words = tuple(CHARACTERS)
        return RawDataset(
            x,
            y,
            classes=len(CHARACTERS),
            natural=tuple(np.arange(a, b) for a, b in pairwise(ends)),
            server=np.arange(ends[-1], len(y)) if self.server_windows else None,
            ordered=True,
            vocab=len(words),
            preprocessing=text_preprocessing(Vocabulary(words, "characters", self.length, unknown=UNKNOWN), words),
            notes=self._notes(layout),
        )

    def _parts(self, n: int) -> tuple[range, range]:
        """Of n windows of a role, those for the client and those for the server; they have no characters in common."""
        if not self.server_windows:
            return range(n), range(0)
        train = int(TRAIN_SHARE * n)
        return range(train), range(min(train + self.length - 1, n), n)

    def _has_enough(self, n: int) -> bool:
        """Whether a role with n windows has enough for the settings."""
        local, server = self._parts(n)
        enough = len(local) > (self.windows or 1) and (len(server) > self.server_windows or not self.server_windows)
        return enough and n > self.min_windows

    def _notes(self, layout: str) -> tuple[str, ...]:
        """Notes for the user: what is different from the papers."""
        notes = []
        if layout != "leaf":
            notes.append("This is another edition of Shakespeare than LEAF's, so results are not those of the papers")
        if self.stride > 1:
            notes.append(f"One in {self.stride} windows of characters is taken; stride=1 takes all, as the papers do")
        return tuple(notes)


def _encode(text: str) -> np.ndarray:
    """The index of every character of a text."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return CODES[np.minimum(points, 127)]  # 127 is not in the character set


def _windows_of_speeches(speeches: dict[str, list[str]], length: int) -> Roles:
    """Windows over all speeches of every role."""
    texts = {name: "".join(characters("\n".join(of_role))) for name, of_role in speeches.items()}
    return {name: windows(_encode(text), length) for name, text in texts.items()}


def _read_roles(folder: Path, length: int) -> Roles:
    """Read FedLoom's compact layout, `roles.json.xz`: a list of {"play", "role", "speeches"}."""
    path, speeches = folder / "roles.json.xz", dict[str, list[str]]()
    content = read_json(path)
    if not isinstance(content, list):
        raise UserError(f"{path} must hold a list of roles, not a {type(content).__name__}.")
    for number, entry in enumerate(content, 1):
        texts = entry.get("speeches") if isinstance(entry, dict) else None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in (*texts, entry.get("role"))):
            raise UserError(f"{path}, entry {number}: a role has 'play', 'role' and a list of 'speeches'.")
        if not texts:
            raise UserError(f"{path}, entry {number}: role '{entry['role']}' says nothing.")
        speeches.setdefault(f"{entry.get('play')}: {entry['role']}", []).extend(texts)
    return _windows_of_speeches(speeches, length)


def _read_xml(folder: Path, length: int) -> Roles:
    """Read Bosak's edition: an XML file per play, which has speeches with their speakers and lines."""
    speeches = dict[str, list[str]]()
    for path in sorted(folder.glob("*.xml")):
        try:
            play = ElementTree.parse(path).getroot()
        except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{path} is damaged or no XML ({reason}); fetch it again.") from None
        title = play.findtext("TITLE", path.stem)
        for speech in play.iter("SPEECH"):
            lines = [text for line in speech.iter("LINE") if (text := _spoken(line))]
            if lines:  # a speech of several speakers is given to the first
                name = f"{title}: {(speech.findtext('SPEAKER') or '').strip()}"
                speeches.setdefault(name, []).append("\n".join(lines))
    return _windows_of_speeches(speeches, length)


def _spoken(line: ElementTree.Element) -> str:
    """The text of a line without stage directions."""
    return ((line.text or "") + "".join(part.tail or "" for part in line)).strip()


def _read_leaf(folder: Path, length: int) -> Roles:
    """Read LEAF's output: {"users", ..., "user_data": {user: {"x": [80 characters, ...], "y": [the next]}}}."""
    if length > LENGTH:
        raise UserError(f"LEAF's windows have {LENGTH} characters; length={length} is more.")
    roles: Roles = {}
    for path in sorted(folder.glob("all_data*.json")):
        content = read_json(path)
        users = content.get("user_data") if isinstance(content, dict) else None
        if not isinstance(users, dict):
            raise UserError(f"{path} has no 'user_data', as LEAF's output has.")
        for name, data in users.items():
            if name in roles:
                raise UserError(f"{path}: user '{name}' is in another file too; leave LEAF's all_data.json only.")
            x, y = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not x:
                raise UserError(f"{path}, user '{name}': 'x' and 'y' must be lists of the same length, not empty.")
            for values, size in ((x, LENGTH), (y, 1)):
                for row, value in enumerate(values, 1):
                    if not isinstance(value, str) or len(value) != size:
                        raise UserError(f"{path}, user '{name}', row {row}: {size} characters are needed.")
            codes = _encode("".join(x)).reshape(len(x), LENGTH)
            roles[name] = codes[:, LENGTH - length :], _encode("".join(y))
    return roles


READERS: dict[str, Callable[[Path, int], Roles]] = {"xml": _read_xml, "leaf": _read_leaf, "roles": _read_roles}
