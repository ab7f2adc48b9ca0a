"""The loss around a trained model, on a plane of two random directions, and how sharply it rises.

The directions are those of Li et al., *Visualizing the Loss Landscape of Neural Nets*: Gaussian, every filter rescaled
to the norm of the model's filter, and 0 for biases and normalisation layers. A filter is a row of a matrix, or an
output channel of a convolution. Parameters of the network are moved, also where a method has some twice (the two heads
of FedRoD); what else it predicts with (the valve of GPFL, prototypes) stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedloom.analysis.trained import TrainedModel, TrainedRun, load_model, load_trained, some_rows
from fedloom.core.algorithm import Slot
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, normal, root, stream
from fedloom.core.task import Network
from fedloom.core.tree import Params, Tree
from fedloom.engine.executors.scoring import score_rows
from fedloom.studies.models import When
from fedloom.studies.result import Result

SIZE = 21  # points of the grid along each direction, from -1 to 1
RADIUS = 0.5  # at which sharpness is measured
POINTS = 32  # of the circle with that radius
Direction = Sequence[Params]  # for every network of a model, what is added to its parameters
Plane = tuple[Direction, Direction]
Loss = Callable[[Tree], float]
LossAt = Callable[[float, float], float]  # the loss at a point of a plane; (0, 0) is the model itself


class Landscape(NamedTuple):
    """The loss around a model; `losses[j, k]` is that of model + steps[k] * first + steps[j] * second direction."""

    model: str
    steps: np.ndarray
    losses: np.ndarray
    centre: float  # the loss of the model itself
    sharpness: float  # mean increase of the loss on the circle with radius 0.5


def landscape(
    result: Result | TrainedRun,
    client: int | str | None = None,
    *,
    when: When = "best",
    seed: int = 0,
    size: int = SIZE,
    samples: int | None = None,
) -> Landscape:
    """The loss around the model of a client on its training samples or, without a client, around the global model on
    the training samples of all clients.

    Args:
        result: a finished run, see `fedloom.load`.
        client: whose model, a name or a number; None for the global model.
        when: the model after the round that is best on validation data, or after the last one.
        seed: of the two random directions.
        size: points of the grid along each direction.
        samples: at most so many training samples, drawn at random, where all would take too long.
    """
    if size < 3:
        raise UserError(f"size must be at least 3, not {size}.")
    run = load_trained(result) if isinstance(result, Result) else result
    model = load_model(run, client, when)
    at, steps = loss_on_plane(run, model, seed, samples), np.linspace(-1, 1, size)
    return Landscape(model.name, steps, loss_surface(at, steps), at(0.0, 0.0), mean_increase(at))


def sharpness(
    result: Result | TrainedRun,
    client: int | str | None = None,
    *,
    when: When = "best",
    planes: int = 1,
    samples: int | None = None,
) -> float:
    """The mean increase of the loss at radius 0.5 around a model, on planes of two random directions with filter
    normalisation.

    Args:
        result: a finished run, see `fedloom.load`.
        client: whose model, a name or a number; None for the global model.
        when: the model after the round that is best on validation data, or after the last one.
        planes: planes to average over, with the seeds 0, 1, ...
        samples: at most so many training samples, drawn at random, where all would take too long.
    """
    run = load_trained(result) if isinstance(result, Result) else result
    model = load_model(run, client, when)
    return sharpness_of(run, model, planes, samples)


def sharpness_of(run: TrainedRun, model: TrainedModel, planes: int = 1, samples: int | None = None) -> float:
    """The sharpness of a model of a run that is loaded, see `sharpness`."""
    if planes < 1:
        raise UserError(f"planes must be at least 1, not {planes}.")
    return float(np.mean([mean_increase(loss_on_plane(run, model, seed, samples)) for seed in range(planes)]))


def loss_on_plane(run: TrainedRun, model: TrainedModel, seed: int, samples: int | None = None) -> LossAt:
    """The loss of a model on its training samples, at points of the random plane of a seed."""
    loss, network = training_loss(run, model, samples), run.task.network
    plane = random_plane(model.tree, seed, network)
    return lambda a, b: loss(moved(model.tree, plane, a, b, network))


def training_loss(run: TrainedRun, model: TrainedModel, samples: int | None = None) -> Loss:
    """The mean loss of a model on its training samples, as a function of its weights."""
    rows = some_rows(model.train, samples)
    if not len(rows):
        raise UserError(f"{model.name} has no training samples, so it has no loss on them; name another client.")

    @torch.no_grad()
    def loss(tree: Tree) -> float:
        _, total, count = score_rows(run.task, lambda x: model.predict(tree, x), rows).double().tolist()
        return total / count if count else math.nan

    return loss


# -- directions


def random_plane(model: Tree, seed: int, network: Network) -> Plane:
    """Two random directions for the parameters of this network."""
    return random_direction(model, seed, 0, network), random_direction(model, seed, 1, network)


def random_direction(model: Tree, seed: int, number: int, network: Network) -> Direction:
    """A Gaussian direction with filter normalisation. It depends on the seed, the number and the names of parameters,
    so models of one architecture are moved in directions that differ in the norms of filters only."""
    key = fold(root(seed, "landscape"), number)

    def draw(place: int, name: str, w: Tensor) -> Tensor:
        if w.dim() < 2 or name in network.norms:
            return torch.zeros_like(w)
        at = torch.tensor(fold(key, place, stream(name)), device=w.device)
        d = normal(at, tuple(w.shape), torch.float64)
        of_model, of_direction = (filter_norms(v) for v in (w.double(), d))
        return (d * of_model / (of_direction + 1e-10)).to(w.dtype)

    return [
        {name: draw(place, name, w) for name, w in params.items()}
        for place, params in enumerate(networks(model, network))
    ]


def filter_norms(w: Tensor) -> Tensor:
    """The norm of every filter, shaped to broadcast over them."""
    return torch.linalg.vector_norm(w, dim=tuple(range(1, w.dim())), keepdim=True)


def networks(model: Tree, network: Network) -> list[Params]:
    """The parameters that a model has of a network: all of them, and those that it has twice."""
    flat = tree_flatten(model, is_leaf=lambda value: _has_parameters(value, network))[0]
    return [_params(value) for value in flat if _has_parameters(value, network)]


def moved(model: Tree, plane: Plane, a: float, b: float, network: Network) -> Tree:
    """The model at point (a, b) of a plane."""
    flat, spec = tree_flatten(model, is_leaf=lambda value: _has_parameters(value, network))
    steps = zip(*plane, strict=True)

    def move(value: Any) -> Any:
        if not _has_parameters(value, network):
            return value
        first, second = next(steps)
        params = {name: w + a * first[name] + b * second[name] for name, w in _params(value).items()}
        return value._replace(params=params) if isinstance(value, Slot) else params

    return tree_unflatten([move(value) for value in flat], spec)


def _has_parameters(value: Any, network: Network) -> bool:
    """True for a slot, and for parameters of the network by name, such as a head."""
    known = {*network.body, *network.head}
    return isinstance(value, Slot) or (isinstance(value, dict) and bool(value) and value.keys() <= known)


def _params(value: Slot | Params) -> Params:
    return value.params if isinstance(value, Slot) else value


# -- the loss on a plane


def loss_surface(at: LossAt, steps: np.ndarray) -> np.ndarray:
    """The loss at all points of a grid; rows are steps in the second direction, columns in the first."""
    return np.array([[at(a, b) for a in steps.tolist()] for b in steps.tolist()])


def mean_increase(at: LossAt, radius: float = RADIUS, points: int = POINTS) -> float:
    """The mean over a circle around the centre of how much larger the loss is than there."""
    angles = 2 * math.pi * np.arange(points) / points
    around = [at(radius * math.cos(t), radius * math.sin(t)) for t in angles.tolist()]
    return float(np.mean(around)) - at(0.0, 0.0)
