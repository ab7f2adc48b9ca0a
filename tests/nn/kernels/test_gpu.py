"""Which kernels other GPUs use: what they need is asked of the GPU, and what they take fits its shared memory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedloom.nn.kernels import dispatch, gpu
from fedloom.nn.kernels.dispatch import (
    KERNELS,
    NEEDS,
    clear_decisions,
    cuda_kernel,
    decisions,
    use_custom_kernel,
)
from fedloom.nn.kernels.gpu import H100, SHARED_KIB, gpu_properties, limited

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PAGE = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()


@pytest.fixture(autouse=True)
def _no_decisions():
    clear_decisions()
    yield
    clear_decisions()


@pytest.fixture
def as_if(monkeypatch):
    """Kernels are chosen as for a GPU of a compute capability."""

    def prepare(capability):
        monkeypatch.setattr(dispatch, "gpu_properties", lambda: H100._replace(capability=capability))

    return prepare


# -- what a GPU has --------------------------------------------------------------------------------------------------


def properties(major, minor, sms, **more):
    return SimpleNamespace(major=major, minor=minor, multi_processor_count=sms, **more)


@pytest.fixture
def devices(monkeypatch):
    """GPUs of a process, of which the second is the current one."""
    found = [properties(9, 0, 132, shared_memory_per_block_optin=232448), properties(8, 9, 58), properties(8, 7, 16)]
    monkeypatch.setattr(gpu, "CAPABILITY_LIMIT", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    gpu._query.cache_clear()
    yield
    gpu._query.cache_clear()


@pytest.mark.usefixtures("devices")
def test_a_gpu_is_asked_what_it_has():
    assert gpu_properties(torch.device("cuda", 0)) == ((9, 0), 132, 227 << 10)
    for current in (None, CUDA):
        assert gpu_properties(current).capability == (8, 9)


@pytest.mark.usefixtures("devices")
def test_where_torch_does_not_say_how_much_shared_memory_there_is_it_is_that_of_the_architecture():
    assert gpu_properties(torch.device("cuda", 1)).shared_bytes == 99 << 10
    assert gpu_properties(torch.device("cuda", 2)).shared_bytes == 48 << 10  # an architecture that is not listed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_choices_are_those_for_an_h100(monkeypatch):
    monkeypatch.setattr(gpu, "CAPABILITY_LIMIT", None)
    for device in (None, CPU, CUDA):
        assert gpu_properties(device) == H100


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_a_named_architecture_takes_away_and_never_adds(capability):
    for actual, kib in SHARED_KIB.items():
        mine = gpu.GpuProperties(actual, 58, kib << 10)
        assert limited(mine, None) == mine
        found = limited(mine, capability)
        assert found.capability == min(actual, capability)
        assert found.shared_bytes == min(kib, SHARED_KIB[capability]) << 10
        assert found.sms == 58


@pytest.mark.parametrize(("value", "limit"), [("", None), ("sm_86", (8, 6)), (" sm_120 ", (12, 0))])
def test_the_environment_names_an_architecture(value, limit, monkeypatch, caplog):
    monkeypatch.setenv("FEDLOOM_GPU", value)
    assert gpu._capability_limit() == limit
    assert not caplog.records


@pytest.mark.parametrize("value", ["8.6", "a100", "sm_99"])
def test_an_unknown_architecture_has_no_effect_but_a_warning(value, monkeypatch, caplog):
    monkeypatch.setenv("FEDLOOM_GPU", value)
    assert gpu._capability_limit() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"'{value}'" in record.message
    assert "sm_86" in record.message


# -- which kernels ---------------------------------------------------------------------------------------------------


def test_kernels_say_what_the_gpu_does_not_have(as_if):
    as_if((7, 5))
    assert not use_custom_kernel("convolution", "groups")
    assert not use_custom_kernel("matmul")
    assert use_custom_kernel("pooling")
    assert decisions(CUDA) == {
        "convolution": "it needs bfloat16 tensor cores (compute capability 8.0 or later), and this GPU has 7.5",
        "matmul": "it needs TF32 tensor cores (compute capability 8.0 or later), and this GPU has 7.5",
        "pooling": "used",
    }


def test_a_disabled_kernel_is_said_to_be_disabled_on_any_gpu(as_if, monkeypatch):
    as_if((7, 5))
    monkeypatch.setattr(dispatch, "DISABLED", {"matmul"})
    assert not use_custom_kernel("matmul")
    assert "FEDLOOM_DISABLE_KERNELS" in decisions(CUDA)["matmul"]


def test_every_need_is_that_of_a_kernel():
    assert set(NEEDS) <= set(KERNELS)


def rows_of_gpus():
    """The page's table of GPUs: compute capabilities, and what computes convolutions, products, LSTM layers and what
    other kernels compute."""
    for row in re.findall(r"^\| (.*\| \d+ KiB .*) \|$", PAGE, re.MULTILINE):
        _, capabilities, *computed_by = row.split(" | ")
        for capability in capabilities.split(", "):
            yield tuple(map(int, capability.split("."))), computed_by[:4]


@pytest.mark.parametrize(("capability", "computed_by"), list(rows_of_gpus()))
def test_the_page_says_which_kernels_a_gpu_uses(capability, computed_by, as_if):
    as_if(capability)
    named = dict(zip(("convolution", "matmul", "lstm"), computed_by, strict=False))
    for name in set(KERNELS) - {"lstm_hopper"}:  # chosen within "lstm"
        assert named.get(name, computed_by[3]).startswith("Triton" if use_custom_kernel(name) else "PyTorch"), name
    assert ("lstm_hopper" in named["lstm"]) == (capability[0] == 9)


def test_the_page_has_all_architectures():
    assert {capability for capability, _ in rows_of_gpus()} == set(SHARED_KIB)


@pytest.mark.parametrize(("capability", "plain"), [((6, 1), True), ((7, 0), False)])
def test_an_operator_is_computed_by_torch_on_a_gpu_that_is_too_old_for_triton(capability, plain, as_if, monkeypatch):
    """Also where nobody asked whether to use it."""
    registered = []
    operator = SimpleNamespace(_init_fn=lambda x: "plain", register_kernel=lambda device: registered.append)
    monkeypatch.setattr(dispatch, "TRITON", True)
    monkeypatch.setattr(dispatch, "import_module", lambda name: SimpleNamespace(gather=lambda x: "Triton"))
    cuda_kernel(operator, "batch_gather", "batch_gather", "gather")
    as_if(capability)
    (implementation,) = registered
    assert implementation(torch.empty(1)) == ("plain" if plain else "Triton")


# -- what kernels take -----------------------------------------------------------------------------------------------


def test_kernels_compile_for_other_gpus_and_fit_their_shared_memory(tmp_path):
    """With tensor cores where a kernel is used for them; on older GPUs, Triton would compile it without."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, Path(__file__).with_name("compile_kernels.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [(tuple(capability), kernels) for capability, kernels in json.loads(done.stdout)]
    products = {"_correlate", "_weight_gradient", "_product", "_forward", "_backward"}
    assert {name for _, kernels in found for name in kernels} > products
    for capability, kernels in found:
        for name, (shared_bytes, tensor_cores) in kernels.items():
            assert shared_bytes <= SHARED_KIB[capability] << 10, (capability, name)
            assert tensor_cores == (name in products and capability >= (8, 0)), (capability, name)
