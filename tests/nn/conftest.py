"""What tests of networks and kernels share. Where there is no GPU, Triton's interpreter runs the kernels."""

from importlib import import_module

import pytest
import torch


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
