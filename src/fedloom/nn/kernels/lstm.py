"""All time steps of an LSTM layer with weights per client, differentiable any number of times.

From z = W_ih x: (i, f, g, o) = z + b + W_hh h; c' = s(f) c + s(i) tanh(g); h' = s(o) tanh(c'). Plain tensor operations
take one time step after another; what does not depend on the previous step is one operation for all. On a GPU in
float32, one kernel forward and one backward take all steps of all clients: `hopper/lstm.cu` on a Hopper GPU for layers
whose weights fit the registers of one SM, `triton/lstm.py` otherwise.
"""

from typing import Any

import torch
from torch import Tensor

from fedloom.nn.kernels.dispatch import cuda_kernel, has_cuda_kernels, use_custom_kernel, vmap_over_clients

Gates = tuple[Tensor, Tensor, Tensor, Tensor]


def lstm(z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """z (t, b, 4 h), h and c (b, h), w (4 h, h), bias (4 h): h and c after every step."""
    if not _use_kernel(z):
        return Stepwise.apply(z if bias is None else z + bias, h, c, w)
    bias = w.new_zeros(len(w)) if bias is None else bias
    if torch.is_grad_enabled():
        hs, cs, _ = Lstm.apply(z, h, c, w, bias)
    else:
        hs, cs, _ = _one(lstm_forward(*_stacked(z, h, c, w, bias), False))
    return hs, cs


def _use_kernel(z: Tensor) -> bool:
    return has_cuda_kernels(z) and use_custom_kernel("lstm", None if z.dtype == torch.float32 else "not float32")


# -- plain operations -------------------------------------------------------------------------------------------------


def _steps(z: Tensor, h: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    w = w.t().contiguous()  # a third faster than a transposed view in every step
    hs, cs = [], []
    for step in z.unbind(0):
        i, f, g, o = (step + h @ w).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        hs.append(h)
        cs.append(c)
    return torch.stack(hs), torch.stack(cs)


def _given(first: Tensor, states: Tensor) -> Tensor:
    """The state that each step starts from."""
    return torch.cat([first[None], states[:-1]])


def _gates(z: Tensor, before: Tensor, w: Tensor) -> Gates:
    i, f, g, o = (z + before @ w.t()).chunk(4, -1)
    return torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)


def _back(dhs: Tensor, dcs: Tensor, gates: Gates, c: Tensor, cs: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Backpropagation through time: gradients to z, h and c."""
    (i, f, g, o), cell, out = gates, _given(c, cs), torch.tanh(cs)
    slope = torch.cat([g * i * (1 - i), cell * f * (1 - f), i * (1 - g * g), out * o * (1 - o)], -1)
    through = o * (1 - out * out)  # from h' to c'
    dh, dc, dz = torch.zeros_like(c), torch.zeros_like(c), []
    steps = (v.unbind(0)[::-1] for v in (dhs, dcs, through, slope, f))
    for dh_t, dc_t, through_t, slope_t, f_t in zip(*steps, strict=True):
        dh = dh + dh_t
        dc = dc + dc_t + dh * through_t
        dz.append(torch.cat([dc, dc, dc, dh], -1) * slope_t)
        dh, dc = dz[-1] @ w, dc * f_t
    return torch.stack(dz[::-1]), dh, dc


def _gradients(
    dhs: Tensor, dcs: Tensor, z: Tensor, h: Tensor, c: Tensor, w: Tensor, hs: Tensor, cs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to z, h, c and w, from inputs and outputs alone."""
    dz, dh, dc = _back(dhs, dcs, _gates(z, _given(h, hs), w), c, cs, w)
    return dz, dh, dc, _to_weights(dz, h, hs)


def _to_weights(dz: Tensor, h: Tensor, hs: Tensor) -> Tensor:
    """The gradient to w. The first step is computed separately: concatenating its h would copy all the others."""
    return torch.addmm(dz[0].t() @ h, dz[1:].flatten(0, 1).t(), hs[:-1].flatten(0, 1))


class Stepwise(torch.autograd.Function):
    """The layer by plain operations, one time step after another."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, h: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _steps(z, h, c, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, dhs: Tensor, dcs: Tensor) -> tuple[Tensor, ...]:
        return _gradients(dhs, dcs, *ctx.saved_tensors)


# -- operators over stacked clients ------------------------------------------------------------------------------


def row_contiguous(x: Tensor) -> Tensor:
    """x with contiguous rows, or for three axes with contiguous matrices; clients may share memory."""
    fits = x.stride(-1) == 1 and (x.dim() != 3 or x.stride(1) == x.shape[2])
    return x if fits else x.contiguous()


def _each(f: Any, *stacked: Tensor) -> Any:
    """f for one client after another, stacked."""
    found = [f(*one) for one in zip(*stacked, strict=True)]
    return tuple(torch.stack(of_all) for of_all in zip(*found, strict=True))


@torch.library.custom_op("fedloom::lstm_forward", mutates_args=())
def lstm_forward(z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """States h and c (n, t, b, h) after every step, and gates (n, t, b, 4 h), if they are to be kept."""

    def one(z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = z + bias
        hs, cs = _steps(z, h, c, w)
        return hs, cs, torch.cat(_gates(z, _given(h, hs), w), -1) if keep else z[:0]

    return _each(one, z, h, c, w, bias)


@lstm_forward.register_fake
def _(z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    n, steps, batch, four = z.shape
    hs, cs = (z.new_empty(n, steps, batch, h.shape[2]) for _ in range(2))
    return hs, cs, z.new_empty(n, steps if keep else 0, batch, four)


@torch.library.custom_op("fedloom::lstm_backward", mutates_args=())
def lstm_backward(
    dhs: Tensor, dcs: Tensor, gates: Tensor, c: Tensor, cs: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to z (n, t, b, 4 h), to the h and c (n, b, h) that the first step starts from, and to the bias."""

    def one(dhs: Tensor, dcs: Tensor, gates: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        dz, dh, dc = _back(dhs, dcs, gates.chunk(4, -1), *rest)  # type: ignore[arg-type]
        return dz, dh, dc, dz.sum((0, 1))

    return _each(one, dhs, dcs, gates, c, cs, w)


@lstm_backward.register_fake
def _(dhs: Tensor, dcs: Tensor, gates: Tensor, c: Tensor, cs: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return tuple(gates.new_empty(shape) for shape in (gates.shape, c.shape, c.shape, w.shape[:2]))


vmap_over_clients(lstm_forward, 5)
vmap_over_clients(lstm_backward, 6)
cuda_kernel(lstm_forward, "lstm", "lstm", "lstm_forward")
cuda_kernel(lstm_backward, "lstm", "lstm", "lstm_backward")


# -- one client ---------------------------------------------------------------------------------------------------


def _stacked(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(v[None] for v in tensors)


def _one(tensors: tuple[Tensor, ...]) -> Any:
    return tuple(v[0] for v in tensors)


class Lstm(torch.autograd.Function):
    """The layer by the operators; the gates are saved for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return _one(lstm_forward(*_stacked(z, h, c, w, bias), True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, dhs: Tensor, dcs: Tensor, _: Any) -> tuple[Tensor, ...]:
        return _Gradients.apply(dhs, dcs, *ctx.saved_tensors)


class _Gradients(torch.autograd.Function):
    """The gradients by the operator; their derivatives are those of the plain operations."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dhs: Tensor, dcs: Tensor, z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor,
        hs: Tensor, cs: Tensor, gates: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dz, dh, dc, db = _one(lstm_backward(*_stacked(dhs, dcs, gates, c, cs, w)))
        return dz, dh, dc, _to_weights(dz, h, hs), db

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        def plain(
            dhs: Tensor, dcs: Tensor, z: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor, hs: Tensor, cs: Tensor
        ) -> tuple[Tensor, ...]:
            found = _gradients(dhs, dcs, z + bias, h, c, w, hs, cs)
            return *found, found[0].sum((0, 1))

        pull = torch.func.vjp(plain, *ctx.saved_tensors)[1]
        return *pull(gradients), None
