"""Trained models as files for other programs."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save

from fedloom.core.errors import UserError, oserror_as_user_error
from fedloom.storage.files import json_writer, write_file
from fedloom.studies.client_model import ClientModel

Format = Literal["torch", "onnx", "safetensors"]
FILES: dict[str, str] = {"torch": "model.pt2", "onnx": "model.onnx", "safetensors": "model.safetensors"}
TOLERANCE = 1e-5  # between an exported program and the model


def export(model: ClientModel, folder: str | Path, format: Format = "torch") -> Path:
    """Write a model for use without FedLoom, and beside it `preprocessing.json`, which says how samples are encoded.

    Args:
        model: see `Result.model`.
        folder: a folder for the files; it is made if it is not there.
        format: `torch`, a program of `torch.export`; `onnx`; or `safetensors`, the weights alone.

    Returns:
        The file of the model. Programs take a batch of encoded samples before scaling, as `ClientModel.encode` returns
        it, and return logits or, if the target is a number, its values.
    """
    place = Path(folder)
    with oserror_as_user_error(place):
        place.mkdir(parents=True, exist_ok=True)
    path = place / FILES[format]
    if format == "safetensors":
        # copies, because safetensors refuses tensors that share memory
        weights = {k: v.clone(memory_format=torch.contiguous_format) for k, v in model.state_dict().items()}
        write_file(path, lambda file: file.write(save(weights)))
    elif format == "torch":
        program = _program(model)
        write_file(path, lambda file: torch.export.save(program, file))
    else:
        _export_onnx(model, path)
    write_file(place / "preprocessing.json", json_writer(model.preprocessing.to_json()))
    return path


def example(model: ClientModel, count: int = 2) -> torch.Tensor:
    """A batch of encoded samples of the right type and shape."""
    about, draw = model.preprocessing, np.random.default_rng(0)
    shape = (count, *about.shape)
    if about.dtype == "int64":
        return torch.from_numpy(draw.integers(0, about.token_ids or 2, shape))
    if about.dtype == "uint8":
        return torch.from_numpy(draw.integers(0, 256, shape, dtype=np.uint8))
    return torch.from_numpy(draw.normal(size=shape)).to(getattr(torch, about.dtype))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' warnings, which are about torch's own code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _program(model: ClientModel) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    with _quiet(), torch.no_grad():
        return torch.export.export(model, (example(model),), dynamic_shapes=({0: batch},), strict=False)


def _export_onnx(model: ClientModel, path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"ONNX needs the package '{error.name}'; install it with: pip install 'fedloom[onnx]', or use torch."
        ) from None
    x = example(model, 3)
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                _program(model), (example(model),), dynamo=True, verbose=False, input_names=["samples"],
                output_names=["values" if model.predicts_numbers else "logits"],
            )  # fmt: skip
            assert program is not None
            expected = model(x).numpy()
    except torch.onnx.OnnxExporterError as error:
        operator = re.search(r"(?:aten|prims|fedloom)[.:]+[\w.]+", str(error))
        name = operator[0] if operator else str(error).strip().splitlines()[0]
        raise UserError(f"ONNX has no operator for {name}, which this model uses; use the format torch.") from None
    with _quiet(), oserror_as_user_error(path):
        program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    worst = float(np.abs(found - expected).max())
    if not worst <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise UserError(f"The ONNX program gives other results (by {worst:.2g}); use the format torch.")
