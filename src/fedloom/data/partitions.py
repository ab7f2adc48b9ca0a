"""Ways to divide a pool of samples among clients, as index lists. All draws come from the `partition` stream."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.registry import Registry
from fedloom.core.settings import setting

log = logging.getLogger("fedloom")
ATTEMPTS = 100
Lists = list[np.ndarray]

PARTITIONS: Registry[type[Partition]] = Registry("partition", "fedloom.data")


@dataclass(frozen=True)
class Partition(ABC):
    """A scheme by name; its fields are its parameters."""

    name: ClassVar[str]
    about: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        PARTITIONS.add(cls.name, cls)

    @abstractmethod
    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        """Disjoint index lists, one per client."""

    def assign_both(
        self, train: np.ndarray, test: np.ndarray, classes: int, clients: int, draw: np.random.Generator
    ) -> tuple[Lists, Lists]:
        """Training and test samples divided separately, each client getting the same classes of both."""
        raise UserError(f"Partition '{self.name}' cannot divide training and test data separately; use pool=merged.")


@dataclass(frozen=True)
class Iid(Partition):
    name = "iid"
    about = "every client gets a random share of equal size"

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        return np.array_split(draw.permutation(len(labels)), clients)


@dataclass(frozen=True)
class Natural(Partition):
    name = "natural"
    about = "the data set itself says whose a sample is"

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        raise UserError("This data set does not say whose a sample is; choose a partition such as dirichlet_class.")


@dataclass(frozen=True)
class KClassEqual(Partition):
    """PLGU: exactly k classes and the same number of samples for every client."""

    name = "kclass_equal"
    about = "k classes per client, equal sizes (PLGU)"

    k: int = setting(3, "classes per client", low=1)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        return self._deal(labels, self._holders(classes, clients, draw), clients, draw)

    def assign_both(
        self, train: np.ndarray, test: np.ndarray, classes: int, clients: int, draw: np.random.Generator
    ) -> tuple[Lists, Lists]:
        holders = self._holders(classes, clients, draw)
        return self._deal(train, holders, clients, draw), self._deal(test, holders, clients, draw)

    def _holders(self, classes: int, clients: int, draw: np.random.Generator) -> list[list[int]]:
        """For every class the clients that hold it, in ascending order."""
        _check_k(self.k, classes)
        base, rest = divmod(clients * self.k, classes)
        slots = np.array([base + (c < rest) for c in range(classes)])
        for _ in range(ATTEMPTS):
            free, holders = slots.copy(), [[] for _ in range(classes)]  # type: ignore[var-annotated]
            if all(_take_classes(self.k, free, holders, i, draw) for i in range(clients)):
                return holders
        raise UserError(
            f"{clients} clients cannot each get {self.k} different classes of {classes}; change k or clients."
        )

    def _deal(self, labels: np.ndarray, holders: list[list[int]], clients: int, draw: np.random.Generator) -> Lists:
        got: list[Lists] = [[] for _ in range(clients)]
        for c, owners in enumerate(holders):
            rows = draw.permutation(np.flatnonzero(labels == c))
            if len(rows) < len(owners):
                raise _too_few(c, len(rows), len(owners))
            for i, piece in zip(owners, np.array_split(rows, len(owners)) if owners else [], strict=True):
                got[i].append(piece)
        return _joined(got)


def _take_classes(k: int, free: np.ndarray, holders: list[list[int]], i: int, draw: np.random.Generator) -> bool:
    """Give client i k different classes, each time one of those with the most free slots."""
    mine: list[int] = []
    for _ in range(k):
        open_ = free.copy()
        open_[mine] = 0
        if open_.max() == 0:
            return False
        c = int(draw.choice(np.flatnonzero(open_ == open_.max())))
        free[c] -= 1
        holders[c].append(i)
        mine.append(c)
    return True


@dataclass(frozen=True)
class Pathological(Partition):
    """GPFL: clients in blocks share the same k classes, sizes are random."""

    name = "pathological"
    about = "k classes per client in blocks, random sizes (GPFL)"

    k: int = setting(2, "classes per client", low=1)
    batch: int = setting(10, "B, batch size that the least share of a class is computed from", low=1)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        _check_k(self.k, classes)
        least = min(self.batch / (1 - 0.75), len(labels) / clients / 2)
        left = np.full(clients, self.k)
        got: list[Lists] = [[] for _ in range(clients)]
        for c in range(classes):
            rows = np.flatnonzero(labels == c)
            chosen = np.flatnonzero(left > 0)[: -(-clients * self.k // classes)]  # ceil(N/U*k)
            if len(chosen) == 0:
                break
            even = len(rows) / len(chosen)
            low, high = math.ceil(max(even / 10, least / classes)), math.ceil(even)  # whole numbers in [max(..), even)
            if len(rows) == 0 or (len(chosen) > 1 and high <= low):
                raise _too_few(c, len(rows), len(chosen))
            sizes = draw.integers(low, high, len(chosen) - 1)
            for i, piece in zip(chosen, np.split(rows, np.cumsum(sizes)), strict=True):
                got[i].append(piece)
            left[chosen] -= 1
        return _joined(got)


@dataclass(frozen=True)
class DirichletClass(Partition):
    """GPFL's practical setting and PAGE's default: every class is cut by Dirichlet proportions."""

    name = "dirichlet_class"
    about = "each class cut by Dirichlet(beta) proportions (GPFL, PAGE)"

    beta: float = setting(0.1, "concentration; smaller is more skewed", above=0)
    min_size: int = setting(40, "samples every client has at least; half an equal share where that is less", low=1)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        n = len(labels)
        least = max(2, math.floor(min(self.min_size, n / clients / 2)))
        if n < clients * least:
            raise UserError(f"{n} samples are too few for {clients} clients of at least {least}; use fewer clients.")
        by_class = [np.flatnonzero(labels == c) for c in range(classes)]
        for _ in range(ATTEMPTS):
            rows, sizes = self._attempt(by_class, n, clients, draw)
            if sizes.sum(0).min() >= least:
                return _cut(rows, sizes)
        return _repair(_cut(rows, sizes), least, draw)

    def _attempt(self, by_class: Lists, n: int, clients: int, draw: np.random.Generator) -> tuple[Lists, np.ndarray]:
        """Each class in random order, and how many of it each client gets."""
        shuffled: Lists = []
        sizes = np.zeros((len(by_class), clients), dtype=np.int64)
        for c, rows in enumerate(by_class):
            shuffled.append(draw.permutation(rows))
            free = sizes.sum(0) < n / clients
            share = draw.dirichlet(np.full(clients, self.beta)) * free
            if len(rows) == 0:  # and perhaps everyone is full
                continue
            if not share.sum() > 0:  # all the mass fell on clients that are full
                share = free.astype(float)
            cuts = np.floor(np.cumsum(share / share.sum()) * len(rows) + 1e-9).astype(np.int64)
            cuts[-1] = len(rows)
            sizes[c] = np.diff(cuts, prepend=0)
        return shuffled, sizes


def _cut(by_class: Lists, sizes: np.ndarray) -> Lists:
    """Every class cut into pieces of the given sizes, one for each client."""
    pieces = [np.split(rows, np.cumsum(each)[:-1]) for rows, each in zip(by_class, sizes, strict=True)]
    return _joined([list(mine) for mine in zip(*pieces, strict=True)])


def _repair(lists: Lists, least: int, draw: np.random.Generator) -> Lists:
    """Fill clients that are too small, one random sample at a time, from whoever has most at that moment."""
    sizes = np.array([len(rows) for rows in lists])
    moved = 0
    for i in range(len(lists)):
        while sizes[i] < least:
            giver = int(sizes.argmax())
            at = int(draw.integers(sizes[giver]))
            lists[i] = np.append(lists[i], lists[giver][at])
            lists[giver] = np.delete(lists[giver], at)
            sizes[i], sizes[giver], moved = sizes[i] + 1, sizes[giver] - 1, moved + 1
    log.info("Partition: %d samples moved so that every client has at least %d.", moved, least)
    return lists


@dataclass(frozen=True)
class DirichletClientLognormal(Partition):
    """PAGE's quantity skew: log-normal sizes, a Dirichlet class prior per client."""

    name = "dirichlet_client_lognormal"
    about = "log-normal sizes, Dirichlet(delta) classes per client (PAGE)"

    delta: float = setting(0.3, "concentration of a client's class prior", above=0)
    sigma: float = setting(0.3, "spread of the logarithm of the sizes", above=0, high=10)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        n = len(labels)
        if n < 2 * clients:
            raise UserError(f"{n} samples are too few for {clients} clients; use fewer clients.")
        weight = draw.lognormal(np.log(n / clients), self.sigma, clients)
        room = np.floor(weight / weight.sum() * n).astype(np.int64)
        room[0] += n - room.sum()
        prior = draw.dirichlet(np.full(classes, self.delta), clients)
        stock = [draw.permutation(np.flatnonzero(labels == c)).tolist() for c in range(classes)]
        got: list[list[int]] = [[] for _ in range(clients)]
        open_clients = np.flatnonzero(room).tolist()
        table = _class_table(prior, stock)
        dice = draw.random((n, 2)).tolist()
        for who, what in dice:
            at = int(who * len(open_clients))
            i = open_clients[at]
            c = min(int(np.searchsorted(table[i], what, side="right")), classes - 1)
            got[i].append(stock[c].pop())
            if len(got[i]) == room[i]:
                open_clients[at] = open_clients[-1]
                open_clients.pop()
            if not stock[c]:
                table = _class_table(prior, stock)
        return [np.array(rows, dtype=np.int64) for rows in got]


def _class_table(prior: np.ndarray, stock: list[list[int]]) -> np.ndarray:
    """Cumulated class probabilities per client over the classes that still have samples; uniform where none is left
    that the client would want."""
    there = np.array([bool(rows) for rows in stock], dtype=float)
    if not there.any():
        return prior
    kept = prior * there
    mass = kept.sum(1, keepdims=True)
    kept = np.where(mass > 0, kept / np.where(mass > 0, mass, 1), there / there.sum())
    table = np.cumsum(kept, axis=1)
    return np.where(table >= table[:, -1:], 1.0, table)  # rounding must not leave a gap at the end


@dataclass(frozen=True)
class KClassRatio(Partition):
    """pFedKT, after pFedHN: k classes per client, shares of a class drawn at random."""

    name = "kclass_ratio"
    about = "k classes per client, random shares of each (pFedKT)"

    k: int = setting(2, "classes per client", low=1)
    low: float = setting(0.4, "least share before normalisation", above=0)
    high: float = setting(0.6, "greatest share before normalisation", above=0)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        _check_k(self.k, classes)
        if self.high < self.low:
            raise UserError(f"high must be at least low, not {self.high:g} < {self.low:g}.")
        slots = self.k * clients // classes + 1
        ratios = draw.uniform(self.low, self.high, (classes, slots))
        ratios = ratios / ratios.sum(1, keepdims=True)
        for _ in range(ATTEMPTS):
            free, holders = np.full(classes, slots), [[] for _ in range(classes)]  # type: ignore[var-annotated]
            if all(_take_classes(self.k, free, holders, i, draw) for i in range(clients)):
                break
        else:
            raise UserError(
                f"{clients} clients cannot each get {self.k} different classes of {classes}; change k or clients."
            )
        got: list[Lists] = [[] for _ in range(clients)]
        for c, owners in enumerate(holders):
            rows, start = draw.permutation(np.flatnonzero(labels == c)), 0
            for turn, i in enumerate(owners):
                size = int(ratios[c, slots - 1 - turn] * len(rows))  # the last ratio of the list is used first
                if size == 0:
                    raise _too_few(c, len(rows), len(owners))
                got[i].append(rows[start : start + size])
                start += size
        return _joined(got)


def _check_k(k: int, classes: int) -> None:
    if k > classes:
        raise UserError(f"k must be at most the number of classes, {classes}, not {k}.")


def _too_few(c: int, samples: int, holders: int) -> UserError:
    return UserError(f"Class {c} has {samples} samples, too few for {holders} clients; use fewer clients.")


def _joined(got: list[Lists]) -> Lists:
    return [np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64) for rows in got]
