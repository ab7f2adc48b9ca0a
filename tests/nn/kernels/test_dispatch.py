"""Which computations custom kernels take, and that every operator names a kernel that exists: without a GPU, no other
test would miss one."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fedloom.nn.kernels import dispatch
from fedloom.nn.kernels.dispatch import (
    KERNELS,
    clear_decisions,
    decisions,
    has_cuda_kernels,
    use_custom_kernel,
    vmap_over_clients,
)

FOLDER = Path(dispatch.__file__).parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def python(code, **environment):
    """What a new process prints as JSON."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -- decisions -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_decisions():
    clear_decisions()
    yield
    clear_decisions()


@pytest.mark.parametrize("installed", [False, True])
def test_tensors_on_a_gpu_have_kernels_where_triton_is_installed(installed, monkeypatch):
    monkeypatch.setattr(dispatch, "TRITON", installed)
    with FakeTensorMode():
        assert has_cuda_kernels(torch.empty(1, device="cuda")) is installed
    assert not has_cuda_kernels(torch.empty(1))


def test_decisions_and_their_reasons_are_remembered():
    assert use_custom_kernel("pooling")
    assert not use_custom_kernel("matmul", "too small")
    assert decisions(CUDA) == {"matmul": "too small", "pooling": "used"}
    assert use_custom_kernel("matmul")
    assert not use_custom_kernel("matmul", "too small again")
    assert decisions(CUDA)["matmul"] == "used"  # somewhere
    clear_decisions()
    assert decisions(CUDA) == {}


def test_a_later_reason_replaces_an_earlier_one():
    for reason in ("too small", "not contiguous"):
        assert not use_custom_kernel("matmul", reason)
    assert decisions(CUDA) == {"matmul": "not contiguous"}


def test_decisions_are_logged_once(caplog):
    with caplog.at_level("INFO", logger="fedloom"):
        for _ in range(2):
            use_custom_kernel("matmul", "too small")
        for _ in range(2):
            use_custom_kernel("matmul")
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["not used, too small.", "used."]
    assert KERNELS["matmul"] in caplog.text


def test_without_a_gpu_no_kernel_is_used():
    use_custom_kernel("matmul")
    assert list(decisions(CPU)) == ["all"]
    assert decisions(CPU)["all"].startswith("not used")


# -- the environment variable ----------------------------------------------------------------------------------------


def test_kernels_can_be_disabled(monkeypatch):
    monkeypatch.setattr(dispatch, "DISABLED", {"matmul"})
    assert not use_custom_kernel("matmul")
    assert use_custom_kernel("pooling")
    assert "FEDLOOM_DISABLE_KERNELS" in decisions(CUDA)["matmul"]


@pytest.mark.parametrize(
    ("value", "disabled"), [("", set()), ("matmul", {"matmul"}), (" matmul, lstm,", {"matmul", "lstm"}), ("all", None)]
)
def test_the_environment_names_the_kernels_that_are_disabled(value, disabled, monkeypatch):
    monkeypatch.setenv("FEDLOOM_DISABLE_KERNELS", value)
    assert dispatch._disabled() == (set(KERNELS) if disabled is None else disabled)


def test_a_process_with_disabled_kernels_has_no_cuda_implementation_of_them():
    found = python(
        """
import json, torch
from fedloom.nn.kernels import matmul, pooling
from fedloom.nn.kernels.dispatch import decisions, use_custom_kernel
print(json.dumps({
    "used": [use_custom_kernel(name) for name in ("matmul", "pooling")],
    "registered": [
        torch._C._dispatch_has_kernel_for_dispatch_key(f"fedloom::{name}", "CUDA")
        for name in ("batched_matmul", "max_pool")
    ],
    "decisions": decisions(torch.device("cuda")),
}))
""",
        FEDLOOM_DISABLE_KERNELS="matmul,lstm",
    )
    assert found["used"] == [False, True]
    assert found["registered"] == [False, dispatch.TRITON]
    assert "FEDLOOM_DISABLE_KERNELS" in found["decisions"]["matmul"]


# -- operators and their kernels -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registered():
    """What all modules register: operator, its number of arguments, kernel, module and function."""
    return python(
        """
import json, pkgutil
from importlib import import_module
from fedloom.nn import kernels
from fedloom.nn.kernels import dispatch
found = []
def note(operator, name, module, function):
    found.append([operator._qualname, len(operator._opoverload._schema.arguments), name, module, function])
dispatch.cuda_kernel = note
for info in pkgutil.iter_modules(kernels.__path__):
    if not info.ispkg:
        import_module(f"fedloom.nn.kernels.{info.name}")
print(json.dumps(found))
"""
    )


def functions(module):
    """The functions of a module in nn/kernels/triton, with their numbers of arguments, without importing it."""
    tree = ast.parse((FOLDER / "triton" / f"{module}.py").read_text())
    parts = [part for part in tree.body if isinstance(part, ast.FunctionDef)]
    return {part.name: (len(part.args.args) - len(part.args.defaults), len(part.args.args)) for part in parts}


def test_every_operator_has_a_kernel_that_takes_its_arguments(registered):
    for operator, arguments, kernel, module, function in registered:
        assert kernel in KERNELS, operator
        least, most = functions(module)[function]
        assert least <= arguments <= most, operator


def test_every_triton_module_and_every_kernel_is_used_by_an_operator(registered):
    modules = {path.stem for path in (FOLDER / "triton").glob("*.py")} - {"__init__"}
    assert {module for _, _, _, module, _ in registered} == modules
    assert {kernel for _, _, kernel, _, _ in registered} == set(KERNELS) - {"lstm_hopper"}  # chosen within "lstm"


def test_every_operator_of_the_package_is_registered(registered):
    defined = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(decorator_list=[ast.Call(args=[ast.Constant(str() as name)])]):
                    defined.add(name)
    assert len(defined) > 10
    assert {operator for operator, *_ in registered} == defined


# -- vmap ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fedloom_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, y: torch.Tensor | None, by: float) -> torch.Tensor:
    return by * x if y is None else by * x + y


vmap_over_clients(scaled, 2)


def test_vmap_merges_its_axis_with_the_clients():
    x, y = torch.randn(2, 3, 4), torch.randn(3, 4)
    torch.testing.assert_close(torch.func.vmap(lambda x: scaled(x, y, 2.0))(x), 2 * x + y)
    torch.testing.assert_close(torch.func.vmap(lambda x: scaled(x, None, 2.0), 1, 1)(x), 2 * x)
