"""Samples as they were read, whatever they were read from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.federation import Scaling
from fedloom.data.dataset import RawDataset
from fedloom.data.user_data.findings import Findings, Origin
from fedloom.data.user_data.names import check_classes


@dataclass(frozen=True, eq=False)
class Samples:
    kind: str  # table, image, sequence or text
    x: np.ndarray
    y: np.ndarray  # class, -1 where there is none
    classes: tuple[str, ...]
    where: Origin
    layout: str = ""
    columns: tuple[str, ...] = ()  # names of the features
    client: np.ndarray | None = None  # -1 where there is none
    clients: tuple[str, ...] = ()
    split: np.ndarray | None = None  # train, val, test
    scaling: Scaling | None = None
    vocab: int | None = None
    raw: np.ndarray | None = field(default=None, repr=False)  # what duplicates are recognised by, if not x

    def checked(self, label: str, findings: Findings) -> Samples:
        """Those that can be used; the others were complained of."""
        good = self.y >= 0
        if self.client is not None:
            good &= self.client >= 0
        if self.split is not None:
            good &= self.split != ""
        made = self if good.all() else self.kept(good)
        if not len(made.y):
            raise UserError("No sample is left that could be used.")
        check_classes(made.y, made.classes, label)
        if made.client is not None and len(made.clients) == 1:
            findings.problem(
                "one client",
                f"All samples belong to one client, '{made.clients[0]}'; set client=none to have them divided.",
            )
        return made

    def kept(self, mask: np.ndarray) -> Samples:
        def some(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[mask]

        return replace(
            self, x=self.x[mask], y=self.y[mask], where=self.where.kept(mask),
            client=some(self.client), split=some(self.split), raw=some(self.raw),
        )  # fmt: skip

    def pool(self) -> RawDataset:
        natural = None
        if self.client is not None:
            order = np.argsort(self.client, kind="stable")
            natural = tuple(np.split(order, np.searchsorted(self.client[order], np.arange(1, len(self.clients)))))
        pixels = self.x.dtype == np.uint8
        return RawDataset(
            self.x, self.y, len(self.classes), official_test=self._part("test"), official_val=self._part("val"),
            natural=natural, mean=(0.5,) if pixels else (0.0,), std=(0.5,) if pixels else (1.0,), vocab=self.vocab,
            scaling=self.scaling, class_names=self.classes, client_names=self.clients if natural is not None else (),
        )  # fmt: skip

    def _part(self, name: str) -> np.ndarray | None:
        if self.split is None:
            return None
        rows = np.flatnonzero(self.split == name)
        return rows if len(rows) else None
