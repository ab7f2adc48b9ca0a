"""Uploads as they leave clients, and the networks that they show to the server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithms.fedfomo import FedFomo
from fedloom.algorithms.gpfl import GPFL, cosines, cov
from fedloom.algorithms.pfedhn import PFedHN
from fedloom.core.algorithm import Algorithm, Batch, Phase
from fedloom.core.keys import root
from fedloom.core.task import Task
from fedloom.core.tree import Params, Tree, take, tree_map
from fedloom.engine import batching
from fedloom.engine.clients import ClientReplies, ClientRequest

MODEL, BODY = "model", "body"
WORDS = "samples are words or characters, which an attack by gradients cannot move"


class Upload(NamedTuple):
    """What a client sent in a round, and what the server knows besides."""

    t: int
    client: int
    up: Tree
    down: Tree  # constants of the method, and all that the client had received
    previous: Tree | None  # the client's last upload before this one


class UploadRecorder:
    """Keeps the uploads of some clients in some rounds, as they leave the clients (after clipping and noise). It is
    given to `LocalClients.on_upload`."""

    def __init__(
        self, constants: Tree, wanted: Mapping[int, Collection[int]], previous: Mapping[int, Tree] | None = None
    ) -> None:
        """
        Args:
            constants: of the method, see `Algorithm.constants`.
            wanted: clients whose uploads are kept, by round.
            previous: the last uploads of clients before this recorder is used.
        """
        self.constants, self.wanted = constants, wanted
        self.ids = {i for ids in wanted.values() for i in ids}
        self.latest: dict[int, Tree] = dict(previous or {})
        self.uploads: list[Upload] = []

    def __call__(self, request: ClientRequest, replies: ClientReplies) -> None:
        """Keep what is asked for of the replies to a training request."""
        for row, client in enumerate(request.ids.tolist()):
            if client in self.ids:
                up = tree_map(torch.clone, take(replies.up, row))
                if client in self.wanted.get(request.t, ()):
                    down = {**self.constants, **request.shared, **take(request.parts, row)}
                    down = tree_map(torch.clone, down)
                    self.uploads.append(Upload(request.t, client, up, down, self.latest.get(client)))
                self.latest[client] = up


class Shown(NamedTuple):
    """Parameters as they were before local training, and as they are after it, as far as an upload tells. Those that
    are not of the task's network are named entry/name."""

    sent: Params
    uploaded: Params


@dataclass(frozen=True)
class View:
    """A network that an upload shows, to be attacked."""

    name: str  # in words: body, model, ...
    attacked: tuple[str, ...]  # names of its parameters
    forward: Callable[[Params, Tensor], Tensor]  # parameters and samples -> outputs


def shown(alg: Algorithm, task: Task, upload: Upload, seed: int) -> Shown:
    """What an upload shows of the task's network, and of GPFL's valve and embeddings: every entry that has the names
    and shapes of parameters. `seed` is the run's, with which clients and server draw the same initial model."""
    like, reference = task.init(root(seed, "init")), alg.reference(task, upload.up, upload.down)
    found = Shown({}, {})
    for entry in dict.fromkeys([*(name for name in alg.uploads if name in upload.up), *upload.up]):  # as declared
        part = upload.up[entry]
        if isinstance(alg, GPFL) and entry != "phi":
            found.sent.update(_named(entry, reference[entry]))
            found.uploaded.update(_named(entry, part))
        elif _is_part(part, like) and not part.keys() & found.uploaded.keys():  # SCAFFOLD's second entry tells the same
            sent, uploaded = _both(alg, upload, entry, reference, like)
            found.sent.update(sent)
            found.uploaded.update(uploaded)
    return found


def _both(
    alg: Algorithm, upload: Upload, entry: str, reference: Mapping[str, Tree], like: Params
) -> tuple[Params, Params]:
    """The parameters of an entry before and after training."""
    part: Params = upload.up[entry]
    if isinstance(
        alg, FedFomo
    ):  # a whole model; the server knows the last one that the client sent, or the initial one
        return (like if upload.previous is None else upload.previous[entry]), part
    if entry in reference:
        return reference[entry], part
    sign = -1 if isinstance(alg, PFedHN) else 1  # which uploads before minus after, the others after minus before
    sent = next((v for v in upload.down.values() if _is_part(v, like) and part.keys() <= v.keys()), like)
    return {k: sent[k] for k in part}, {k: sent[k] + sign * v for k, v in part.items()}


def _is_part(part: Tree, like: Params) -> bool:
    """True for parameters of the network, by name."""
    return (
        isinstance(part, dict)
        and bool(part)
        and all(k in like and isinstance(v, Tensor) and v.shape == like[k].shape for k, v in part.items())
    )


def _named(entry: str, part: Params) -> Params:
    return {f"{entry}/{name}": value for name, value in part.items()}


def views(alg: Algorithm, task: Task, parameters: Collection[str]) -> list[View]:
    """The networks that uploads with these parameters show, the largest last; they all take samples as input."""
    network, head = task.network, task.head(task.init(0))

    def outputs(params: Params, x: Tensor) -> Tensor:
        return network.apply(params, network.buffers, x, train=False).logits

    def features(params: Params, x: Tensor) -> Tensor:  # the logits that the head makes of them are not used
        return network.apply({**head, **params}, network.buffers, x, train=False).features

    found = [View(BODY, network.body, features)] if network.body and set(network.body) <= set(parameters) else []
    if isinstance(alg, GPFL):
        return found + _gpfl_views(network.body, parameters, features)
    whole = (*network.body, *network.head)
    return [*found, View(MODEL, whole, outputs)] if set(whole) <= set(parameters) else found


def _gpfl_views(body: tuple[str, ...], parameters: Collection[str], features: Callable[..., Tensor]) -> list[View]:
    """Body and valve, and both with the embeddings, whose mean g is the valve's condition. As in training, no gradient
    flows through g."""
    valve, embeddings = (tuple(name for name in parameters if name.startswith(entry)) for entry in ("V/", "C/"))

    def after_valve(params: Params, x: Tensor) -> Tensor:
        V = {name.removeprefix("V/"): params[name] for name in valve}
        return cov(V, features(params, x), params["C/weight"].detach().mean(0)[None])[0]

    def similarities(params: Params, x: Tensor) -> Tensor:
        return cosines(after_valve(params, x), params["C/weight"])

    if not (body and valve and embeddings):
        return []
    return [
        View("body, valve", (*body, *valve), after_valve),
        View("body, valve, embeddings", (*body, *valve, *embeddings), similarities),
    ]


def why_not(alg: Algorithm, task: Task, up: Tree) -> str:
    """Why samples cannot be reconstructed from an upload, as a sentence without a full stop; "" if it can be tried."""
    if not up:
        return "it uploads nothing"
    if task.data.x.dtype == torch.int64:
        return WORDS
    like = task.init(0)
    names = {k for part in up.values() if _is_part(part, like) for k in part}
    if views(alg, task, names):
        return ""
    if names:
        return "it uploads the head only, whose input are features of a private body, not samples"
    said = ", ".join(alg.uploads.get(name, name) for name in up)
    return f"nothing that it uploads has the shape of model parameters ({said})"


def first_batches(task: Task, seed: int, t: int, client: int, count: int) -> Iterator[Batch]:
    """The first batches of the client's first pass over its training samples in round t."""
    schedule = batching.build(task, Phase(_no_step), seed, np.array([client]), t, np.ones(1, np.int64))
    for _, batch in zip(range(count), schedule.batches(task, 0), strict=False):
        yield batch


def _no_step(*_: object) -> Tree:
    raise NotImplementedError
