"""Sharpness, margins and the terms of generalization bounds of the models of finished runs, as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.analysis.bounds import generator_terms, margins, spectral_norms, terms, weight_matrices
from fedloom.analysis.landscape import sharpness_of, training_loss
from fedloom.analysis.trained import Runs, TrainedModel, TrainedRun, has_global_model, load_all, load_model
from fedloom.core.errors import UserError
from fedloom.studies.models import When

CLIENTS = 20  # whose personal models are measured
Row = dict[str, Any]


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` has measured.

    Attributes:
        rows: one row per method, seed and kind of model (global or personal); personal ones are means over clients.
        layers: one row per method, seed, kind of model and weight matrix, with its spectral norm.
        generators: one row per method and seed with hypernetworks, see `GeneratorTerms`.
        clients: ids of the clients whose personal models were measured.
    """

    rows: list[Row]
    layers: list[Row]
    generators: list[Row]
    clients: list[int]

    def summary(self) -> list[Row]:
        """One row per method and kind of model: means over seeds and, as `NAME_std`, their standard deviations."""
        return _over_seeds(self.rows, ("method", "model"))

    def layer_summary(self) -> list[Row]:
        """`layers` without seeds: means over them, and standard deviations."""
        return _over_seeds(self.layers, ("method", "model", "layer", "shape"))

    def generator_summary(self) -> list[Row]:
        """`generators` without seeds: means over them, and standard deviations."""
        return _over_seeds(self.generators, ("method",))


def diagnose(
    runs: Runs, *, clients: int = CLIENTS, when: When = "best", planes: int = 1, samples: int | None = None
) -> Diagnosis:
    """Measure the models of finished runs on the samples that they were trained with: the global model, if the method
    has one, on those of all clients, personal models on those of their own client.

    Args:
        runs: results by the label of their method, see `fedloom.plots.results`.
        clients: how many personal models, of clients that are evenly spaced among all.
        when: the models after the round that is best on validation data, or after the last one.
        planes: planes of random directions over which sharpness is averaged.
        samples: at most so many training samples of a model, drawn at random, where all would take too long.
    """
    if clients < 1:
        raise UserError(f"clients must be at least 1, not {clients}.")
    loaded = load_all(runs)
    data = next(iter(loaded.values()))[0].task.data
    filled = np.flatnonzero(data.splits["train"].sizes[: data.clients])
    ids = filled[np.unique(np.linspace(0, len(filled) - 1, min(clients, len(filled))).round().astype(int))].tolist()
    rows: list[Row] = []
    layers: list[Row] = []
    generators: list[Row] = []
    for label, of_seeds in loaded.items():
        for run in of_seeds:
            about = {"method": label, "seed": int(run.result.config["seed"])}
            for kind, models in _models(run, ids, when).items():
                measured = [_measured(run, model, planes, samples) for model in models]
                rows.append({**about, "model": kind, "models": len(models), **_means(measured)})
                layers += [{**about, "model": kind, **layer} for layer in _layers(run, models)]
            if (found := generator_terms(run)) is not None:
                generators.append({**about, **found._asdict()})
    return Diagnosis(rows, layers, generators, ids)


def _models(run: TrainedRun, ids: Sequence[int], when: When) -> dict[str, list[TrainedModel]]:
    found = {"global": [load_model(run, None, when)]} if has_global_model(run.result) else {}
    return {**found, "personal": [load_model(run, i, when) for i in ids]}


def _measured(run: TrainedRun, model: TrainedModel, planes: int, samples: int | None) -> Row:
    found, bound = margins(run, model), terms(run, model)
    median = float(np.median(found)) if len(found) else math.nan
    return {
        "loss": training_loss(run, model, samples)(model.tree),
        "sharpness": sharpness_of(run, model, planes, samples),
        "margin": median,
        "margin_q10": float(np.quantile(found, 0.1)) if len(found) else math.nan,
        "wrong": 100 * float(np.mean(found <= 0)) if len(found) else math.nan,
        "normalised_margin": median / (bound.product * bound.largest_input) if bound.product else math.nan,
        **{_COLUMNS.get(name, name): float(value) for name, value in bound._asdict().items()},
    }


_COLUMNS = {"margin": "margin_term", "perturbation": "perturbation_term"}  # of Terms, beside margins of samples


def _layers(run: TrainedRun, models: Sequence[TrainedModel]) -> list[Row]:
    """The spectral norms of every layer, as means over models."""
    norms = [spectral_norms(model.tree, run.task.network) for model in models]
    return [
        {
            "layer": name,
            "shape": "x".join(map(str, w.shape)),
            "spectral_norm": float(np.mean([each[name] for each in norms])),
        }
        for name, w in weight_matrices(models[0].tree, run.task.network).items()
    ]


def _means(rows: Sequence[Row]) -> Row:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _over_seeds(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    found = []
    for group, members in groups.items():
        made: Row = {**dict(zip(keys, group, strict=True)), "seeds": len(members)}
        for name in members[0].keys() - {*keys, "seed"}:
            values = np.array([member[name] for member in members], dtype=float)
            made[name] = float(values.mean())
            made[f"{name}_std"] = float(values.std(ddof=1)) if len(values) > 1 else math.nan
        found.append(made)
    return found
