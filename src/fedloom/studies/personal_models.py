"""The personal models that a site of a federation has kept of the runs in which it took part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from fedloom.config.resolve import described
from fedloom.core.algorithm import Slot
from fedloom.core.errors import UserError, nearest, shown
from fedloom.core.preprocessing import Preprocessing
from fedloom.core.tree import Tree
from fedloom.runs.models import ModelsFile
from fedloom.storage.files import Damaged, read_json
from fedloom.studies.build import module_maker
from fedloom.studies.client_model import ClientModel
from fedloom.studies.models import Architecture, When

FILE = "models.json"  # in the folder of a run at a site
RUNS = "runs"  # in the folder of a site


def models_file(folder: Path, t: int) -> Path:
    """The model after round t."""
    return folder / f"model-{t:08d}.safetensors"


def find(path: Path) -> Path | None:
    """The folder with personal models that a path stands for: of a run at a site or, for a site, of the last run of
    which it has models. None if it has none."""
    if (path / FILE).exists():
        return path
    runs = [file.parent for file in (path / RUNS).glob(f"*/{FILE}")]
    return max(runs, key=lambda folder: (folder / FILE).stat().st_mtime, default=None)


class PersonalModels:
    """A client's models of one run, at its site: after the round that is best on all clients' validation data, and
    after the last one in which the site was there.

    >>> import fedloom
    >>> models = fedloom.load("federation/site-0")  # doctest: +SKIP
    >>> models.model().predict({"age": 61, "pulse": 72})  # doctest: +SKIP
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.about: dict[str, Any] = read_json(folder / FILE)
            self.config: dict[str, Any] = self.about["config"]
            self.rounds: dict[When, int] = self.about["rounds"]
            self.name = str(self.about["client"])
        except (Damaged, OSError, KeyError, TypeError) as error:
            raise UserError(f"{folder / FILE} is damaged ({error}); take part in another run.") from None

    def __repr__(self) -> str:
        method = self.config["algorithm"]["name"]
        return f"PersonalModels({method}, client {self.name}, rounds {self.rounds}, {self.folder})"

    def model(self, client: int | str | None = None, when: When = "best") -> ClientModel:
        """The model that this client predicts with; of other clients, a site has none."""
        if client is not None and str(client) != self.name:
            raise UserError(f"This site has the models of client {self.name} only, not of '{shown(client)}'.")
        if when not in ("best", "last"):
            raise UserError(f"when cannot be '{shown(when)}'; {nearest(str(when), ('best', 'last'))}")
        return self.models.architecture().module(self.models.client(0, when == "best"))

    def global_model(self, when: When = "best") -> ClientModel:
        """A site has its personal model only."""
        raise UserError("A site has its personal model only; the global model is in the run's folder at the server.")

    def predict(self, path: str | Path, when: When = "best") -> pa.Table:
        """Predictions for the samples in a file or folder, one row each, as `Result.predict` makes them."""
        from fedloom.studies.predict import predict

        return predict(self, path, self.name, when).table()

    @cached_property
    def models(self) -> ModelsAtSite:
        """Where the weights are."""
        return ModelsAtSite(self)


class ModelsAtSite:
    """The weights of one client's models, for `fedloom.studies.models`."""

    clients = 1

    def __init__(self, of: PersonalModels) -> None:
        self.of = of
        self.names: Sequence[str] = (of.name,)

    def architecture(self) -> Architecture:
        config = self.of.config
        algorithm: Any = described("algorithm", config)
        model: Any = described("model", config)
        inputs = Preprocessing.from_json(self.of.about["preprocessing"])
        make, head = module_maker(model, config["head"], inputs.shape, len(inputs.classes), inputs.token_ids)
        dtype = torch.float64 if config["dtype"] == "float64" else torch.float32
        return Architecture(algorithm, make, head, inputs, dtype)

    def client(self, i: int, best: bool) -> Tree:
        t = self.of.rounds["best" if best else "last"]
        path = models_file(self.of.folder, t)
        if not path.exists():
            raise UserError(f"This site was not there after round {t}, which is the best; ask for when=last.")
        try:
            return ModelsFile(path).client(0)
        except Damaged as error:
            raise UserError(
                f"{path} is damaged ({error}); ask for another round, or take part in another run."
            ) from None

    def shared(self, best: bool) -> Slot | None:
        return None
