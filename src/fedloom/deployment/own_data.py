"""Runs on data that lie at the sites: the description of samples on which they agree, and the federations that the
sites and the server make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core.errors import UserError, reason
from fedloom.core.federation import SPLITS, Federation, Ragged
from fedloom.core.preprocessing import Numbers, Preprocessing
from fedloom.core.targets import TARGETS
from fedloom.core.targets import Number as NumberTarget
from fedloom.data.dataset import RawDataset
from fedloom.data.divide import Shares, divide
from fedloom.data.moments import Moments
from fedloom.data.partitions import Natural
from fedloom.data.sets.own import OwnData
from fedloom.data.user_data.merging import merge
from fedloom.data.user_data.new_samples import read_new_samples
from fedloom.data.user_data.targets import known_targets

NOT_SAID = dict.fromkeys(SPLITS, 1000)  # instead of how many samples a site has, in runs with differential privacy
SPLIT = (0.7, 0.1, 0.2)  # shares of training, validation and test data
FEW = 5  # training samples of which moments say too much
MOST = 10**8  # samples that a site can say that it has
CONSTANT = 1e-12  # of the mean: a standard deviation below it is a rounding error


class LocalSamples:
    """A site's samples, encoded as all sites have agreed, and divided into training, validation and test."""

    def __init__(self, options: OwnData, agreed: Preprocessing, split: Shares, seed: int, stratify: bool) -> None:
        accepts = replace(agreed, numbers=None if agreed.missing == "refuse" else _unscaled(agreed))
        label = options.label if options.label is None or "," not in options.label else None
        found = read_new_samples(accepts, options.path, label=label, delimiter=options.delimiter)
        if found.y is None:
            raise UserError(f"{options.path} has no targets to learn from; say which column has them with label=NAME.")
        known = known_targets(found.y)
        self.agreed, self.x, self.y = agreed, found.x[known], found.y[known]
        if len(self.y) < 2:
            raise UserError(f"{options.path} has {len(self.y)} samples with a target; a site needs 2 at least.")
        raw = RawDataset(self.x, self.y, len(agreed.classes), natural=(np.arange(len(self.y)),), target=agreed.target)
        self.splits = {
            name: rows.lists()[0]
            for name, rows in divide(raw, Natural(), 1, split=split, seed=seed, stratify=stratify).splits.items()
        }

    @property
    def sizes(self) -> dict[str, int]:
        """Samples for training, validation and test."""
        return {name: len(self.splits[name]) for name in SPLITS}

    def moments(self) -> dict[str, Moments]:
        """What is sent of the training samples for scaling: moments of columns, and of a target that is a number."""
        if not needs_moments(self.agreed):
            return {}
        train = self.splits["train"]
        if len(train) < FEW:
            raise UserError(
                f"There are {len(train)} training samples, so few that moments would tell of single ones; give a "
                "schema with --schema."
            )
        found = {"y": Moments.of(self.y[train, None].astype(np.float64))} if self.agreed.target == "number" else {}
        if self.agreed.kind == "table":  # of words there is nothing to scale
            found["x"] = Moments.of(self.x[train][:, _numeric(self.agreed)].astype(np.float64))
        return found

    def federation(self, final: Preprocessing, client: int, clients: int, mean_samples: float) -> Federation:
        """The federation as the site has it: its own samples are those of this client."""
        x, y = torch.from_numpy(self.x), torch.from_numpy(self.y)
        if final.numbers is not None:
            x = final.numbers.scale(x)
        if final.target_scale is not None:
            y = (y.double() - final.target_scale[0]) / final.target_scale[1]
        nothing = np.zeros(0, np.int64)
        splits = {
            name: Ragged.of([rows if i == client else nothing for i in range(clients)])
            for name, rows in self.splits.items()
        }
        return replace(_empty(final), x=x, y=y, splits=splits, mean_samples_of_all=mean_samples)


def described(options: OwnData) -> Preprocessing:
    """How a site's samples would be encoded if they were all there are."""
    return options.read_part().preprocessing


def scaled(agreed: Preprocessing, moments: dict[str, Moments], normalise: bool) -> Preprocessing:
    """The description with the statistics of all training samples."""
    made = agreed
    if "x" in moments:
        of, numeric = moments["x"], _numeric(agreed)
        spread = np.where(of.std > CONSTANT * np.abs(of.mean), of.std, 1.0)
        mean, std = np.zeros(len(numeric)), np.ones(len(numeric))
        if normalise:
            mean[numeric], std[numeric] = of.mean, spread
        fill = None
        if agreed.missing != "refuse":
            filled = np.zeros(len(numeric))
            filled[numeric] = of.mean if agreed.missing == "mean" else 0.0
            fill = tuple(filled.tolist())
        made = replace(made, numbers=Numbers(tuple(mean.tolist()), tuple(std.tolist()), fill))
    if "y" in moments:
        mean_y, std_y = float(moments["y"].mean[0]), float(moments["y"].std[0])
        if std_y <= CONSTANT * max(abs(mean_y), 1e-300):
            raise UserError(f"All targets of the training samples are {mean_y:g}; there is nothing to learn.")
        made = replace(made, target_scale=(mean_y, std_y))
    return made


def needs_moments(agreed: Preprocessing) -> bool:
    """True if the description does not say how numbers are scaled, so that sites have to send moments."""
    return (agreed.kind == "table" and agreed.numbers is None and bool(_numeric(agreed).any())) or (
        agreed.target == "number" and agreed.target_scale is None
    )


def check_agreed(own: Preprocessing, agreed: Preprocessing) -> None:
    """Raise UserError unless the description that a server gives has a site's own columns, and all of its words and
    classes. With any other, counts and moments would tell what they should not."""
    merged = merge({"the server": agreed, "this site": own})
    if merged != agreed or (own.content, own.resize) != (agreed.content, agreed.resize):
        raise UserError("The server describes samples that are not like those of this site.")


def without_scale(agreed: Preprocessing) -> Preprocessing:
    """The description without the statistics of training samples."""
    return replace(agreed, numbers=None, target_scale=None)


def read_schema(path: str | Path) -> Preprocessing:
    """The description of samples in a file that `fedloom data schema` has written, or in a run directory."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"The schema {path} cannot be read ({reason(error)}).") from None
    try:
        found = Preprocessing.from_json(json.loads(text))
    except (ValueError, TypeError, UserError):
        raise UserError(f"{path} is no schema; make one with 'fedloom data schema'.") from None
    return replace(found, label=None, client=None, split=None)


def make_schema(options: OwnData) -> Preprocessing:
    """The description of samples like these, with their scale: a schema for sites, from data that may be shown."""
    found = replace(described(options), label=None, client=None, split=None)
    samples = LocalSamples(options, found, SPLIT, 1, stratify=False)
    return scaled(found, samples.moments(), options.normalise)


def server_federation(final: Preprocessing, sizes: list[dict[str, int]]) -> Federation:
    """The federation as the server has it: how many samples each client has, all of which are the same zeros."""
    data = _empty(final)
    return replace(
        data,
        x=data.x.new_zeros((1, *data.x.shape[1:])),
        y=data.y.new_zeros((1, *data.y.shape[1:])),
        splits={name: Ragged.of([np.zeros(each[name], np.int64) for each in sizes]) for name in SPLITS},
    )


def _empty(final: Preprocessing) -> Federation:
    """A federation without samples."""
    dtype = torch.float64 if final.numbers is not None else getattr(torch, final.dtype)
    kind = final.target
    shape = (0, len(final.classes)) if kind == "labels" else (0,)
    y = torch.zeros(shape, dtype=torch.int64 if kind == "classes" else torch.float64)
    targets = TARGETS[kind]()
    if isinstance(targets, NumberTarget) and final.target_scale is not None:
        targets = replace(targets, mean=final.target_scale[0], std=final.target_scale[1])
    return Federation(
        x=torch.zeros((0, *final.shape), dtype=dtype),
        y=y,
        classes=len(final.classes),
        splits={name: Ragged.of([np.zeros(0, np.int64)]) for name in SPLITS},
        mean=final.mean,
        std=final.std,
        vocab=final.token_ids,
        targets=targets,
        class_names=final.classes,
        preprocessing=final,
    )


def _numeric(agreed: Preprocessing) -> np.ndarray:
    """Which inputs of a table are numbers, and not words."""
    widths = [1 if column.words is None else len(column.words) for column in agreed.columns]
    return np.repeat([column.words is None for column in agreed.columns], widths)


def _unscaled(agreed: Preprocessing) -> Numbers:
    """Numbers as they are, of which some may be missing."""
    width = agreed.shape[0]
    return Numbers((0.0,) * width, (1.0,) * width, (0.0,) * width)


def to_json(moments: dict[str, Moments]) -> dict[str, Any]:
    """Moments as plain data."""
    return {name: [values.tolist() for values in of] for name, of in moments.items()}


def from_json(values: Any, agreed: Preprocessing) -> dict[str, Moments]:
    """Moments that a site has sent; raises ValueError for anything else."""
    wide: dict[str, int] = {}
    if needs_moments(agreed):
        wide |= {"x": int(_numeric(agreed).sum())} if agreed.kind == "table" else {}
        wide |= {"y": 1} if agreed.target == "number" else {}
    if type(values) is not dict or set(values) != set(wide):
        raise ValueError("there are no moments")
    found = {name: Moments(*(np.array(v, dtype=np.float64) for v in values[name])) for name in wide}
    for name, of in found.items():
        if any(v.shape != (wide[name],) or not np.isfinite(v).all() for v in of) or (of.n < 0).any():
            raise ValueError(f"the moments of {name} are not {wide[name]} numbers each")
    return found
