"""Features of test samples: what each client's model makes of them before its last layer, and how they cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.analysis.trained import TrainedRun, load_model, load_trained, some_rows
from fedloom.core.algorithm import Output
from fedloom.core.errors import UserError, shown
from fedloom.core.tree import Params, Tree
from fedloom.engine.executors.scoring import eval_batch
from fedloom.studies.models import When
from fedloom.studies.result import Result

PERPLEXITY = 30
NEEDS = "t-SNE and silhouettes need the package 'scikit-learn'; install it with: pip install scikit-learn."
GROUPS = ("class", "client")


class Features(NamedTuple):
    """Features of samples, one row each."""

    x: np.ndarray  # (samples, features)
    labels: np.ndarray  # class of each sample
    clients: np.ndarray  # whose sample it is
    class_names: tuple[str, ...]
    client_names: tuple[str, ...]

    def groups(self, by: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """The group of each sample, and the names of all groups; `by` is "class" or "client"."""
        if by not in GROUPS:
            raise UserError(f"Features are grouped by class or by client, not by '{shown(by)}'.")
        return (self.labels, self.class_names) if by == "class" else (self.clients, self.client_names)

    def silhouette(self, by: str = "class") -> float:
        """The mean silhouette of the features, grouped by "class" or "client": 1 for groups that are compact and far
        apart, 0 for groups that overlap, negative for samples that are nearer to another group. NaN if there is only
        one group."""
        return silhouette(self.x, self.groups(by)[0])

    def embed(self) -> np.ndarray:
        """The features in two dimensions, by t-SNE: perplexity 30, or less for fewer than 91 samples, begun with the
        two principal components (at random if there is one feature), seed 0."""
        return tsne(self.x)


def features(result: Result | TrainedRun, *, when: When = "best", samples: int | None = None) -> Features:
    """The features of the clients' test samples, each computed by the model of its own client: the input of the last
    layer that the method predicts with. For most methods this is the output of the body; for GPFL it is the personal
    feature, behind the conditional valve.

    Args:
        result: a finished run, see `fedloom.load`.
        when: the models after the round that is best on validation data, or after the last one.
        samples: at most so many samples, drawn at random, where all would take too long.
    """
    run = load_trained(result) if isinstance(result, Result) else result
    data = run.task.data
    if data.kind != "classes" or data.sequences:
        raise UserError("Features are shown by class, but the samples of this run do not have one class each.")
    test = data.splits["test"]
    kept = some_rows(torch.arange(int(test.starts[data.clients])), samples).numpy()
    if not len(kept):
        raise UserError("This run has no test samples, so there are no features to look at; set split=0.7/0.1/0.2.")
    clients = np.repeat(np.arange(data.clients), test.sizes[: data.clients])[kept]
    rows = test.flat[data.tensor(kept)]
    found = [_client_features(run, int(i), rows[data.tensor(clients == i)], when) for i in np.unique(clients)]
    names = data.client_names or tuple(map(str, range(len(test))))
    classes = data.class_names or tuple(map(str, range(data.classes)))
    return Features(np.concatenate(found), data.y[rows].cpu().numpy(), clients, classes, names)


@torch.no_grad()
def _client_features(run: TrainedRun, i: int, rows: Tensor, when: When) -> np.ndarray:
    """The features of a client's samples."""
    model, network = load_model(run, i, when), _LastLayer(run.task.network)
    task, found = replace(run.task, network=network), []
    for some in torch.split(rows, eval_batch(run.task)):
        run.algorithm.logits(task, model.tree, run.task.data.samples(some))
        assert network.seen is not None
        found.append(network.seen.flatten(1).double().cpu().numpy())
    return np.concatenate(found)


class _LastLayer:
    """A network that remembers the features to which its head was applied last."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.seen: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def apply(self, *args: Any, **options: Any) -> Output:
        out: Output = self._network.apply(*args, **options)
        self.seen = out.features
        return out

    def apply_head(self, params: Params, buffers: Params, features: Tensor) -> Tree:
        self.seen = features
        return self._network.apply_head(params, buffers, features)


def silhouette(x: np.ndarray, groups: np.ndarray) -> float:
    """The mean over samples of (b - a) / max(a, b), where a is the mean distance to the sample's own group, and b that
    to the nearest other group. NaN if there is one group, or if all samples are alone in theirs."""
    try:
        from sklearn.metrics import silhouette_score
    except ImportError:
        raise UserError(NEEDS) from None

    count = len(np.unique(groups))
    if not 1 < count < len(x) or not np.isfinite(x).all():
        return float("nan")
    return float(silhouette_score(x, groups))


def tsne(x: np.ndarray) -> np.ndarray:
    """See `Features.embed`."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise UserError(NEEDS) from None

    if len(x) < 4:
        raise UserError(f"t-SNE needs at least 4 samples, and there are {len(x)}.")
    if not np.isfinite(x).all():
        raise UserError("Some features are not finite, because models have diverged; try a lower lr.")
    perplexity = min(PERPLEXITY, (len(x) - 1) / 3)
    start = "pca" if x.shape[1] > 1 else "random"  # a single feature has no second principal component
    found: np.ndarray = TSNE(perplexity=perplexity, init=start, random_state=0).fit_transform(x)
    return found
