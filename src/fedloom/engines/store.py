"""Private state of all clients, a row each; a round touches the rows of its cohort only.

A client that has never trained has no row yet: it is what `fresh` makes of it. So a store takes no time to set up, and
only clients that took part take memory.
"""

from __future__ import annotations

import errno
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError, told
from fedloom.core.memory import free_memory
from fedloom.core.transfer import onto
from fedloom.core.tree import Tree, leaves, size_bytes, tree_flatten, tree_map, tree_unflatten

log = logging.getLogger("fedloom")

Fresh = Callable[[np.ndarray], Tree]  # initial rows of the given clients, stacked


class Snapshot(NamedTuple):
    """What a checkpoint has to hold of a store."""

    trained: Tensor  # participations of every client
    ids: Tensor  # whose rows these are
    rows: Tree


class Store(ABC):
    def __init__(self, fresh: Fresh, clients: int) -> None:
        self.fresh = fresh
        self.like: Tree = tree_map(lambda v: v[0], fresh(np.zeros(1, np.int64)))  # one row
        self.device = next((v.device for v in leaves(self.like)), torch.device("cpu"))
        self.trained = np.zeros(clients, dtype=np.int64)  # participations so far

    def __len__(self) -> int:
        return len(self.trained)

    def read(self, ids: np.ndarray) -> Tree:
        known = self.trained[ids] > 0
        if known.all() or not leaves(self.like):  # a method that keeps nothing
            return self._read(ids)
        rows = self.fresh(ids)
        if known.any():
            at = onto(self.device, np.flatnonzero(known))
            rows = tree_map(lambda a, b: a.index_copy(0, at, b), rows, self._read(ids[known]))
        return rows

    def everyone(self) -> Tree:
        return self.read(np.arange(len(self)))

    def write(self, ids: np.ndarray, rows: Tree) -> None:
        self._write(ids, rows)
        self.trained[ids] += 1

    def snapshot(self) -> Snapshot:
        ids, rows = self._changed()
        return Snapshot(torch.from_numpy(self.trained.copy()), torch.from_numpy(ids), rows)

    def restore(self, saved: Snapshot) -> None:
        self.trained = saved.trained.numpy().copy()
        self._write(saved.ids.numpy(), saved.rows)

    @abstractmethod
    def committed(self) -> None:
        """The last snapshot is on disk for good."""

    def waiting_bytes(self) -> int:
        """Memory taken by rows that wait for the next checkpoint."""
        return 0

    @abstractmethod
    def _read(self, ids: np.ndarray) -> Tree:
        """Rows of clients that have trained."""

    @abstractmethod
    def _write(self, ids: np.ndarray, rows: Tree) -> None: ...

    @abstractmethod
    def _changed(self) -> tuple[np.ndarray, Tree]:
        """The clients whose rows a snapshot must hold, and a copy of these rows."""


def make_store(fresh: Fresh, clients: int, kind: str = "memory", folder: Path | None = None) -> Store:
    """`auto` keeps rows in memory as long as they take less than half of what is free."""
    like = fresh(np.zeros(1, np.int64))
    size = clients * size_bytes(like)
    device = next((v.device for v in leaves(like)), torch.device("cpu"))
    free = free_memory(device)
    if kind == "disk" or (kind == "auto" and size > free / 2 and folder is not None):
        assert folder is not None
        log.info("Private state of clients is kept on disk: %.1f GB for %d of them.", size / 1e9, clients)
        return DiskStore(fresh, clients, folder)
    if size > free:
        raise UserError(
            f"The private state of {clients} clients takes {size / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; "
            "keep it on disk: store=disk, and a folder for the run (--out)."
        )
    return MemoryStore(fresh, clients)


class MemoryStore(Store):
    """Rows on the device. A snapshot holds all of them."""

    def __init__(self, fresh: Fresh, clients: int) -> None:
        super().__init__(fresh, clients)
        self.rows: Tree = tree_map(lambda v: _room(v, clients), self.like)

    def _read(self, ids: np.ndarray) -> Tree:
        at = onto(self.device, ids)
        return tree_map(lambda v: v[at], self.rows)

    def _write(self, ids: np.ndarray, rows: Tree) -> None:
        at = onto(self.device, ids)
        tree_map(lambda mine, new: mine.index_copy_(0, at, new.to(self.device)), self.rows, rows)

    def _changed(self) -> tuple[np.ndarray, Tree]:
        ids = np.flatnonzero(self.trained)
        return ids, self._read(ids)

    def committed(self) -> None:
        pass


def _room(like: Tensor, clients: int) -> Tensor:
    """Zeros; in main memory those of numpy, which take none before they are written to."""
    if like.device.type == "cpu":
        return torch.from_numpy(np.zeros((clients, *like.shape), like.numpy().dtype))
    return like.new_zeros((clients, *like.shape))


class DiskStore(Store):
    """Rows in memory-mapped files, behind a journal.

    Rows that change stay in memory until a checkpoint holds them; only when the *next* checkpoint is on disk too are
    they written to the files. A snapshot holds all rows that may differ from the files, so each of the two newest
    checkpoints is complete whatever state a kill leaves the files in:

        files <= checkpoint k-1 | journal of k: changed in (k-2, k] | journal of k+1: changed in (k-1, k+1]
    """

    def __init__(self, fresh: Fresh, clients: int, folder: Path) -> None:
        super().__init__(fresh, clients)
        with told(folder):
            folder.mkdir(parents=True, exist_ok=True)
        flat, self.spec = tree_flatten(self.like)
        self.files = [_RowFile(folder / f"{j:03d}.npy", clients, v) for j, v in enumerate(flat)]
        self.pending, self.current = _Overlay(clients, flat), _Overlay(clients, flat)

    def _read(self, ids: np.ndarray) -> Tree:
        found = [torch.from_numpy(file.read(ids)) for file in self.files]
        for overlay in (self.pending, self.current):
            overlay.lay_over(ids, found)
        return tree_unflatten([onto(self.device, v) for v in found], self.spec)

    def _write(self, ids: np.ndarray, rows: Tree) -> None:
        self.current.write(ids, [v.cpu() for v in leaves(rows)])

    def _changed(self) -> tuple[np.ndarray, Tree]:
        ids = np.union1d(self.pending.ids(), self.current.ids())
        rows = [torch.empty(len(ids), *v.shape, dtype=v.dtype) for v in leaves(self.like)]
        for overlay in (self.pending, self.current):
            overlay.lay_over(ids, rows)
        return ids, tree_unflatten(rows, self.spec)

    def committed(self) -> None:
        ids = self.pending.ids()
        for file, rows in zip(self.files, self.pending.read(ids), strict=True):
            file.write(ids, rows.numpy())
        self.pending.clear()
        self.pending, self.current = self.current, self.pending

    def waiting_bytes(self) -> int:
        return self.current.used * size_bytes(self.like)


class _RowFile:
    """A (clients, ...) array in a .npy file. Holes stay holes: space is taken by rows that were written."""

    def __init__(self, path: Path, clients: int, like: Tensor) -> None:
        row = like.cpu().numpy()
        if not path.exists():
            new = path.with_suffix(".new")
            with told(path):
                np.lib.format.open_memmap(new, mode="w+", dtype=row.dtype, shape=(clients, *row.shape))
                os.replace(new, path)  # a kill before leaves nothing that looks complete
        try:
            self.rows = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError):
            raise UserError(f"{path} is damaged; start a new run.") from None
        if self.rows.shape != (clients, *row.shape) or self.rows.dtype != row.dtype:
            raise UserError(f"{path} holds the clients of another run; start a new one.")
        self.path, self.width = path, row.nbytes
        self.offset = path.stat().st_size - clients * row.nbytes

    def read(self, ids: np.ndarray) -> np.ndarray:
        return self.rows[ids]

    def write(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Through the file, not the map: a full disk is then an error that can be told, not a dead process."""
        with told(self.path), self.path.open("r+b", buffering=0) as file:
            for i, row in zip(ids.tolist(), rows, strict=True):
                if os.pwrite(file.fileno(), row.tobytes(), self.offset + i * self.width) != self.width:
                    raise OSError(errno.ENOSPC, "written in part only")
            os.fsync(file.fileno())


class _Overlay:
    """Rows of some clients in memory, growing as more are written."""

    def __init__(self, clients: int, like: list[Tensor]) -> None:
        self.place = np.full(clients, -1, dtype=np.int64)  # where a client's row is, if it is here
        self.rows = [torch.empty(0, *v.shape, dtype=v.dtype) for v in like]
        self.used = 0

    def ids(self) -> np.ndarray:
        return np.flatnonzero(self.place >= 0)

    def read(self, ids: np.ndarray) -> list[Tensor]:
        at = torch.from_numpy(self.place[ids])
        return [v[at] for v in self.rows]

    def lay_over(self, ids: np.ndarray, rows: list[Tensor]) -> None:
        here = self.place[ids] >= 0
        at = torch.from_numpy(np.flatnonzero(here))
        for mine, new in zip(rows, self.read(ids[here]), strict=True):
            mine[at] = new

    def write(self, ids: np.ndarray, rows: list[Tensor]) -> None:
        new = ids[self.place[ids] < 0]
        self.place[new] = self.used + np.arange(len(new))
        self.used += len(new)
        if self.rows and self.used > len(self.rows[0]):
            room = max(self.used, 2 * len(self.rows[0]))
            self.rows = [torch.cat([v, v.new_empty(room - len(v), *v.shape[1:])]) for v in self.rows]
        at = torch.from_numpy(self.place[ids])
        for mine, row in zip(self.rows, rows, strict=True):
            mine[at] = row

    def clear(self) -> None:
        self.place[:] = -1
        self.rows = [v.new_empty(0, *v.shape[1:]) for v in self.rows]
        self.used = 0
