"""Triton kernels run in Triton's interpreter where there is no GPU."""

import os
from importlib import import_module

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and the kernels are imported, which no test module does


@pytest.fixture(scope="session")
def device():
    """The device that kernels are tested on."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def triton_module():
    """Imports a module of `fedloom.nn.kernels.triton` by its name, or skips the test."""

    def load(name):
        pytest.importorskip("triton")
        return import_module(f"fedloom.nn.kernels.triton.{name}")

    return load


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
