"""The gradient of max-pooling in programs: as torch computes it, where windows do not overlap."""

import os

import pytest
import torch
import torch.nn.functional as F

from fedloom.engines.trace import trace
from fedloom.kernels.pooling import replace_pooling

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def program_for(x, **options):
    def slope(x):
        return [torch.func.grad(lambda x: (F.max_pool2d(x, **options) ** 2).sum())(x)]

    program = trace(slope, [x])
    replace_pooling(program)
    return program, slope(x)[0]


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"kernel_size": 2}, True),
        ({"kernel_size": (3, 2)}, True),
        ({"kernel_size": 3, "stride": 2}, False),
        ({"kernel_size": 2, "padding": 1}, False),
        ({"kernel_size": 2, "ceil_mode": True}, True),
    ],
)
def test_programs_give_what_torch_gives(options, own):
    x = torch.randn(3, 2, 7, 9).round()  # with ties, and with pixels that no window covers
    program, expected = program_for(x, **options)
    assert ("unpool" in program.code) == own
    assert torch.equal(program(x)[0], expected)


@pytest.mark.parametrize(("size", "kernel"), [((7, 9), (2, 2)), ((40, 40), (2, 3)), ((6, 6), (3, 3))])
def test_the_kernel_gives_what_torch_gives(size, kernel):
    pytest.importorskip("triton")
    from fedloom.kernels.pooling_triton import unpool

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(2, 3, *size, device=device).round().requires_grad_()
    y, places = F.max_pool2d(x, kernel, return_indices=True)
    g = torch.randn_like(y)
    y.backward(g)
    assert torch.equal(unpool(g, places, list(size), list(kernel)), x.grad)
