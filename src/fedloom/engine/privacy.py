"""Clipping of updates, and noise, before they leave a client (`fedloom.core.privacy`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm
from fedloom.core.autodiff import vmap
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, normal, root
from fedloom.core.privacy import UploadPrivacy
from fedloom.core.task import Task
from fedloom.core.tree import Tree, leaves, take, tree_map

CHUNK = 1 << 25  # numbers of uploads that are protected at once, to bound the memory

# (clients, round, clipped updates as rows) -> standard normal numbers of the same shape
Noise = Callable[[Tensor, int, Tensor], Tensor]


def keyed_noise(seed: int) -> Noise:
    """Noise that follows from the seed of a run, so that a simulation can be repeated. It protects nobody who knows the
    seed."""

    def noise(ids: Tensor, t: int, updates: Tensor) -> Tensor:
        keys = fold(root(seed, "privacy"), ids, t)
        return torch.func.vmap(lambda key: normal(key, updates.shape[1:], updates.dtype))(keys)

    return noise


def secret_noise(secret: bytes, order: bytes = b"") -> Noise:
    """Noise that nobody can compute who does not know the secret. It is a function of the order and of the update, too:
    one that is sent again has the same noise, and any other has noise of its own, so that no difference of two uploads
    shows what the noise hides.

    Args:
        order: a digest of all that the upload is an answer to.
    """

    def noise(ids: Tensor, t: int, updates: Tensor) -> Tensor:
        rows = [_gaussian(secret + order, i, t, row) for i, row in zip(ids.tolist(), updates, strict=True)]
        return torch.stack(rows).to(updates)

    return noise


def _gaussian(secret: bytes, i: int, t: int, update: Tensor) -> Tensor:
    """Box and Muller's transform of SHAKE-256's bits."""
    content = hashlib.sha256(update.cpu().contiguous().numpy().tobytes()).digest()
    count = update.numel() + update.numel() % 2
    made = hashlib.shake_256(secret + f"{i} {t} ".encode() + content).digest(8 * count)
    first, second = (np.frombuffer(made, np.uint64).reshape(2, -1) >> np.uint64(11)) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * math.pi * second
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: update.numel()])


def protected(
    privacy: UploadPrivacy, noise: Noise, alg: Algorithm, task: Task, ids: Tensor, t: int, up: Tree, shared: Tree,
    parts: Tree,
) -> Tree:  # fmt: skip
    """The uploads of clients with their updates (what is uploaded, less what was sent, see `Algorithm.reference`)
    clipped, and noise added.

    All of it is computed in float64 and rounded once, after the noise was added: rounding before could make an update
    larger than it was clipped to.
    """
    if not leaves(up):
        return up
    check_real(alg, up)
    width, of_all, made = sum(v[0].numel() for v in leaves(up)), _double(shared), []
    for rows in torch.arange(len(ids), device=ids.device).split(max(1, CHUNK // max(1, width))):
        some, mine = _double(take(up, rows)), _double(take(parts, rows))
        sent = _sent(alg, task, some, of_all, mine)
        updates = _vectors(some) - sent
        size = torch.linalg.vector_norm(updates, dim=1)[:, None]
        factors = (privacy.clip / size.clamp(min=1e-300)).clamp(max=1.0)
        clipped = torch.where(torch.isfinite(size), updates * factors, 0.0)
        noisy = clipped + privacy.clip * privacy.noise * noise(ids[rows], t, clipped)
        made.append(_rounded(sent + noisy, up))
    return tree_map(lambda *each: torch.cat(each), *made)


def check_real(alg: Algorithm, up: Tree) -> None:
    """Raise UserError for an upload that is not made of real numbers."""
    if any(not v.is_floating_point() for v in leaves(up)):
        raise UserError(
            f"{alg.name} uploads more than real numbers, to which no noise can be added; leave out dp_clip."
        )


def _double(tree: Tree) -> Tree:
    return tree_map(lambda v: v.double() if v.is_floating_point() else v, tree)


def _vectors(rows: Tree) -> Tensor:
    """A tree with a row per client as vectors (clients, numbers)."""
    return torch.cat([v.flatten(1) if v.dim() > 1 else v[:, None] for v in leaves(rows)], dim=1)


def _sent(alg: Algorithm, task: Task, up: Tree, shared: Tree, parts: Tree) -> Tensor:
    """What the numbers of uploads are measured from, as vectors (clients, numbers); 0 for those that are updates."""

    def of_client(up: Tree, mine: Tree) -> Tree:
        sent = alg.reference(task, up, {**shared, **mine})
        return {
            name: tree_map(lambda new, old: old, part, sent[name]) if name in sent else tree_map(torch.zeros_like, part)
            for name, part in up.items()
        }

    return _vectors(vmap(of_client)(up, parts))


def _rounded(vectors: Tensor, like: Tree) -> Tree:
    """The opposite of `_vectors`, with the shapes and types of a tree."""
    at = 0

    def one(v: Tensor) -> Tensor:
        nonlocal at
        at += v[0].numel()
        return vectors[:, at - v[0].numel() : at].reshape(-1, *v.shape[1:]).to(v.dtype)

    return tree_map(one, like)
