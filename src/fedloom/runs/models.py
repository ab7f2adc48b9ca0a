"""The models of a run's clients as a file, from which one client's can be read. What is the same for all clients is
stored once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import tree_map

from fedloom.core.algorithm import Slot
from fedloom.core.tree import Tree, size_bytes
from fedloom.storage.files import Damaged, Writer, read_note, stacked_writer
from fedloom.storage.trees import below, named

MAX_KEPT_BYTES = 1 << 30  # of models that are computed once only
Blocks = Callable[[], Iterator[tuple[np.ndarray, Tree]]]  # clients, and their stacked models


def portable(tree: Tree) -> Tree:
    """The tree without momentum, which only training needs."""
    return tree_map(
        lambda v: v._replace(moments={}) if isinstance(v, Slot) else v, tree, is_leaf=lambda v: isinstance(v, Slot)
    )


def models_writer(clients: int, blocks: Blocks, t: int) -> Writer:
    """Writes the models of all clients after round `t`.

    `blocks` computes the models anew each time it is called; it is called twice if they do not fit memory.
    """
    kept: list[tuple[np.ndarray, Tree]] | None = []
    first: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    form: Any = None
    for ids, models in blocks():
        tree = portable(models)
        rows = named(tree, "model")
        if not first:
            form = structure(tree, "model")
            first = {name: v[0] for name, v in rows.items()}
            shared = dict(first)
        shared = {name: v for name, v in shared.items() if bool((rows[name] == v).all())}
        if kept is not None:
            kept.append((ids, tree))
            kept = None if size_bytes([found for _, found in kept]) > MAX_KEPT_BYTES else kept
    own = {name: v for name, v in first.items() if name not in shared}

    def rows_of_clients() -> Iterator[dict[str, Tensor]]:
        for _, models in blocks() if kept is None else kept:
            rows = named(portable(models), "model")
            yield {f"clients/{name}": rows[name] for name in own}

    fixed = {f"shared/{name}": v for name, v in shared.items()}
    note = {"round": t, "clients": clients, "model": form}
    return stacked_writer({f"clients/{name}": v for name, v in own.items()}, clients, rows_of_clients, fixed, note)


def structure(tree: Tree, name: str) -> Any:
    """What a tree is made of, as JSON: a leaf is the name of its tensor, as `named` gives it."""
    if isinstance(tree, Slot):
        return {"slot": [structure(tree.params, f"{name}/params"), structure(tree.buffers, f"{name}/buffers")]}
    if isinstance(tree, dict):
        return {"dict": {key: structure(v, f"{name}/{key}") for key, v in tree.items()}}
    if isinstance(tree, list | tuple):
        return {"list": [structure(v, f"{name}/{j}") for j, v in enumerate(tree)]}
    return name


def rebuild(form: Any, tensors: dict[str, Tensor]) -> Tree:
    """The tree of a `structure`."""
    if isinstance(form, str):
        return tensors[form]
    ((kind, parts),) = form.items()
    if kind == "dict":
        return {key: rebuild(v, tensors) for key, v in parts.items()}
    each = [rebuild(v, tensors) for v in parts]
    return Slot(each[0], each[1], {}) if kind == "slot" else each


class ModelsFile:
    """Reads a file of `models_writer`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note = read_note(path)
        self.round, self.clients = int(self.note["round"]), int(self.note["clients"])

    def client(self, i: int) -> Tree:
        """The model of one client, as its method's `logits` accepts it."""
        return rebuild(self.note["model"], {**self._shared(), **self._rows(i)})

    def _shared(self) -> dict[str, Tensor]:
        return below(self._read(lambda file, name: file.get_tensor(name), "shared/"), "shared")

    def _rows(self, i: int) -> dict[str, Tensor]:
        rows = self._read(lambda file, name: file.get_slice(name)[i : i + 1][0], "clients/")
        return below(rows, "clients")

    def _read(self, get: Callable[[Any, str], Tensor], prefix: str) -> dict[str, Tensor]:
        try:
            with safe_open(self.path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
                return {name: get(file, name).clone() for name in names}
        except (OSError, SafetensorError) as error:
            raise Damaged(f"{self.path.name} cannot be read") from error
