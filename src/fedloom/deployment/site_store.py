"""The private state of a site's client, on the site's own disk."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from fedloom.core.tree import Tree, tree_map
from fedloom.engine.client_store import ClientStore, InitialRows
from fedloom.storage.files import Damaged, make_folder, read_tensors, remove_temporary, tensors_writer, write_file
from fedloom.storage.trees import named, rebuilt

NAME = re.compile(r"round-(\d{8,})\.safetensors")
NEVER = -1  # instead of a round, for a client that has not trained


class StateMissing(Exception):
    """The site does not have the state that the server asks it to start from; says why."""


class SiteStore(ClientStore):
    """One client's private state, with a file for each round after which the server may want it again.

    A round is trained from the state after an earlier one, its base, which the server names, and its result is kept
    beside that. So a round whose reply was lost can be repeated, and a server that goes back to a checkpoint finds the
    state that belongs to it. `saved` is the oldest one to which the server may go back.
    """

    def __init__(self, initial_rows: InitialRows, clients: int, *, client: int, folder: Path, run: str) -> None:
        super().__init__(initial_rows, clients)
        self.client, self.folder, self.run = client, folder, run
        self.rows: Tree = initial_rows(np.array([client]))
        make_folder(folder)
        remove_temporary(folder)

    def open(self, base: int) -> None:
        """Return to the state after a round, or, for `NEVER`, to that of a client that has not trained."""
        like = self.initial_rows(np.array([self.client]))
        self.rows, self.trained[self.client] = like, 0
        if base == NEVER:
            return
        path = self._path(base)
        if not path.exists():
            found = self.rounds()
            has = f"the newest state here is of round {max(found) + 1}" if found else "there is no state here"
            raise StateMissing(
                f"the server continues after round {base + 1}, but {has}; restore {self.folder} from a copy, or start "
                "a new run"
            )
        try:
            tensors, note = read_tensors(path)
            if (note.get("run"), note.get("client")) != (self.run, self.client):
                raise Damaged(f"{path.name} belongs to another run or client")
            self.rows, trained = rebuilt(like, tensors), int(note["trained"])
        except (Damaged, KeyError, ValueError) as error:
            raise StateMissing(f"{path} cannot be used: {error}; restore it from a copy, or start a new run") from None
        self.trained[self.client] = trained

    def save(self, t: int, kept: Collection[int]) -> None:
        """Keep the state as that after round t; of earlier ones only those in `kept` stay. Later ones stay, too: an
        order may come late, when the server has gone on. Durable on return."""
        note = {"run": self.run, "client": self.client, "round": t, "trained": int(self.trained[self.client])}
        write_file(self._path(t), tensors_writer(named(self.rows), note))
        for old in self.rounds() - set(kept):
            if old < t:
                self._path(old).unlink()

    def rounds(self) -> set[int]:
        """Rounds after which the state is here."""
        matches = (NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return {int(match[1]) for match in matches if match}

    def _path(self, t: int) -> Path:
        return self.folder / f"round-{t:08d}.safetensors"

    def _read(self, ids: np.ndarray) -> Tree:
        assert ids.tolist() == [self.client]
        return tree_map(lambda v: v.clone(), self.rows)

    def _write(self, ids: np.ndarray, rows: Tree) -> None:
        assert ids.tolist() == [self.client]
        self.rows = tree_map(lambda v: v.to(self.device, copy=True), rows)

    def _changed(self) -> tuple[np.ndarray, Tree]:
        raise NotImplementedError("A site writes its state with `save`.")

    def committed(self) -> None:
        pass
