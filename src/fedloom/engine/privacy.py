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
from fedloom.core.tree import Tree, leaves, tree_map
from fedloom.engine.screening import scaled_updates, update_vectors

# (clients, round, clipped updates as rows) -> standard normal numbers of the same shape
Noise = Callable[[Tensor, int, Tensor], Tensor]


def keyed_noise(seed: int) -> Noise:
    """Noise that follows from the seed of a run, so that a simulation can be repeated. It protects nobody who knows the
    seed."""

    def noise(ids: Tensor, t: int, updates: Tensor) -> Tensor:
        keys = fold(root(seed, "privacy"), ids, t)
        return torch.func.vmap(lambda key: normal(key, updates.shape[1:], updates.dtype))(keys)

    return noise


def secret_noise(secret: bytes) -> Noise:
    """Noise that nobody can compute who does not know the secret. It is a function of the update, too: one that is sent
    again has the same noise, and another one has noise of its own, so that no difference of two uploads shows what the
    noise hides."""

    def noise(ids: Tensor, t: int, updates: Tensor) -> Tensor:
        rows = [_gaussian(secret, i, t, row) for i, row in zip(ids.tolist(), updates, strict=True)]
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
    clipped, and noise added."""
    if not leaves(up):
        return up
    check_real(alg, up)
    updates = update_vectors(alg, task, up, shared, parts)
    size = torch.linalg.vector_norm(updates.double(), dim=1).to(updates.dtype)
    factors = torch.where(torch.isfinite(size), (privacy.clip / size.clamp(min=1e-30)).clamp(max=1.0), 0.0)
    updates = torch.where(torch.isfinite(size)[:, None], updates * factors[:, None], 0.0)
    clipped = scaled_updates(alg, task, tree_map(_finite, up), shared, parts, factors)
    return _added(clipped, privacy.clip * privacy.noise * noise(ids, t, updates))


def check_real(alg: Algorithm, up: Tree) -> None:
    """Raise UserError for an upload that is not made of real numbers."""
    if any(not v.is_floating_point() for v in leaves(up)):
        raise UserError(
            f"{alg.name} uploads more than real numbers, to which no noise can be added; leave out dp_clip."
        )


def _finite(v: Tensor) -> Tensor:
    return torch.nan_to_num(v, nan=0.0, posinf=0.0, neginf=0.0)


def _added(up: Tree, noise: Tensor) -> Tree:
    """The uploads plus noise (clients, numbers), in the order of `update_vectors`."""

    def of_client(up: Tree, noise: Tensor) -> Tree:
        at = 0

        def one(v: Tensor) -> Tensor:
            nonlocal at
            at += v.numel()
            return v + noise[at - v.numel() : at].view(v.shape).to(v.dtype)

        return tree_map(one, up)

    return vmap(of_client)(up, noise)
