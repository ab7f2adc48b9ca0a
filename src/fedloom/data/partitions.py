"""Partitions: ways to divide samples among clients. Random numbers come from the stream `partition`."""

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
Lists = list[np.ndarray]  # of sample indices, one per client or class

PARTITIONS: Registry[type[Partition]] = Registry("partition", "fedloom.data")


@dataclass(frozen=True)
class Partition(ABC):
    """A way to divide samples among clients. Subclasses have their parameters as fields."""

    name: ClassVar[str]
    about: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        PARTITIONS.add(cls.name, cls)

    @abstractmethod
    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        """Indices of every client's samples; a sample goes to one client at most.

        Args:
            labels: classes of all samples.
            classes: number of classes.
            clients: number of clients.
            draw: random number generator.
        """

    def assign_both(
        self, train: np.ndarray, test: np.ndarray, classes: int, clients: int, draw: np.random.Generator
    ) -> tuple[Lists, Lists]:
        """Divide training and test samples, given their labels, so that a client gets the same classes of both."""
        raise UserError(f"Partition '{self.name}' cannot divide training and test data separately; use pool=merged.")


@dataclass(frozen=True)
class Iid(Partition):
    """Independent and identically distributed clients."""

    name = "iid"
    about = "every client gets a random share of equal size"

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        """Shuffle all samples and cut them into parts of equal size."""
        return np.array_split(draw.permutation(len(labels)), clients)


@dataclass(frozen=True)
class Natural(Partition):
    """The clients of the data set itself (`RawDataset.natural`), such as writers or users."""

    name = "natural"
    about = "the data set's own clients (writers, users, ...)"

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        """Raise a UserError: this is called for data sets without natural clients only."""
        raise UserError("This data set has no clients of its own; choose a partition such as dirichlet_class.")


@dataclass(frozen=True)
class KClassEqual(Partition):
    """PLGU's partition: every client has exactly k classes; a class is divided equally among its clients."""

    name = "kclass_equal"
    about = "k classes per client, equal sizes (PLGU)"

    k: int = setting(3, "classes per client", low=1)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        """Draw k classes for every client, and divide every class equally among its clients."""
        return self._distribute(labels, self._draw(classes, clients, draw), clients, draw)

    def assign_both(
        self, train: np.ndarray, test: np.ndarray, classes: int, clients: int, draw: np.random.Generator
    ) -> tuple[Lists, Lists]:
        """Draw k classes for every client once, and divide training and test samples of every class equally."""
        clients_of = self._draw(classes, clients, draw)
        return self._distribute(train, clients_of, clients, draw), self._distribute(test, clients_of, clients, draw)

    def _draw(self, classes: int, clients: int, draw: np.random.Generator) -> list[list[int]]:
        """The clients of every class, in ascending order; classes have the same number of clients, or one more."""
        _check_k(self.k, classes)
        base, rest = divmod(clients * self.k, classes)
        return _clients_of_classes(self.k, np.array([base + (c < rest) for c in range(classes)]), clients, draw)

    def _distribute(
        self, labels: np.ndarray, clients_of: list[list[int]], clients: int, draw: np.random.Generator
    ) -> Lists:
        """Divide every class equally among its clients."""
        pieces: list[Lists] = [[] for _ in range(clients)]
        for c, receivers in enumerate(clients_of):
            rows = draw.permutation(np.flatnonzero(labels == c))
            if len(rows) < len(receivers):
                raise _too_few(c, len(rows), len(receivers))
            for i, part in zip(receivers, np.array_split(rows, len(receivers)) if receivers else [], strict=True):
                pieces[i].append(part)
        return _concatenate(pieces)


def _clients_of_classes(k: int, slots: np.ndarray, clients: int, draw: np.random.Generator) -> list[list[int]]:
    """The clients of every class, in ascending order. A client has k different classes; class c has at most slots[c]
    clients."""
    for _ in range(ATTEMPTS):
        free, clients_of = slots.copy(), [[] for _ in slots]  # type: ignore[var-annotated]
        if all(_draw_classes(k, free, clients_of, i, draw) for i in range(clients)):
            return clients_of
    raise UserError(f"{clients} clients cannot each get {k} different classes of {len(slots)}; change k or clients.")


def _draw_classes(k: int, free: np.ndarray, clients_of: list[list[int]], i: int, draw: np.random.Generator) -> bool:
    """Give client i k different classes, one after another, each drawn from those with the most free slots. False if
    there are not enough. Changes `free` and `clients_of`."""
    taken: list[int] = []
    for _ in range(k):
        available = free.copy()
        available[taken] = 0
        if available.max() == 0:
            return False
        c = int(draw.choice(np.flatnonzero(available == available.max())))
        free[c] -= 1
        clients_of[c].append(i)
        taken.append(c)
    return True


@dataclass(frozen=True)
class Pathological(Partition):
    """GPFL's pathological setting: k classes per client, consecutive clients share them, and sizes are random."""

    name = "pathological"
    about = "k classes per client in blocks, random sizes (GPFL)"

    k: int = setting(2, "classes per client", low=1)
    batch: int = setting(10, "B, batch size that the least share of a class is computed from", low=1)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        """Divide one class after another among the next clients that have fewer than k classes."""
        _check_k(self.k, classes)
        min_size = min(self.batch / (1 - 0.75), len(labels) / clients / 2)
        classes_left = np.full(clients, self.k)
        pieces: list[Lists] = [[] for _ in range(clients)]
        for c in range(classes):
            rows = np.flatnonzero(labels == c)
            chosen = np.flatnonzero(classes_left > 0)[: -(-clients * self.k // classes)]  # ceil(N/U*k)
            if len(chosen) == 0:
                break
            share = len(rows) / len(chosen)
            low, high = math.ceil(max(share / 10, min_size / classes)), math.ceil(share)  # sizes are in [low, high)
            if len(rows) == 0 or (len(chosen) > 1 and high <= low):
                raise _too_few(c, len(rows), len(chosen))
            sizes = draw.integers(low, high, len(chosen) - 1)
            for i, part in zip(chosen, np.split(rows, np.cumsum(sizes)), strict=True):
                pieces[i].append(part)
            classes_left[chosen] -= 1
        return _concatenate(pieces)


@dataclass(frozen=True)
class DirichletClass(Partition):
    """GPFL's practical setting and PAGE's default: every class is divided in Dirichlet proportions."""

    name = "dirichlet_class"
    about = "each class cut by Dirichlet(beta) proportions (GPFL, PAGE)"

    beta: float = setting(0.1, "concentration; smaller is more skewed", above=0)
    min_size: int = setting(40, "samples every client has at least; half an equal share where that is less", low=1)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        """Draw proportions until every client has enough samples; after ATTEMPTS draws, samples are moved."""
        n = len(labels)
        min_size = max(2, math.floor(min(self.min_size, n / clients / 2)))
        if n < clients * min_size:
            raise UserError(f"{n} samples are too few for {clients} clients of at least {min_size}; use fewer clients.")
        by_class = [np.flatnonzero(labels == c) for c in range(classes)]
        for _ in range(ATTEMPTS):
            rows, sizes = self._attempt(by_class, n, clients, draw)
            if sizes.sum(0).min() >= min_size:
                return _cut(rows, sizes)
        return _repair(_cut(rows, sizes), min_size, draw)

    def _attempt(self, by_class: Lists, n: int, clients: int, draw: np.random.Generator) -> tuple[Lists, np.ndarray]:
        """The rows of every class in random order, and how many of them every client gets, [classes, clients]."""
        shuffled: Lists = []
        sizes = np.zeros((len(by_class), clients), dtype=np.int64)
        for c, rows in enumerate(by_class):
            shuffled.append(draw.permutation(rows))
            has_room = sizes.sum(0) < n / clients
            share = draw.dirichlet(np.full(clients, self.beta)) * has_room
            if len(rows) == 0:  # perhaps all clients have their equal share already
                continue
            if not share.sum() > 0:  # all the mass is on clients that have their equal share already
                share = has_room.astype(float)
            cuts = np.floor(np.cumsum(share / share.sum()) * len(rows) + 1e-9).astype(np.int64)
            cuts[-1] = len(rows)
            sizes[c] = np.diff(cuts, prepend=0)
        return shuffled, sizes


def _cut(by_class: Lists, sizes: np.ndarray) -> Lists:
    """Every client's samples, given the rows of every class and how many of them every client gets."""
    parts = [np.split(rows, np.cumsum(counts)[:-1]) for rows, counts in zip(by_class, sizes, strict=True)]
    return _concatenate([list(of_client) for of_client in zip(*parts, strict=True)])


def _repair(lists: Lists, min_size: int, draw: np.random.Generator) -> Lists:
    """Give clients with fewer than `min_size` samples random samples of the client that has most at that moment."""
    sizes = np.array([len(rows) for rows in lists])
    moved = 0
    for i in range(len(lists)):
        while sizes[i] < min_size:
            largest = int(sizes.argmax())
            at = int(draw.integers(sizes[largest]))
            lists[i] = np.append(lists[i], lists[largest][at])
            lists[largest] = np.delete(lists[largest], at)
            sizes[i], sizes[largest], moved = sizes[i] + 1, sizes[largest] - 1, moved + 1
    log.info("Partition: %d samples moved so that every client has at least %d.", moved, min_size)
    return lists


@dataclass(frozen=True)
class DirichletClientLognormal(Partition):
    """PAGE's quantity skew: log-normal sizes, and class probabilities per client from a Dirichlet distribution."""

    name = "dirichlet_client_lognormal"
    about = "log-normal sizes, Dirichlet(delta) classes per client (PAGE)"

    delta: float = setting(0.3, "concentration of a client's class prior", above=0)
    sigma: float = setting(0.3, "standard deviation of the logarithm of the sizes", above=0, high=10)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        """Give samples out one by one: to a random client that has room, of a class drawn from its probabilities."""
        n = len(labels)
        if n < 2 * clients:
            raise UserError(f"{n} samples are too few for {clients} clients; use fewer clients.")
        weight = draw.lognormal(np.log(n / clients), self.sigma, clients)
        capacity = np.floor(weight / weight.sum() * n).astype(np.int64)
        capacity[0] += n - capacity.sum()
        prior = draw.dirichlet(np.full(classes, self.delta), clients)
        left = [draw.permutation(np.flatnonzero(labels == c)).tolist() for c in range(classes)]
        assigned: list[list[int]] = [[] for _ in range(clients)]
        open_clients = np.flatnonzero(capacity).tolist()
        cumulative = _cumulative_probabilities(prior, left)
        draws = draw.random((n, 2)).tolist()
        for client_draw, class_draw in draws:
            at = int(client_draw * len(open_clients))
            i = open_clients[at]
            c = min(int(np.searchsorted(cumulative[i], class_draw, side="right")), classes - 1)
            assigned[i].append(left[c].pop())
            if len(assigned[i]) == capacity[i]:
                open_clients[at] = open_clients[-1]
                open_clients.pop()
            if not left[c]:
                cumulative = _cumulative_probabilities(prior, left)
        return [np.array(rows, dtype=np.int64) for rows in assigned]


def _cumulative_probabilities(prior: np.ndarray, left: list[list[int]]) -> np.ndarray:
    """Cumulative class probabilities of every client over the classes that still have samples, [clients, classes];
    uniform for a client whose classes are all used up."""
    available = np.array([bool(rows) for rows in left], dtype=float)
    if not available.any():
        return prior
    weights = prior * available
    mass = weights.sum(1, keepdims=True)
    weights = np.where(mass > 0, weights / np.where(mass > 0, mass, 1), available / available.sum())
    cumulative = np.cumsum(weights, axis=1)
    return np.where(cumulative >= cumulative[:, -1:], 1.0, cumulative)  # rounding must not leave a gap at the end


@dataclass(frozen=True)
class KClassRatio(Partition):
    """pFedKT's partition, after pFedHN's: k classes per client, and random shares of a class."""

    name = "kclass_ratio"
    about = "k classes per client, random shares of each (pFedKT)"

    k: int = setting(2, "classes per client", low=1)
    low: float = setting(0.4, "least share before normalisation", above=0)
    high: float = setting(0.6, "greatest share before normalisation", above=0)

    def assign(self, labels: np.ndarray, classes: int, clients: int, draw: np.random.Generator) -> Lists:
        """Draw k classes for every client, and divide every class in random proportions."""
        _check_k(self.k, classes)
        if self.high < self.low:
            raise UserError(f"high must be at least low, not {self.high:g} < {self.low:g}.")
        slots = self.k * clients // classes + 1
        ratios = draw.uniform(self.low, self.high, (classes, slots))
        ratios = ratios / ratios.sum(1, keepdims=True)
        pieces: list[Lists] = [[] for _ in range(clients)]
        for c, receivers in enumerate(_clients_of_classes(self.k, np.full(classes, slots), clients, draw)):
            rows, start = draw.permutation(np.flatnonzero(labels == c)), 0
            for turn, i in enumerate(receivers):
                size = int(ratios[c, slots - 1 - turn] * len(rows))  # the last ratio of the list is used first
                if size == 0:
                    raise _too_few(c, len(rows), len(receivers))
                pieces[i].append(rows[start : start + size])
                start += size
        return _concatenate(pieces)


def _check_k(k: int, classes: int) -> None:
    if k > classes:
        raise UserError(f"k must be at most the number of classes, {classes}, not {k}.")


def _too_few(c: int, samples: int, clients: int) -> UserError:
    return UserError(f"Class {c} has {samples} samples, too few for {clients} clients; use fewer clients.")


def _concatenate(parts: list[Lists]) -> Lists:
    """Every client's parts as one array."""
    return [np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64) for rows in parts]
