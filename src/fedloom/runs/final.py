"""The folder `final/` of a run: its complete state after the last round, from which it can be given more rounds, and
the models of its clients.

server.safetensors        the server's state
clients.safetensors       private state, running statistics and participations of the clients, one row each
run.safetensors           scores and statistics that the next round needs
models_last.safetensors   the clients' models (see `fedloom.runs.models`) after the last round
models_best.safetensors   ... after the round that is best on validation data, if that is another one
global_last.safetensors   the global model after the last round
global_best.safetensors   ... after its best round, if that is another one
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from fedloom.core.tree import Tree, size_bytes, tree_map
from fedloom.engine.client_store import Snapshot
from fedloom.engine.driver import ServerState
from fedloom.engine.simulation import Simulation, State
from fedloom.storage.files import (
    Damaged,
    Writer,
    read_note,
    read_stacked,
    read_tensors,
    row_blocks,
    stacked_writer,
    tensors_writer,
)
from fedloom.storage.trees import below, named, nested, rebuilt

FOLDER = "final"
SERVER, CLIENTS, RUN = (f"{FOLDER}/{name}.safetensors" for name in ("server", "clients", "run"))
STATE = (SERVER, CLIENTS, RUN)


def models_name(best: bool) -> str:
    """The file of the clients' models."""
    return f"{FOLDER}/models_{'best' if best else 'last'}.safetensors"


def global_name(best: bool) -> str:
    """The file of the global model."""
    return f"{FOLDER}/global_{'best' if best else 'last'}.safetensors"


MODELS = tuple(name(best) for name in (models_name, global_name) for best in (False, True))


def state_files(run: Simulation) -> dict[str, Writer]:
    """The files of a run's complete state."""
    store, driver, note = run.store, run.driver, {"round": run.t}
    screening = {kind: torch.from_numpy(found) for kind, found in run.recent().items()}
    post = {split: torch.from_numpy(found) for split, found in driver.post.items()}
    others = {"post": post, "screening": screening, "stats": driver.stats}

    def rows() -> Iterator[dict[str, Tensor]]:
        for ids in row_blocks(len(store), size_bytes(store.like)):
            yield {"trained": torch.from_numpy(store.trained[ids]), **named(store.read(ids))}

    like = {"trained": torch.zeros((), dtype=torch.int64), **named(store.like)}
    return {
        SERVER: tensors_writer(named(driver.server), note),
        CLIENTS: stacked_writer(like, len(store), rows, note=note),
        RUN: tensors_writer(named(others), note),
    }


def is_complete(folder: Path) -> bool:
    """True if the folder has all files of a final state."""
    return all((folder / name).is_file() for name in STATE)


def restore(folder: Path, run: Simulation) -> bool:
    """Set a run to its final state. False if the folder has none, or files of different rounds, as a process leaves
    them that was killed while it wrote them."""
    if not is_complete(folder):
        return False
    rounds = {read_note(folder / name).get("round") for name in STATE}
    if len(rounds) > 1:
        return False
    server, others = _read_server(folder, run)
    no_rows = tree_map(lambda v: v.cpu()[None][:0], run.store.like)
    nobody = torch.zeros(0, dtype=torch.int64)
    state = State(
        *server[:2],
        post={split: v.numpy() for split, v in below(others, "post").items()},
        store=Snapshot(nobody, nobody, no_rows, nobody),
        recent={kind: v.numpy() for kind, v in below(others, "screening").items()},
        stats=server.stats,
    )
    run.restore(state)
    _restore_clients(folder / CLIENTS, run)
    return True


def restore_server(folder: Path, run: Simulation) -> None:
    """Set the server's side of a run to its final state."""
    run.driver.t, run.driver.server, run.driver.stats = _read_server(folder, run)[0]


def _read_server(folder: Path, run: Simulation) -> tuple[ServerState, dict[str, Tensor]]:
    """The server's side of a final state, and all tensors of the file with the rest."""
    server, note = read_tensors(folder / SERVER)
    others, _ = read_tensors(folder / RUN)
    stats = tree_map(lambda v: v.to(run.task.data.device), nested(below(others, "stats")))
    return ServerState(note["round"], rebuilt(run.server, server), stats), others


def _restore_clients(path: Path, run: Simulation) -> None:
    store = run.store
    with safe_open(path, framework="pt") as file:
        trained = file.get_tensor("trained").numpy()
        if len(trained) != len(store):
            raise Damaged(f"{path.name} has {len(trained)} clients instead of {len(store)}")
        names = [name for name in file.keys() if name != "trained"]  # noqa: SIM118
        store.trained = trained.copy()
        for ids in row_blocks(len(store), size_bytes(store.like)):
            rows = {name: file.get_slice(name)[int(ids[0]) : int(ids[-1]) + 1] for name in names}
            some = ids[trained[ids] > 0]
            here = torch.from_numpy(some - ids[0])
            store.put(some, tree_map(lambda v: v[here], rebuilt(_on_cpu(store.like), rows)))  # noqa: B023


def _on_cpu(tree: Tree) -> Tree:
    return tree_map(lambda v: v.cpu(), tree)


def read_state(folder: Path) -> tuple[Tree, Tree]:
    """State of the server, and private state of the clients (one row each)."""
    server, _ = read_tensors(folder / SERVER)
    clients: Mapping[str, Tensor] = read_stacked(folder / CLIENTS)
    # until format 2, the file had nothing but private state
    return nested(server), nested(below(clients, "own") if "trained" in clients else clients)
