"""`Samples`: a user's data after reading, whatever files they come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.federation import Scaling
from fedloom.data.dataset import RawDataset
from fedloom.data.user_data.categorical import check_classes
from fedloom.data.user_data.issues import Issues, Origin, shorten


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with their classes and, if the data say so, their clients and splits."""

    kind: str  # table, image, sequence or text
    x: np.ndarray
    y: np.ndarray  # index of the class, -1 if it is unknown
    classes: tuple[str, ...]  # names
    where: Origin  # file and row of every sample
    layout: str = ""  # description for the user
    columns: tuple[str, ...] = ()  # names of the features
    client: np.ndarray | None = None  # index of the client, -1 if it is unknown
    clients: tuple[str, ...] = ()  # names
    split: np.ndarray | None = None  # "train", "val", "test", or "" if it is unknown
    scaling: Scaling | None = None
    vocab: int | None = None  # number of token ids
    notes: tuple[str, ...] = ()  # warnings that a run prints

    def usable(self, label: str, issues: Issues) -> Samples:
        """The samples whose class, client and split are known; the others have been reported already.

        `label` names in messages where the class is from.
        """
        valid = self.y >= 0
        if self.client is not None:
            valid &= self.client >= 0
        if self.split is not None:
            valid &= self.split != ""
        samples = self if valid.all() else self.select(valid)
        if not len(samples.y):
            raise UserError("No sample is left that could be used.")
        check_classes(samples.y, samples.classes, label)
        if samples.client is not None and len(samples.clients) == 1:
            issues.problem(
                "one client",
                f"All samples belong to one client, '{shorten(samples.clients[0])}'; set client=none to have them "
                "divided.",
            )
        return samples

    def select(self, mask: np.ndarray) -> Samples:
        """The samples where the mask is True."""
        client = None if self.client is None else self.client[mask]
        split = None if self.split is None else self.split[mask]
        where = self.where.select(mask)
        return replace(self, x=self.x[mask], y=self.y[mask], where=where, client=client, split=split)

    def to_raw_dataset(self) -> RawDataset:
        """The samples as a data set that can be divided among clients."""
        natural = None
        if self.client is not None:
            order = np.argsort(self.client, kind="stable")
            natural = tuple(np.split(order, np.searchsorted(self.client[order], np.arange(1, len(self.clients)))))
        pixels = self.x.dtype == np.uint8
        return RawDataset(
            self.x, self.y, len(self.classes), natural=natural, vocab=self.vocab,
            official_test=self._split_rows("test"), official_val=self._split_rows("val"),
            mean=(0.5,) if pixels else (0.0,), std=(0.5,) if pixels else (1.0,),
            scaling=self.scaling, class_names=self.classes, client_names=self.clients if natural is not None else (),
            notes=self.notes,
        )  # fmt: skip

    def _split_rows(self, name: str) -> np.ndarray | None:
        """The samples of a split; None if there are none."""
        if self.split is None:
            return None
        rows = np.flatnonzero(self.split == name)
        return rows if len(rows) else None
