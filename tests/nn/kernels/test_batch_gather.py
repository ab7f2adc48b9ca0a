"""The samples of a step, gathered by a packed table of row indices."""

import numpy as np
import pytest
import torch
from helpers import make_task, model_task, token_task

from fedloom.core.algorithm import Phase
from fedloom.engine import batching
from fedloom.nn.kernels.batch_gather import gather_batch, pack_table, table_width

TASKS = {
    "numbers": lambda: make_task((12, 7, 1)),
    "tokens": token_task,
    "more features than a program copies": lambda: model_task("mlp", (1050,), sizes=(5, 3, 1)),
}


@pytest.fixture(params=["plain", "triton"])
def gather(request, triton_module):
    return gather_batch if request.param == "plain" else triton_module("batch_gather").gather_batch


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", TASKS)
def test_a_packed_table_gathers_the_batches_of_its_window(name, group, gather, device):
    task = TASKS[name]()
    if device.type == "cuda":
        task = type(task)(task.data.to(device, torch.float32), task.network, batch_size=task.batch_size)
    phase = Phase(lambda *_: None, group=group, halve=True)
    schedule = batching.build(task, phase, 3, np.arange(3), 0, np.full(3, 2))
    window = schedule.window(task, np.arange(3), 0, 4)
    table, shape = pack_table(*window), list(window.rows.shape[2:])
    assert (window.mask == 0).any()
    assert table.shape == (4, 3, table_width(shape))
    for step, clients in ((0, 3), (3, 2)):
        at = torch.tensor([step], device=device)
        x, y, mask, extra = gather(table, at, task.data.x, task.data.y, clients, shape, task.dtype)
        rows, *rest = (v[step, :clients] for v in window)
        expected = task.data.x[rows], task.data.y[rows], *rest
        for a, b in zip((x, y, mask, *extra), expected, strict=True):
            assert torch.equal(a, b.long() if b.dtype == torch.bool else b)
            assert a.is_contiguous()
            assert a.dtype == b.dtype or b.dtype == torch.bool


def test_fake_tensors_have_the_shapes_of_the_results():
    data = token_task().data
    table = torch.randint(0, 9, (2, 3, 10))
    args = table, torch.tensor([1]), data.x, data.y, 2, [3, 2], torch.float64
    torch.library.opcheck(gather_batch, args, test_utils=("test_schema", "test_faketensor"))
