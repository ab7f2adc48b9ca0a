"""Samples of a step from one table: as from the tables of a window."""

import os

import numpy as np
import pytest
import torch
from helpers import make_task, model_task, token_task

from fedloom.core.algorithm import Phase
from fedloom.engine import batching as schedule
from fedloom.nn.kernels.batch_gather import gather_batch, tables

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def by_kernel(*args):
    pytest.importorskip("triton")
    from fedloom.nn.kernels.triton.batch_gather import take

    return take(*args)


@pytest.mark.parametrize("take", [gather_batch, by_kernel])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", ["numbers", "tokens", "large"])
def test_one_table_holds_what_six_hold(name, group, take):
    task = {"numbers": make_task, "tokens": lambda _: token_task(), "large": lambda s: model_task("mlp", (1050,))}[name]
    task = task((12, 7, 1))
    if torch.cuda.is_available():
        task = type(task)(task.data.to(torch.device("cuda"), torch.float32), task.network, batch_size=task.batch_size)
    phase = Phase(lambda *_: None, group=group, halve=True)
    timetable = schedule.build(task, phase, 3, np.arange(3), 0, np.full(3, 2))
    window = timetable.window(task, np.arange(3), 0, 4)
    table = tables(*window)
    assert (window.mask == 0).any()
    for step, clients in ((0, 3), (3, 2)):
        at = torch.tensor([step], device=table.device)
        shape = list(window.rows.shape[2:])
        x, y, mask, more = take(table, at, task.data.x, task.data.y, clients, shape, task.dtype)
        rows, *rest = (v[step, :clients] for v in window)
        expected = task.data.x[rows], task.data.y[rows], *rest
        found = x, y, mask, *more
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b.long() if b.dtype == torch.bool else b)
            assert a.is_contiguous()
            assert a.dtype == b.dtype or b.dtype == torch.bool


def test_traces_expect_what_comes():
    data = token_task().data
    table = torch.randint(0, 9, (2, 3, 10))
    args = table, torch.tensor([1]), data.x, data.y, 2, [3, 2], torch.float64
    torch.library.opcheck(gather_batch, args, test_utils=("test_schema", "test_faketensor"))
