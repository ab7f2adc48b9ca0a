"""Decides where custom kernels run.

Every custom operation is a `torch.library` operator with a plain implementation for any device; `cuda_kernel` adds one
for CUDA tensors. Whether a computation uses the operator is decided here, by `use_custom_kernel`: layers ask it while
they run stacked on a GPU, graph passes ask it before they put an operator into a traced graph. A kernel is used only
on GPUs that have what it needs (`NEEDS`). What was decided, and why a kernel was not used, is kept for the user
(`decisions`).

The environment variable FEDLOOM_DISABLE_KERNELS names kernels that are not to be used, separated by commas, or "all".
"""

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fedloom.nn.kernels.gpu import gpu_properties

log = logging.getLogger("fedloom")

TRITON = find_spec("triton") is not None  # comes with CUDA builds of torch
KERNELS = {
    "batch_gather": "takes the samples of a step from memory",
    "channel_sum": "gradients of the biases of convolutions",
    "convolution": "convolutions with weights per client",
    "cross_entropy": "mean cross-entropy and its gradient",
    "dropout": "dropout masks from keys",
    "lstm": "all time steps of an LSTM layer, in Triton",
    "lstm_hopper": "all time steps of an LSTM layer of at most 100 units, for Hopper GPUs",
    "matmul": "products with weights per client",
    "pooling": "max-pooling, ReLU and their gradient",
}
# Without these tensor cores, Triton compiles the same products for the other cores, many times slower.
NEEDS = {
    "convolution": ("bfloat16 tensor cores", (8, 0)),
    "lstm": ("TF32 tensor cores", (8, 0)),
    "matmul": ("TF32 tensor cores", (8, 0)),
}
TRITON_NEEDS = "Triton", (7, 0)  # as torch's own compiler demands it
USED = "used"
_decisions: dict[str, str] = {}


def _disabled() -> set[str]:
    names = {name.strip() for name in os.environ.get("FEDLOOM_DISABLE_KERNELS", "").split(",")} - {""}
    for name in sorted(names - {"all", *KERNELS}):
        log.warning("FEDLOOM_DISABLE_KERNELS names '%s'; known: all, %s.", name, ", ".join(KERNELS))
    return set(KERNELS) if "all" in names else names


DISABLED = _disabled()


def has_cuda_kernels(x: Tensor) -> bool:
    """True if the operators of this package compute the tensor by kernels and not by plain operations."""
    return x.is_cuda and TRITON


def use_custom_kernel(name: str, obstacle: str | None = None) -> bool:
    """True if a computation on the GPU is to use the kernel; `obstacle` is a reason against it. Remembers the
    decision."""
    obstacle = gpu_obstacle(name) or obstacle
    if name in DISABLED:
        obstacle = "disabled by FEDLOOM_DISABLE_KERNELS"
    _note_decision(name, obstacle)
    return obstacle is None


def gpu_obstacle(name: str) -> str | None:
    """What the kernel needs and the current GPU does not have, or None."""
    what, needed = NEEDS.get(name, TRITON_NEEDS)
    capability = gpu_properties().capability
    if capability >= needed:
        return None
    least, found = (f"{major}.{minor}" for major, minor in (needed, capability))
    return f"it needs {what} (compute capability {least} or later), and this GPU has {found}"


def _note_decision(name: str, obstacle: str | None) -> None:
    """Remember that a kernel was used, or why it was not; that it was used somewhere counts."""
    decision = obstacle or USED
    if _decisions.get(name) in (USED, decision):
        return
    _decisions[name] = decision
    log.info("Kernel %s (%s): %s.", name, KERNELS[name], "used" if obstacle is None else f"not used, {obstacle}")


def decisions(device: torch.device) -> dict[str, str]:
    """For every kernel that was asked about since `clear_decisions`: "used", or why it was not."""
    return dict(sorted(_decisions.items())) if device.type == "cuda" else {"all": "not used: they need a CUDA GPU"}


def clear_decisions() -> None:
    """Forget what was decided for an earlier run."""
    _decisions.clear()


def cuda_kernel(operator: Any, name: str, module: str, function: str) -> None:
    """Register `fedloom.nn.kernels.triton.<module>.<function>` as the operator's CUDA implementation, unless Triton is
    missing or the kernel `name` is disabled. On a GPU that cannot run it, the plain implementation is used."""
    if not TRITON or name in DISABLED:
        return

    def implementation(*args: Any) -> Any:
        if gpu_obstacle(name):
            return operator._init_fn(*args)
        return getattr(import_module(f"fedloom.nn.kernels.triton.{module}"), function)(*args)

    operator.register_kernel("cuda")(implementation)


def vmap_over_clients(operator: Any, tensors: int) -> None:
    """Register a vmap rule for an operator whose tensors all have the clients as first axis: the new axis is merged
    into it. The first `tensors` arguments are tensors (or None)."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        merged = [
            a if a is None else (a.expand(size, *a.shape) if d is None else a.movedim(d, 0)).flatten(0, 1)
            for a, d in zip(args[:tensors], in_dims, strict=False)
        ]
        found = operator(*merged, *args[tensors:])
        if isinstance(found, Tensor):
            return found.unflatten(0, (size, -1)), 0
        return tuple(v.unflatten(0, (size, -1)) for v in found), (0,) * len(found)

    torch.library.register_vmap(operator, rule)
