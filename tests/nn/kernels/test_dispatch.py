"""What goes to kernels of ours, and that they are there: without a GPU nobody would miss one."""

import ast
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fedloom.nn.kernels import dispatch as module
from fedloom.nn.kernels.dispatch import ours

FOLDER = Path(module.__file__).parent


@pytest.mark.parametrize("there", [False, True])
def test_what_is_on_a_gpu_is_taken_where_triton_is(there, monkeypatch):
    monkeypatch.setattr(module, "TRITON", there)
    with FakeTensorMode():
        assert ours(torch.empty(1, device="cuda")) is there
    assert not ours(torch.empty(1))


def test_kernels_that_are_called_are_there():
    called = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(ast.Call(ast.Name("triton"), [ast.Constant(name)]), function):
                    called.add((name, function))
    there = {path.stem.removesuffix("_triton") for path in FOLDER.glob("*_triton.py")}
    assert {name for name, _ in called} == there - {"lstm"}  # which is chosen by size
    for name, function in called:
        text = (FOLDER / f"{name}_triton.py").read_text()
        assert function in [part.name for part in ast.parse(text).body if isinstance(part, ast.FunctionDef)]
