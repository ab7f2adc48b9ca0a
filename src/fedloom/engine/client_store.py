"""Private state of all clients, one row each; a round touches the rows of its cohort only.

A client that has never trained has no row yet: `initial_rows` computes it when it is read. So a store takes no time to
set up, and only clients that took part take memory.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tokenize
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError, oserror_as_user_error
from fedloom.core.tree import Tree, leaves, size_bytes, tree_flatten, tree_map, tree_unflatten
from fedloom.device.memory import available_memory
from fedloom.device.transfer import to_device
from fedloom.storage.files import make_folder

log = logging.getLogger("fedloom")

CLIENTS = "clients.npy"
CHECKSUMS = "checksums.npy"  # until format 4
COPIED_BYTES = 256 << 20  # at once, from one store to another
InitialRows = Callable[[np.ndarray], Tree]  # rows of the given clients before they have trained, stacked


class Snapshot(NamedTuple):
    """What a checkpoint must contain of a store."""

    ids: Tensor  # the clients of the rows: those that the store does not keep in files of its own
    trained: Tensor  # their numbers of participations
    rows: Tree
    digest: Tensor  # of the participations of all clients (`participation_digest`); empty if it is not known


class ClientStore(ABC):
    """Rows of private state by client id."""

    def __init__(self, initial_rows: InitialRows, clients: int) -> None:
        self.initial_rows = initial_rows
        self.like: Tree = tree_map(lambda v: v[0], initial_rows(np.zeros(1, np.int64)))  # one row, for its structure
        self.device = next((v.device for v in leaves(self.like)), torch.device("cpu"))
        self.trained = np.zeros(clients, dtype=np.int64)  # number of participations
        self.written: set[int] | None = None  # clients that have trained since the last copy; None if not known

    def __len__(self) -> int:
        return len(self.trained)

    def read(self, ids: np.ndarray) -> Tree:
        """Rows of the given clients, stacked."""
        known = self.trained[ids] > 0
        if known.all() or not leaves(self.like):  # this method has no private state
            return self._read(ids)
        rows = self.initial_rows(ids)
        if known.any():
            at = to_device(self.device, np.flatnonzero(known))
            rows = tree_map(lambda a, b: a.index_copy(0, at, b), rows, self._read(ids[known]))
        return rows

    def everyone(self) -> Tree:
        """Rows of all clients, stacked."""
        return self.read(np.arange(len(self)))

    def write(self, ids: np.ndarray, rows: Tree) -> None:
        """Replace the rows of clients that have just trained."""
        self._write(ids, rows)
        self.trained[ids] += 1
        if self.written is not None:
            self.written.update(ids.tolist())

    def put(self, ids: np.ndarray, rows: Tree) -> None:
        """Replace rows of clients whose number of participations, `trained`, is set already. They are durable when this
        returns, if the store is on disk."""
        self._write(ids, rows)
        self.committed()
        self.committed()

    def copy_from(self, other: ClientStore) -> None:
        """Take over the state of another store, which has no other copy; only rows that have changed since the last
        time are copied."""
        if other.written is None:
            changed = np.flatnonzero(self.trained != other.trained)
        else:
            changed = np.array(sorted(other.written), np.int64)
        other.written = set()
        self.trained[changed] = other.trained[changed]
        most = max(1, COPIED_BYTES // max(1, size_bytes(self.like)))
        for start in range(0, len(changed), most):
            ids = changed[start : start + most]
            self._write(ids, other._read(ids))

    def snapshot(self) -> Snapshot:
        """What a checkpoint must contain of this store now."""
        ids, rows = self._changed()
        return Snapshot(torch.from_numpy(ids), torch.from_numpy(self.trained[ids]), rows, self._digest())

    def restore(self, saved: Snapshot) -> None:
        """Return to the state of a snapshot."""
        ids, trained = saved.ids.numpy(), saved.trained.numpy()
        if len(trained) != len(ids):  # until format 4, snapshots had the participations of all clients
            self._keep_trained(trained)
            trained = trained[ids]
        self.trained[:] = self._kept_trained()
        self.trained[ids] = trained
        self.written = None
        self._write(ids, saved.rows)

    def clear(self) -> None:
        """Forget everything: nobody has trained."""
        self.trained[:] = 0
        self.written = None

    def _digest(self) -> Tensor:
        return torch.zeros(0, dtype=torch.int64)

    def _kept_trained(self) -> np.ndarray | int:
        """Participations of all clients as the store has them in files of its own."""
        return 0

    def _keep_trained(self, trained: np.ndarray) -> None:  # noqa: B027, a store in memory has no files
        """Write participations of all clients to these files, if the store has any."""

    @abstractmethod
    def committed(self) -> None:
        """Called when the last snapshot is durably on disk."""

    def waiting_bytes(self) -> int:
        """Memory that is taken by rows which wait for the next checkpoint."""
        return 0

    @abstractmethod
    def _read(self, ids: np.ndarray) -> Tree:
        """Rows of clients that have trained."""

    @abstractmethod
    def _write(self, ids: np.ndarray, rows: Tree) -> None: ...

    @abstractmethod
    def _changed(self) -> tuple[np.ndarray, Tree]:
        """The clients whose rows a snapshot must contain, and a copy of these rows."""


def make_store(
    initial_rows: InitialRows,
    clients: int,
    kind: str = "memory",
    folder: Path | None = None,
    unverified: bool = False,
) -> ClientStore:
    """A store of the given kind: memory, disk (in `folder`), or auto, which uses memory as long as all rows take less
    than half of what is free. `unverified` is for rows on disk that have no checksums."""
    like = initial_rows(np.zeros(1, np.int64))
    size = clients * size_bytes(like)
    device = next((v.device for v in leaves(like)), torch.device("cpu"))
    free = available_memory(device)
    if kind == "disk" or (kind == "auto" and size > free / 2 and folder is not None):
        assert folder is not None
        log.info("Private state of clients is kept on disk: %.1f GB for %d of them.", size / 1e9, clients)
        return DiskStore(initial_rows, clients, folder, unverified)
    if size > free:
        raise UserError(
            f"The private state of {clients} clients takes {size / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; "
            "keep it on disk: store=disk, and a folder for the run (--out)."
        )
    return MemoryStore(initial_rows, clients)


class MemoryStore(ClientStore):
    """Rows on the device. A snapshot contains all of them."""

    def __init__(self, initial_rows: InitialRows, clients: int) -> None:
        super().__init__(initial_rows, clients)
        self.rows: Tree = tree_map(lambda v: _zeros(v, clients), self.like)

    def _read(self, ids: np.ndarray) -> Tree:
        at = to_device(self.device, ids)
        return tree_map(lambda v: v[at], self.rows)

    def _write(self, ids: np.ndarray, rows: Tree) -> None:
        at = to_device(self.device, ids)
        tree_map(lambda mine, new: mine.index_copy_(0, at, new.to(self.device)), self.rows, rows)

    def _changed(self) -> tuple[np.ndarray, Tree]:
        ids = np.flatnonzero(self.trained)
        return ids, self._read(ids)

    def committed(self) -> None:
        pass


def _zeros(like: Tensor, clients: int) -> Tensor:
    """Zeros for all clients. In main memory they take no memory until they are written, page by page: without huge
    pages, of which the row of one client would take 2 MB, and the system would have to fill them with zeros first."""
    shape, size = (clients, *like.shape), clients * like.nbytes
    if like.device.type != "cpu" or not size:
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # on Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, like.numpy().dtype).reshape(shape))


class DiskStore(ClientStore):
    """Rows in memory-mapped files, behind a journal.

    Changed rows stay in memory until a checkpoint contains them; they are written to the files only when the *next*
    checkpoint is on disk, too. A snapshot contains all rows that may differ from the files, so each of the two newest
    checkpoints is complete, whatever state a kill leaves the files in:

        files <= checkpoint k-1 | journal of k: changed in (k-2, k] | journal of k+1: changed in (k-1, k+1]

    Rows are in the order in which clients have first trained, so that those of a cohort are written in one piece. The
    file `clients.npy` says of every row whose it is, how often that client has trained, and a checksum of both and the
    values, which is verified when the row is read. So a checkpoint has nothing of the other clients but a digest of all
    participations, which is verified when the store is restored.
    """

    def __init__(self, initial_rows: InitialRows, clients: int, folder: Path, unverified: bool = False) -> None:
        """`unverified`: rows that were written by a version without checksums get theirs when a run is resumed."""
        super().__init__(initial_rows, clients)
        make_folder(folder)
        self.folder, self.unverified = folder, unverified
        self.by_client = unverified or (folder / CHECKSUMS).exists()  # until format 4, rows were in the order of ids
        known = (folder / CLIENTS).exists()
        flat, self.spec = tree_flatten(self.like)
        self.files = [_RowFile(folder / f"{j:03d}.npy", clients, v) for j, v in enumerate(flat)]
        self.clients = _ClientsFile(folder / CLIENTS, clients)
        if self.by_client and not known and (folder / CHECKSUMS).exists():
            checksums = _RowFile(folder / CHECKSUMS, clients, torch.zeros((), dtype=torch.int64)).rows
            everyone = np.flatnonzero(checksums)
            self.clients.write(everyone, everyone, np.zeros_like(everyone), checksums[everyone])
        self.place = np.arange(clients) if self.by_client else self.clients.places()  # of rows in files; -1: none yet
        self.used = int(self.place.max(initial=-1)) + 1
        self.pending, self.current = _Journal(clients, flat), _Journal(clients, flat)
        self.digest = 0

    def write(self, ids: np.ndarray, rows: Tree) -> None:
        before = participation_digest(ids, self.trained[ids])
        super().write(ids, rows)
        self.digest += participation_digest(ids, self.trained[ids]) - before

    def put(self, ids: np.ndarray, rows: Tree) -> None:
        super().put(ids, rows)
        self._count_everybody()

    def copy_from(self, other: ClientStore) -> None:
        super().copy_from(other)
        if isinstance(other, DiskStore):
            self.digest = other.digest
        else:
            self._count_everybody()

    def _read(self, ids: np.ndarray) -> Tree:
        at = np.maximum(self.place[ids], 0)
        rows = [file.read(at) for file in self.files]
        self._verify(ids, rows)
        found = [torch.from_numpy(v) for v in rows]
        for journal in (self.pending, self.current):
            journal.overlay(ids, found)
        return tree_unflatten([to_device(self.device, v) for v in found], self.spec)

    def _verify(self, ids: np.ndarray, rows: list[np.ndarray]) -> None:
        """Raise UserError unless the rows of clients that are in no journal are as they were written."""
        in_files = (self.pending.place[ids] < 0) & (self.current.place[ids] < 0)
        if not rows or not in_files.any():
            return
        some = ids if in_files.all() else ids[in_files]
        checksums = _row_checksums(
            some, self.trained[some], rows if len(some) == len(ids) else [v[in_files] for v in rows]
        )
        at = self.place[some]
        wrong = (at < 0) | (self.clients.checksums(np.maximum(at, 0)) != checksums)
        if wrong.any():
            raise UserError(
                f"{self.folder} is damaged: the private state of client {some[wrong][0]} is missing or was changed; "
                "restore the folder, or start a new run."
            )

    def restore(self, saved: Snapshot) -> None:
        super().restore(saved)
        self._count_everybody()
        if len(saved.digest) and self._digest().tolist() != saved.digest.tolist():
            raise UserError(
                f"{self.folder} is damaged: its files do not belong to the checkpoint; restore the folder, or start a "
                "new run."
            )
        if self.unverified and self.files:
            ids = np.flatnonzero(self.trained)
            ids = ids[self.clients.checksums(ids) == 0]
            trained = self.trained[ids]
            checksums = _row_checksums(ids, trained, [file.read(ids) for file in self.files])
            self.clients.write(ids, ids, trained, checksums)

    def _count_everybody(self) -> None:
        self.digest = participation_digest(np.arange(len(self)), self.trained)

    def _digest(self) -> Tensor:
        return torch.tensor([self.digest % 2**63])

    def clear(self) -> None:
        super().clear()
        self.digest = 0
        self.pending.clear()
        self.current.clear()
        (self.folder / CLIENTS).unlink()
        (self.folder / CHECKSUMS).unlink(missing_ok=True)
        self.clients = _ClientsFile(self.folder / CLIENTS, len(self))
        self.by_client, self.place, self.used = False, np.full(len(self), -1), 0

    def _kept_trained(self) -> np.ndarray | int:
        return self.clients.trained()

    def _keep_trained(self, trained: np.ndarray) -> None:
        ids = np.flatnonzero(trained)
        ids = ids[np.argsort(self._places(ids))]
        self.clients.write(self.place[ids], ids, trained[ids], self.clients.checksums(self.place[ids]))

    def _places(self, ids: np.ndarray) -> np.ndarray:
        """Places of clients in the files; those that have none get the next ones."""
        new = ids[self.place[ids] < 0]
        self.place[new] = self.used + np.arange(len(new))
        self.used += len(new)
        return self.place[ids]

    def _write(self, ids: np.ndarray, rows: Tree) -> None:
        self.current.write(ids, [v.cpu() for v in leaves(rows)])

    def _changed(self) -> tuple[np.ndarray, Tree]:
        ids = np.union1d(self.pending.ids(), self.current.ids())
        rows = [torch.empty(len(ids), *v.shape, dtype=v.dtype) for v in leaves(self.like)]
        for journal in (self.pending, self.current):
            journal.overlay(ids, rows)
        return ids, tree_unflatten(rows, self.spec)

    def committed(self) -> None:
        ids = self.pending.ids()
        ids = ids[np.argsort(self._places(ids))]
        at, trained, rows = self.place[ids], self.trained[ids], [v.numpy() for v in self.pending.read(ids)]
        for file, mine in zip(self.files, rows, strict=True):
            file.write(at, mine)
        self.clients.write(at, ids, trained, _row_checksums(ids, trained, rows))
        self.pending.clear()
        self.pending, self.current = self.current, self.pending

    def waiting_bytes(self) -> int:
        return self.current.used * size_bytes(self.like)


class _RowFile:
    """A (clients, ...) array in a sparse .npy file: disk space is taken only by rows that were written."""

    def __init__(self, path: Path, clients: int, like: Tensor) -> None:
        row = like.cpu().numpy()
        if not path.exists():
            new = path.with_suffix(".new")
            with oserror_as_user_error(path):
                np.lib.format.open_memmap(new, mode="w+", dtype=row.dtype, shape=(clients, *row.shape))
                os.replace(new, path)  # atomic: a kill before leaves no file that looks complete
        try:
            self.rows = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError, SyntaxError, tokenize.TokenError):  # NumPy reads the header as Python
            raise UserError(f"{path} is damaged; start a new run.") from None
        if self.rows.shape != (clients, *row.shape) or self.rows.dtype != row.dtype:
            raise UserError(f"{path} holds the clients of another run; start a new one.")
        self.path, self.width = path, row.nbytes
        self.offset = path.stat().st_size - clients * row.nbytes

    def read(self, ids: np.ndarray) -> np.ndarray:
        return self.rows[ids]

    def write(self, at: np.ndarray, rows: np.ndarray) -> None:
        """Replace the rows at ascending places. Writes through the file, not the memory map: a full disk is then an
        OSError, not a killed process."""
        rows = np.ascontiguousarray(rows)
        starts = np.flatnonzero(np.diff(at, prepend=-2) != 1).tolist()  # of rows that are next to each other
        with oserror_as_user_error(self.path), self.path.open("r+b", buffering=0) as file:
            for start, end in pairwise([*starts, len(at)]):
                content = rows[start:end].tobytes()
                if os.pwrite(file.fileno(), content, self.offset + int(at[start]) * self.width) != len(content):
                    raise OSError(errno.ENOSPC, "written in part only")
            os.fsync(file.fileno())


class _ClientsFile:
    """Whose the rows of a store on disk are: client + 1 (0: nobody's), participations and checksum of every row."""

    def __init__(self, path: Path, clients: int) -> None:
        self.file = _RowFile(path, clients, torch.zeros(3, dtype=torch.int64))

    def write(self, at: np.ndarray, ids: np.ndarray, trained: np.ndarray, checksums: np.ndarray) -> None:
        """Describe the rows at ascending places."""
        self.file.write(at, np.stack([ids + 1, trained, checksums], 1))

    def checksums(self, at: np.ndarray) -> np.ndarray:
        """The checksums of the rows at these places."""
        return self.file.read(at)[:, 2]

    def places(self) -> np.ndarray:
        """The place of every client, -1 for those without a row."""
        found = np.full(len(self.file.rows), -1)
        at, ids, _ = self._known()
        found[ids] = at
        return found

    def trained(self) -> np.ndarray:
        """Participations of all clients."""
        found = np.zeros(len(self.file.rows), np.int64)
        _, ids, trained = self._known()
        found[ids] = trained
        return found

    def _known(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Place, client and participations of every row that is somebody's."""
        owners = np.array(self.file.rows[:, 0])
        at = np.flatnonzero((owners > 0) & (owners <= len(owners)))
        return at, owners[at] - 1, self.file.rows[at, 1]


def participation_digest(ids: np.ndarray, trained: np.ndarray) -> int:
    """A number that depends on who has trained how often. That of all clients is the sum of those of each, so that it
    can be kept up to date without looking at all of them."""
    with np.errstate(over="ignore"):
        mixed = (ids.astype(np.uint64) << np.uint64(32)) + trained.astype(np.uint64)
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # of the generator SplitMix64
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(factor)
        return int((mixed ^ (mixed >> np.uint64(31)))[trained > 0].sum(dtype=np.uint64))


def _row_checksums(ids: np.ndarray, trained: np.ndarray, rows: list[np.ndarray]) -> np.ndarray:
    """The checksums of rows; none is 0, which marks a client without a row."""
    parts = [np.stack([ids, trained], 1), *(v.reshape(len(ids), -1) for v in rows if v.size)]
    data = np.concatenate([np.ascontiguousarray(v).view(np.uint8) for v in parts], 1)
    return np.fromiter((zlib.crc32(row) | 1 << 32 for row in data), np.int64, len(ids))


class _Journal:
    """Rows of some clients in memory, growing as more are written."""

    def __init__(self, clients: int, like: list[Tensor]) -> None:
        self.place = np.full(clients, -1, dtype=np.int64)  # position of a client's row; -1 if it has none here
        self.rows = [torch.empty(0, *v.shape, dtype=v.dtype) for v in like]
        self.used = 0
        self.members: list[np.ndarray] = []  # the clients that have a row here, by position

    def ids(self) -> np.ndarray:
        """The clients that have a row here, in ascending order."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *self.members]))

    def read(self, ids: np.ndarray) -> list[Tensor]:
        at = torch.from_numpy(self.place[ids])
        return [v[at] for v in self.rows]

    def overlay(self, ids: np.ndarray, rows: list[Tensor]) -> None:
        """Replace those of the given rows that are here."""
        here = self.place[ids] >= 0
        at = torch.from_numpy(np.flatnonzero(here))
        for mine, new in zip(rows, self.read(ids[here]), strict=True):
            mine[at] = new

    def write(self, ids: np.ndarray, rows: list[Tensor]) -> None:
        new = ids[self.place[ids] < 0]
        self.place[new] = self.used + np.arange(len(new))
        self.used += len(new)
        self.members.append(new)
        if self.rows and self.used > len(self.rows[0]):
            capacity = max(self.used, 2 * len(self.rows[0]))
            self.rows = [torch.cat([v, v.new_empty(capacity - len(v), *v.shape[1:])]) for v in self.rows]
        at = torch.from_numpy(self.place[ids])
        for mine, row in zip(self.rows, rows, strict=True):
            mine[at] = row

    def clear(self) -> None:
        self.place[self.ids()] = -1
        self.rows = [v.new_empty(0, *v.shape[1:]) for v in self.rows]
        self.used, self.members = 0, []
