"""`Samples`: a user's data after reading, whatever files they come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.federation import Scaling
from fedloom.core.kinds import Kind
from fedloom.core.preprocessing import Preprocessing, preprocessing_of_arrays
from fedloom.data.dataset import RawDataset
from fedloom.data.user_data.issues import Issues, Origin, shorten
from fedloom.data.user_data.targets import Target, check_target, known_targets


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with their targets and, if the data say so, their clients and splits."""

    kind: str  # table, image, sequence or text
    x: np.ndarray
    y: np.ndarray  # index of the class, -1 if it is unknown; or see `target`
    classes: tuple[str, ...]  # names of classes or labels; for a number, what it is
    where: Origin  # file and row of every sample
    preprocessing: Preprocessing  # how x was made, without the statistics for scaling
    layout: str = ""  # description for the user
    client: np.ndarray | None = None  # index of the client, -1 if it is unknown
    clients: tuple[str, ...] = ()  # names
    split: np.ndarray | None = None  # "train", "val", "test", or "" if it is unknown
    scaling: Scaling | None = None
    notes: tuple[str, ...] = ()  # warnings that a run prints
    target: Kind = "classes"  # or labels: y (samples, labels) is 1 or 0; or number; both are NaN if unknown

    def usable(self, label: str, issues: Issues) -> Samples:
        """The samples whose target, client and split are known; the others have been reported already.

        `label` names in messages where the target is from.
        """
        valid = known_targets(self.y)
        if self.client is not None:
            valid &= self.client >= 0
        if self.split is not None:
            valid &= self.split != ""
        samples = self.select(valid)
        if not len(samples.y):
            raise UserError("No sample is left that could be used.")
        if issues.part:
            return samples
        check_target(Target(samples.target, samples.y, samples.classes), label)
        if samples.client is not None and len(samples.clients) == 1:
            issues.problem(
                "one client",
                f"All samples belong to one client, '{shorten(samples.clients[0])}'; set client=none to have them "
                "divided.",
            )
        return samples

    def select(self, mask: np.ndarray) -> Samples:
        """The samples where the mask is True."""
        if mask.all():
            return self
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
        preprocessing = self.preprocessing
        return RawDataset(
            self.x, self.y, len(self.classes), natural=natural, vocab=preprocessing.token_ids,
            official_test=self._split_rows("test"), official_val=self._split_rows("val"),
            mean=preprocessing.mean, std=preprocessing.std, scaling=self.scaling, class_names=self.classes,
            client_names=self.clients if natural is not None else (), notes=self.notes, preprocessing=preprocessing,
            target=self.target,
        )  # fmt: skip

    def _split_rows(self, name: str) -> np.ndarray | None:
        """The samples of a split; None if there are none."""
        if self.split is None:
            return None
        rows = np.flatnonzero(self.split == name)
        return rows if len(rows) else None


def array_preprocessing(x: np.ndarray, classes: tuple[str, ...], vocab: int | None = None) -> Preprocessing:
    """The preprocessing of a user's arrays or pictures: pixels are brought to -1..1."""
    half = (0.5,) if x.dtype == np.uint8 else None
    return preprocessing_of_arrays(
        x.shape[1:], str(x.dtype), classes, mean=half or (0.0,), std=half or (1.0,), token_ids=vocab
    )
