"""Taking the samples of a step from memory: the row of the batch table and the samples it names, in one kernel."""

import math

import torch
from torch import Tensor

from fedloom.nn.kernels.dispatch import cuda_kernel

EXTRA_COLUMNS = 4  # behind the samples of a row: k, epoch, last, key


def pack_table(rows: Tensor, mask: Tensor, *extra: Tensor) -> Tensor:
    """The columns of a window of batches as one table, steps x clients x columns. A padding row r is stored as ~r."""
    marked = torch.where(mask > 0, rows, ~rows).flatten(2)
    return torch.cat([marked, *(v.long()[..., None] for v in extra)], -1)


def table_width(shape: list[int] | torch.Size) -> int:
    """Number of columns of a table for batches of that shape."""
    return math.prod(shape) + EXTRA_COLUMNS


@torch.library.custom_op("fedloom::gather_batch", mutates_args=())
def gather_batch(
    table: Tensor, at: Tensor, x: Tensor, y: Tensor, clients: int, shape: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From row `at` of a table, for the first clients: x and y of their samples (clients, *shape, ...), the mask, and
    the extra columns (EXTRA_COLUMNS, clients)."""
    here = table.index_select(0, at)[0, :clients]
    marked = here[:, :-EXTRA_COLUMNS].unflatten(1, shape)
    rows = torch.where(marked < 0, ~marked, marked)
    return x[rows], y[rows], (marked >= 0).to(dtype), here[:, -EXTRA_COLUMNS:].t().contiguous()


@gather_batch.register_fake
def _(
    table: Tensor, at: Tensor, x: Tensor, y: Tensor, clients: int, shape: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    xs, ys = (v.new_empty(clients, *shape, *v.shape[1:]) for v in (x, y))
    return xs, ys, x.new_empty(clients, *shape, dtype=dtype), table.new_empty(EXTRA_COLUMNS, clients)


cuda_kernel(gather_batch, "batch_gather", "batch_gather", "gather_batch")
