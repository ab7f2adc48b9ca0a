"""Checkpoints: everything a run needs to go on, one file each; the two newest are kept."""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.core.tree import Tree, tree_map
from fedloom.engine.client_store import Snapshot
from fedloom.engine.driver import GlobalModel, ServerState
from fedloom.engine.simulation import BestState, Simulation, State
from fedloom.runs.folders import log_only_to
from fedloom.storage.files import Damaged, read_tensors, sync_folder, tensors_writer, write_file
from fedloom.storage.trees import below, named, nested, rebuilt

log = logging.getLogger("fedloom")

NAME = re.compile(r"round-\d{8,}\.safetensors")
KEPT = 2
MAX_OVERHEAD = 0.05  # share of a run's time that checkpoints may take
MIN_SECONDS = 10.0  # between two checkpoints
MAX_WAITING_BYTES = 256 << 20  # rows of a store on disk that wait in memory for a checkpoint


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, every: int | None = None) -> None:
        """`every` is a number of rounds; without it, checkpoints are made as often as `MAX_OVERHEAD` allows."""
        self.folder, self.every = folder, every
        self.run: tuple[str, ...] = ("",)  # what identifies the run; other versions of FedLoom used the others
        self.last = time.perf_counter()
        self.cost = 0.0

    def due(self, run: Simulation) -> bool:
        """True if a checkpoint should be made after this round."""
        if self.every is not None:
            return run.t % self.every == 0
        if sum(store.waiting_bytes() for store in run.stores) > MAX_WAITING_BYTES:
            return True
        return time.perf_counter() - self.last >= max(MIN_SECONDS, self.cost / MAX_OVERHEAD)

    def save(self, run: Simulation, before: Callable[[], None] = lambda: None) -> None:
        """Make a checkpoint. `before` writes files that must not be older than the checkpoint; what they have beyond it
        is cut off on resume."""
        start = time.perf_counter()
        before()
        state = run.state()
        note: dict[str, Any] = {"round": state.t, "run": self.run[0]}
        if state.best is not None:
            note["best_round"] = state.best.server.t
        if state.best_global is not None:
            note["best_global_round"] = state.best_global.t
        write_file(self._path(state.t), tensors_writer(_tensors(state), note))
        for store in run.stores:
            store.committed()
        for old in self.found()[KEPT:]:
            old.unlink()
        self.last = time.perf_counter()
        self.cost = self.last - start
        log.info("Checkpoint of round %d, %.2f s.", state.t, self.cost)

    def restore(self, run: Simulation, up_to: int | None = None) -> None:
        """Set a run to the newest undamaged checkpoint; without one it starts from the beginning. With `up_to`, a newer
        checkpoint than this round is used only if no other is left. Those that are newer than the run are deleted."""
        self.last = time.perf_counter()
        found = self.found() if up_to is None else self._up_to(up_to)
        for path, instead in zip(found, [*found[1:], None], strict=False):
            try:
                run.restore(self._load(path, run))
                break
            except Damaged as error:
                self._set_aside(path, error, instead)
        else:
            for store in run.stores:
                store.clear()
        for path in self.found():
            if _round(path) > run.t:
                path.unlink()

    def found(self) -> list[Path]:
        """Paths of all checkpoints, newest first."""
        found = (path for path in self.folder.glob("round-*") if NAME.fullmatch(path.name) and path.is_file())
        return sorted(found, key=_round, reverse=True)

    def newest(self) -> int:
        """The round of the newest undamaged checkpoint, 0 if there is none."""
        found = self.found()
        for path, instead in zip(found, [*found[1:], None], strict=False):
            try:
                self._read(path)
                return _round(path)
            except Damaged as error:
                with log_only_to(self.folder.parent):
                    self._set_aside(path, error, instead)
        return 0

    def _up_to(self, up_to: int) -> list[Path]:
        """The checkpoints in the order in which they are tried: first those up to this round, the nearest first. A
        single one is left out if a run that is trained together with this one has none yet."""
        found = self.found()
        if up_to == 0 and len(found) < KEPT:
            return []
        return sorted(found, key=lambda path: (_round(path) > up_to, abs(_round(path) - up_to)))

    def _set_aside(self, path: Path, error: Damaged, instead: Path | None) -> None:
        if instead is None:
            then = "the run starts from the beginning"
        else:
            then = f"the one {'before' if _round(instead) < _round(path) else 'after'} it is used"
        log.warning("Checkpoint %s is damaged (%s); %s.", path.name, error, then)
        path.replace(path.with_suffix(".damaged"))
        sync_folder(self.folder)

    def _path(self, t: int) -> Path:
        return self.folder / f"round-{t:08d}.safetensors"

    def _load(self, path: Path, run: Simulation) -> State:
        return _state(*self._read(path), run)

    def _read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, note = read_tensors(path)
        if "run" in note and note["run"] not in self.run:
            raise Damaged("it belongs to another run")
        return tensors, note


def _round(path: Path) -> int:
    return int(path.stem.removeprefix("round-"))


def _tensors(state: State) -> dict[str, Tensor]:
    parts = {
        "server": state.server,
        "post": {split: torch.from_numpy(found) for split, found in state.post.items()},
        "store": state.store._asdict(),
        "screening": {kind: torch.from_numpy(sizes) for kind, sizes in state.recent.items()},
        "stats": state.stats,
    }
    if state.best is not None:
        parts["best"] = {"server": state.best.server.server, "stats": state.best.server.stats}
        parts["best"]["store"] = state.best.store._asdict()
    if state.best_global is not None:
        parts["best_global"] = {"params": state.best_global.params, "stats": state.best_global.stats}
    return named(parts)


def _state(tensors: dict[str, Tensor], note: dict[str, Any], run: Simulation) -> State:
    best = None
    if "best_round" in note:
        server = ServerState(
            note["best_round"], rebuilt(run.server, tensors, "best/server"), _stats(tensors, "best/stats", run)
        )
        best = BestState(server, _snapshot(tensors, "best/store", run))
    best_global = None
    if "best_global_round" in note:
        params = _moved(below(tensors, "best_global/params"), run)
        best_global = GlobalModel(note["best_global_round"], params, _stats(tensors, "best_global/stats", run))
    return State(
        t=note["round"],
        server=rebuilt(run.server, tensors, "server"),
        post={k: v.numpy() for k, v in below(tensors, "post").items()},
        store=_snapshot(tensors, "store", run),
        recent={k: v.numpy() for k, v in below(tensors, "screening").items()},
        stats=_stats(tensors, "stats", run),
        best=best,
        best_global=best_global,
    )


def _snapshot(tensors: dict[str, Tensor], prefix: str, run: Simulation) -> Snapshot:
    store = run.store
    nothing = torch.zeros(0, dtype=torch.int64)
    like = Snapshot(nothing, nothing, tree_map(lambda v: v.cpu(), store.like), nothing)
    digest = f"{prefix}/digest"  # there since format 5
    saved = Snapshot(**rebuilt(like._asdict(), {digest: nothing, **tensors}, prefix))
    if len(saved.trained) not in (len(saved.ids), len(store)):  # until format 4, of all clients
        raise Damaged(f"it has participations of {len(saved.trained)} clients instead of {len(saved.ids)}")
    if len(saved.ids) and int(saved.ids.max()) >= len(store):
        raise Damaged(f"it has a client {int(saved.ids.max())}, and the run has {len(store)} clients")
    return saved


def _stats(tensors: dict[str, Tensor], prefix: str, run: Simulation) -> Tree:
    return _moved(nested(below(tensors, prefix)), run)


def _moved(tree: Tree, run: Simulation) -> Tree:
    return tree_map(lambda v: v.to(run.task.data.device), tree)
