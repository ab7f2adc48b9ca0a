"""A trained model as a plain `torch.nn.Module` with torch's own layers, for use outside of training."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core.algorithm import Output
from fedloom.core.errors import UserError
from fedloom.core.tree import Params


def load_module(make: Callable[[], nn.Module], params: Params, buffers: Params, dtype: torch.dtype) -> nn.Module:
    """A new module in evaluation mode, with these parameters and running statistics. Raises UserError if they are those
    of another architecture."""
    with torch.random.fork_rng(devices=[]):  # leave the global generator as it was
        module = make().to(dtype)
    state, weights = module.state_dict(), {**params, **buffers}
    needed = {name for name, _ in module.named_parameters()}
    for name in sorted({*needed, *weights}):
        if name not in state or name not in weights or state[name].shape != weights[name].shape:
            raise UserError(f"The architecture does not fit the trained weights at '{name}'; give the one of the run.")
    module.load_state_dict(weights, strict=False)
    return module.eval().requires_grad_(False)


class PlainNetwork:
    """A module as pure functions of its parameters, in evaluation mode: what a method's `logits` needs of a
    `fedloom.nn.network.Network`.

    The module has one set of weights, with which it is called as it is; other weights are put in its place for a call.
    """

    def __init__(self, module: nn.Module, head: str) -> None:
        self.module, self.head = module, module.get_submodule(head)
        self.prefix = f"{head}."

    @property
    def params(self) -> Params:
        """The module's own parameters."""
        return dict(self.module.named_parameters())

    @property
    def buffers(self) -> Params:
        """The module's own running statistics."""
        return dict(self.module.named_buffers())

    def apply(
        self, params: Params, buffers: Params, x: Tensor, *, train: bool, mask: Any = None, key: Any = None
    ) -> Output:
        """A forward pass."""
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits = self._call(self.module, params, buffers, x)
        finally:
            hook.remove()
        return Output(logits, seen[0], buffers)

    def apply_head(self, params: Params, buffers: Params, features: Tensor) -> Tensor:
        """The head alone."""
        return self._call(self.head, self._of_head(params), self._of_head(buffers), features)

    def _of_head(self, values: Params) -> Params:
        return {k.removeprefix(self.prefix): v for k, v in values.items() if k.startswith(self.prefix)}

    def _call(self, module: nn.Module, params: Params, buffers: Params, x: Tensor) -> Tensor:
        mine: Mapping[str, Tensor] = dict(module.named_parameters())
        if all(params[name] is value for name, value in mine.items()):
            return module(x)
        return functional_call(module, {**params, **buffers}, (x,))
