"""Keeps a site's personal models, so that they can be used when the run is over, and before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.tree import Tree
from fedloom.runs.models import models_writer
from fedloom.storage.files import Damaged, json_writer, read_json, write_file
from fedloom.studies.personal_models import FILE, models_file


class SiteModels:
    """The models of the last evaluated round and of the best one, which the server names."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """`about` has what is needed to build the model (`fedloom.studies.personal_models`)."""
        self.folder, self.about = folder, about
        try:
            self.rounds: dict[str, int] = read_json(folder / FILE, "rounds") if (folder / FILE).exists() else {}
        except Damaged:
            self.rounds = {}

    def keep(self, t: int, model: Tree, best: int) -> None:
        """Keep the model after round t, stacked with one row. `best` is the best of the rounds before it, 0 if there
        is none."""
        write_file(models_file(self.folder, t), models_writer(1, lambda: iter([(np.zeros(1, np.int64), model)]), t))
        self.rounds = {"last": t, "best": best or t}
        self._written()

    def end(self, best: int) -> None:
        """The run is over, and this was its best round."""
        if self.rounds:
            self.rounds = {**self.rounds, "best": best}
            self._written()

    def _written(self) -> None:
        write_file(self.folder / FILE, json_writer({**self.about, "rounds": self.rounds}))
        keep = {models_file(self.folder, t) for t in self.rounds.values()}
        for old in set(self.folder.glob("model-*.safetensors")) - keep:
            old.unlink()
