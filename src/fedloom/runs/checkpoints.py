"""Checkpoints: everything a run needs to go on, one file each, the two newest kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedloom.core.files import Damaged, read_tensors, sync_folder, write_tensors
from fedloom.core.tree import tree_map
from fedloom.engines.rounds import Rounds, State
from fedloom.engines.store import Snapshot
from fedloom.runs.trees import named, rebuilt

log = logging.getLogger("fedloom")

KEPT = 2
OVERHEAD = 0.05  # of a run's time, for checkpoints
AT_LEAST = 10.0  # seconds between two, however cheap they are
WAITING_BYTES = 256 << 20  # rows of a store on disk that wait in memory


class Checkpoints:
    def __init__(self, folder: Path, every: int | None = None) -> None:
        """`every` is a number of rounds; without it, as often as `OVERHEAD` allows."""
        self.folder, self.every = folder, every
        self.last = time.perf_counter()
        self.cost = 0.0

    def due(self, rounds: Rounds) -> bool:
        if self.every is not None:
            return rounds.t % self.every == 0
        if rounds.store.waiting_bytes() > WAITING_BYTES:
            return True
        return time.perf_counter() - self.last >= max(AT_LEAST, self.cost / OVERHEAD)

    def save(self, rounds: Rounds, first: Callable[[], None] = lambda: None) -> None:
        """`first` writes what must not be behind the checkpoint (what is ahead of it is cut off on resume)."""
        start = time.perf_counter()
        first()
        state = rounds.state()
        tensors = named(
            {
                "server": state.server,
                "post": {split: torch.from_numpy(found) for split, found in state.post.items()},
                "store": state.store._asdict(),
            }
        )
        write_tensors(self._path(state.t), tensors, {"round": state.t})
        rounds.store.committed()
        for old in self.found()[KEPT:]:
            old.unlink()
        self.last = time.perf_counter()
        self.cost = self.last - start
        log.info("Checkpoint of round %d, %.2f s.", state.t, self.cost)

    def restore(self, rounds: Rounds, up_to: int | None = None) -> None:
        """Bring a run that is about to start to the newest state that is undamaged; without one it starts anew. With
        `up_to`, a state that is newer than this round is given up, if there is one that is not."""
        self.last = time.perf_counter()
        found = self.found() if up_to is None else self._given_up(up_to)
        for path, before in zip(found, [*found[1:], None], strict=False):
            try:
                rounds.restore(_load(path, rounds))
                return
            except Damaged as error:
                instead = "the one before it is used" if before else "the run starts from the beginning"
                log.warning("Checkpoint %s is damaged (%s); %s.", path.name, error, instead)
                path.replace(path.with_suffix(".damaged"))
                sync_folder(self.folder)

    def found(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("round-*.safetensors"), reverse=True)

    def newest(self) -> int:
        """The round of the newest, 0 if there is none."""
        return max(map(_round, self.found()), default=0)

    def _given_up(self, up_to: int) -> list[Path]:
        found = self.found()
        old = [path for path in found if _round(path) <= up_to]
        if not old and len(found) == KEPT:
            return found
        for path in found[: len(found) - len(old)]:
            path.unlink()
        return old

    def _path(self, t: int) -> Path:
        return self.folder / f"round-{t:08d}.safetensors"


def _round(path: Path) -> int:
    return int(path.stem.removeprefix("round-"))


def _load(path: Path, rounds: Rounds) -> State:
    tensors, note = read_tensors(path)
    store = rounds.store
    like = Snapshot(torch.zeros(0), torch.zeros(0), tree_map(lambda v: v.cpu(), store.like))
    saved = Snapshot(**rebuilt(like._asdict(), tensors, "store"))
    if len(saved.trained) != len(store):
        raise Damaged(f"it has {len(saved.trained)} clients instead of {len(store)}")
    return State(
        t=int(note["round"]),
        server=rebuilt(rounds.server, tensors, "server"),
        post={k.removeprefix("post/"): v.numpy() for k, v in tensors.items() if k.startswith("post/")},
        store=saved,
    )
