"""`ClientModel`: the trained model of one client, to be used outside of FedLoom."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from fedloom.core.algorithm import Algorithm, Slot
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.core.preprocessing import Preprocessing
from fedloom.core.task import Task
from fedloom.core.tree import Tree
from fedloom.data.user_data.new_samples import encode
from fedloom.nn.plain import PlainNetwork, load_module


class ClientModel(nn.Module):
    """The model that a client predicts with, in evaluation mode.

    It is called with what the client has: a row of its table (a dictionary, a data frame), a picture, a text, or a list
    of these; or with a tensor of samples as they are before scaling. It returns what the method predicts with: one row
    of logits per sample or, if the target is a number, its value. `predict` returns classes, labels or numbers,
    `probabilities` those of classes or labels.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        make: Callable[[], nn.Module],
        head: str,
        model: Tree,
        preprocessing: Preprocessing,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Made by `Result.model`.

        Args:
            algorithm: the method, which may predict by more than the head.
            make: builds the architecture.
            head: name of its last submodule.
            model: what the method's `model` returned for the client.
            preprocessing: how samples are encoded and scaled.
            dtype: type of the parameters.
        """
        super().__init__()
        flat, self._spec = tree_flatten_with_path(model, is_leaf=lambda v: isinstance(v, Slot))
        self._first = next(j for j, (_, value) in enumerate(flat) if isinstance(value, Slot))
        first = flat[self._first][1]
        self.network = load_module(make, first.params, first.buffers, dtype)
        self._others: dict[int, tuple[list[str], Any]] = {}  # place in the tree -> buffers, and their structure
        for j, (path, value) in enumerate(flat):
            if j != self._first:
                leaves, spec = tree_flatten_with_path(value)
                names = [_buffer_name((*path, *rest)) for rest, _ in leaves]
                for name, (_, leaf) in zip(names, leaves, strict=True):
                    self.register_buffer(name, leaf.detach().clone())
                self._others[j] = names, spec
        self.algorithm, self.preprocessing, self.dtype, self.head = algorithm, preprocessing, dtype, head
        self.eval()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes or labels, in the order of the logits; for a number, what it is."""
        return self.preprocessing.classes

    def encode(self, samples: Any) -> Tensor:
        """Samples as the tensor that the model and its exported programs take, one row per sample, before scaling."""
        return torch.as_tensor(np.ascontiguousarray(encode(self.preprocessing, samples)))

    def forward(self, samples: Any) -> Tensor:
        """Logits of samples; values in their unit if the target is a number."""
        x = samples if isinstance(samples, Tensor) else self.encode(samples).to(self.device)
        outputs = self._outputs(self.preprocessing.scale(x, self.dtype))
        return self.preprocessing.targets.predictions(outputs) if self.predicts_numbers else outputs

    def _outputs(self, x: Tensor) -> Tensor:
        if type(self.algorithm).logits is Algorithm.logits:
            return self.network(x)
        network = PlainNetwork(self.network, self.head)
        return self.algorithm.logits(self._task(network), self._model(network), x)

    @property
    def predicts_numbers(self) -> bool:
        """True if the target is a number."""
        return self.preprocessing.target == "number"

    def export(self, folder: str | Path, format: Literal["torch", "onnx", "safetensors"] = "torch") -> Path:
        """Write the model for use without FedLoom, see `fedloom.studies.export.export`; returns its file."""
        from fedloom.studies.export import export

        return export(self, folder, format)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.network.parameters()).device

    def _model(self, network: PlainNetwork) -> Tree:
        """The model as the method knows it."""
        flat: list[Any] = [None] * (len(self._others) + 1)
        flat[self._first] = Slot(network.params, network.buffers, {})
        for j, (names, spec) in self._others.items():
            flat[j] = tree_unflatten([getattr(self, name) for name in names], spec)
        return tree_unflatten(flat, self._spec)

    def _task(self, network: PlainNetwork) -> Task:
        nothing = torch.zeros(0, *self.preprocessing.shape, dtype=self.dtype)
        y, targets = torch.zeros(0, dtype=torch.int64), self.preprocessing.targets
        data = Federation(nothing, y, len(self.classes), {}, targets=targets)
        return Task(data, network)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        about, count = self.preprocessing, sum(p.numel() for p in self.network.parameters())
        shape = "x".join(map(str, about.shape))
        takes = f"{len(about.columns)} columns" if about.columns else f"{about.kind} {shape}"
        names = ", ".join(about.classes[:5]) + ", ..." * (len(about.classes) > 5)
        what = "the number" if self.predicts_numbers else about.target
        return f"ClientModel({self.algorithm.name}, {count} parameters, takes {takes}, predicts {what} {names})"

    @torch.no_grad()
    def probabilities(self, samples: Any) -> Tensor:
        """The probability of each class or label, one row per sample. Outputs that stand for no class do not count."""
        if self.predicts_numbers:
            raise UserError("The model predicts numbers, which have no probabilities; use predict.")
        return self.preprocessing.targets.predictions(self(samples)[..., : len(self.classes)])

    @torch.no_grad()
    def predictions(self, samples: Any) -> Tensor:
        """Probabilities or, if the target is a number, its values."""
        return self(samples) if self.predicts_numbers else self.probabilities(samples)

    @torch.no_grad()
    def predict(self, samples: Any) -> list[Any]:
        """The prediction for each sample: the most probable class, a list of labels (those with a probability of 0.5 or
        more), or a number. If the model predicts a class at every position, it is a list of classes."""
        found = self.predictions(samples)
        if self.predicts_numbers:
            return found.tolist()
        if self.preprocessing.target == "labels":
            return [[name for name, p in zip(self.classes, row, strict=True) if p >= 0.5] for row in found.tolist()]
        return [self._names(c) for c in found.argmax(-1).tolist()]

    def _names(self, best: Any) -> Any:
        return [self._names(c) for c in best] if isinstance(best, list) else self.classes[best]


def _buffer_name(path: tuple[Any, ...]) -> str:
    """The name of a tensor that a method's model has besides the network, such as `extra_V_weight`."""
    return "extra_" + re.sub(r"\W+", "_", keystr(path)).strip("_")
