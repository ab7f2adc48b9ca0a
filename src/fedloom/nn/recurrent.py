"""Recurrent layers that can be stacked.

torch's kernels for them have no vmap rule, so under `vmap` the time steps are taken one by one in plain tensor
operations; what does not depend on the previous step (the inputs' part of the gates, in the backward pass the gates and
the gradient of the weights) is one product for all steps. LSTMs have custom kernels on a GPU (`kernels/lstm.py`). For a
single model torch's kernels are used, which are faster.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor, nn

from fedloom.core.autodiff import inside_vmap
from fedloom.core.errors import UserError
from fedloom.nn.kernels.lstm import lstm

State = tuple[Tensor, ...]  # (h, c) of an LSTM, (h,) of the others


class Recurrent(nn.Module):
    """An `nn.LSTM`, `nn.GRU` or `nn.RNN`: the same parameters, the same call."""

    def __init__(self, like: nn.RNNBase, name: str, dropout: nn.Module) -> None:
        super().__init__()
        if like.proj_size:
            raise UserError(
                f"The model's '{name}' has proj_size={like.proj_size}, which cannot be stacked; leave it out."
            )
        self.name, self.mode, self.dropout = name, like.mode, dropout  # between layers
        self.input_size, self.hidden_size, self.num_layers = like.input_size, like.hidden_size, like.num_layers
        self.batch_first, self.bidirectional = like.batch_first, like.bidirectional
        self.directions = ("", "_reverse") if like.bidirectional else ("",)
        self.weights = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if like.bias else 2]
        for key, p in like.named_parameters():
            self.register_parameter(key, p)

    def forward(self, x: Tensor, initial: Any = None) -> tuple[Tensor, Any]:
        if isinstance(x, Tensor) and torch.is_autocast_enabled(
            x.device.type
        ):  # rounding errors would accumulate over the steps
            with torch.autocast(x.device.type, enabled=False):
                return self(x.to(next(self.parameters()).dtype), initial)
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise UserError(f"The model's '{self.name}' must be given batches of padded sequences, a tensor of rank 3.")
        x = x.transpose(0, 1) if self.batch_first else x
        start = self._initial_state(x, initial)
        ends: list[State] = []
        for layer in range(self.num_layers):
            if layer:  # batch first: dropout masks depend on the position in memory, and padding comes last
                x = self.dropout(x.transpose(0, 1)).transpose(0, 1)
            outputs = []
            for direction in self.directions:
                weights = [getattr(self, f"{kind}_l{layer}{direction}") for kind in self.weights]
                state = tuple(s[len(ends)] for s in start)
                out, end = self._run(x.flip(0) if direction else x, state, weights)
                outputs.append(out.flip(0) if direction else out)
                ends.append(end)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        last = tuple(torch.stack(s) for s in zip(*ends, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, last if self.mode == "LSTM" else last[0]

    def flatten_parameters(self) -> None:
        """Does nothing; models call it for cuDNN."""

    def _initial_state(self, x: Tensor, initial: Any) -> State:
        if initial is not None:
            return tuple(initial) if self.mode == "LSTM" else (initial,)
        zero = x.new_zeros(self.num_layers * len(self.directions), x.shape[1], self.hidden_size)
        return (zero, zero) if self.mode == "LSTM" else (zero,)

    def _run(self, x: Tensor, state: State, weights: list[Tensor]) -> tuple[Tensor, State]:
        return _stepwise(self.mode, x, state, weights) if inside_vmap() else _native(self.mode, x, state, weights)


def _native(mode: str, x: Tensor, state: State, weights: list[Tensor]) -> tuple[Tensor, State]:
    options = (weights, len(weights) > 2, 1, 0.0, torch.is_grad_enabled(), False, False)
    one = tuple(s[None] for s in state)
    with _quiet() if x.is_cuda else nullcontext():
        kernel: Any = getattr(_VF, mode.lower())
        out, *end = kernel(x, one if mode == "LSTM" else one[0], *options)
    return out, tuple(s[0] for s in end)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress cuDNN's warning that weights are not in one chunk of memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights", UserWarning)
        yield


def _stepwise(mode: str, x: Tensor, state: State, weights: list[Tensor]) -> tuple[Tensor, State]:
    w_ih, w_hh, *biases = weights
    h = state[0]
    if mode == "LSTM":
        out, cells = lstm(F.linear(x, w_ih), h, state[1], w_hh, biases[0] + biases[1] if biases else None)
        return out, (out[-1], cells[-1])
    b_ih, b_hh = biases or (None, None)
    steps = []
    for z in F.linear(x, w_ih, b_ih).unbind(0):
        u = F.linear(h, w_hh, b_hh)
        if mode == "GRU":
            (z_r, z_z, z_n), (u_r, u_z, u_n) = z.chunk(3, -1), u.chunk(3, -1)
            keep = torch.sigmoid(z_z + u_z)
            h = (1 - keep) * torch.tanh(z_n + torch.sigmoid(z_r + u_r) * u_n) + keep * h
        else:
            h = torch.tanh(z + u) if mode == "RNN_TANH" else torch.relu(z + u)
        steps.append(h)
    return torch.stack(steps), (h,)
