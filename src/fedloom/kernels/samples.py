"""What a captured step gets from memory: its row of the tables and the samples of it, in one kernel."""

import math

import torch
from torch import Tensor

from fedloom.kernels.ours import ours, triton

MORE = 4  # columns behind the samples: k, epoch, last, key


def tables(rows: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    """The tables of a window as one, steps x clients x columns. A sample that is padding goes in as its complement."""
    marked = torch.where(mask > 0, rows, ~rows).flatten(2)
    return torch.cat([marked, *(v.long()[..., None] for v in more)], -1)


@torch.library.custom_op("fedloom::take_samples", mutates_args=())
def take_samples(
    table: Tensor, at: Tensor, x: Tensor, y: Tensor, clients: int, shape: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From row `at` of such a table, for the first clients: x and y of their samples (clients, *shape, ...), the mask,
    and the columns behind (MORE, clients)."""
    if ours(table) and x.is_contiguous() and y.is_contiguous():
        return triton("samples").take(table, at, x, y, clients, shape, dtype)
    here = table.index_select(0, at)[0, :clients]
    marked = here[:, :-MORE].unflatten(1, shape)
    rows = torch.where(marked < 0, ~marked, marked)
    return x[rows], y[rows], (marked >= 0).to(dtype), here[:, -MORE:].t().contiguous()


@take_samples.register_fake
def _(
    table: Tensor, at: Tensor, x: Tensor, y: Tensor, clients: int, shape: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    xs, ys = (v.new_empty(clients, *shape, *v.shape[1:]) for v in (x, y))
    return xs, ys, x.new_empty(clients, *shape, dtype=dtype), table.new_empty(MORE, clients)


def width(shape: list[int] | torch.Size) -> int:
    """Columns of a table for samples of that shape."""
    return math.prod(shape) + MORE
