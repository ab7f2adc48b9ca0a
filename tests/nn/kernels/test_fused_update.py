"""Many tensors written by one kernel: as one by one."""

import os

import pytest
import torch

from fedloom.nn.kernels.fused_update import update

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def by_kernel(*args):
    pytest.importorskip("triton")
    from fedloom.nn.kernels.triton.fused_update import update

    update(*args)


@pytest.mark.parametrize("write", [update, by_kernel])
def test_all_are_written_and_the_count_goes_up(write):
    def values(*shape):
        return torch.randn(*shape, device=DEVICE)

    w = [values(3, 5), values(3, 700, 2), values(3), values(3, 341), values(3, 7)]
    g = [values(3, 4, 5), values(3, 700, 2), values(3, 6), values(3, 341), values(3, 2, 7)]
    alphas, copies, count = (
        [0.5, 0.1, 1.0, 0.0, 0.3],
        [False, False, False, False, True],
        torch.tensor([4], device=DEVICE),
    )
    expected = [w[0] - 0.5 * g[0].sum(1), w[1] - 0.1 * g[1], w[2] - g[2].sum(1), w[3].clone(), g[4].sum(1)]
    write(w, g, alphas, copies, count)
    torch.testing.assert_close(w, expected)
    assert count.tolist() == [5]
    w[3].fill_(1)
    write(w[3:4], g[3:4], [2.0], [True], count)
    assert torch.equal(w[3], g[3])


def test_traces_know_what_is_written():
    args = [torch.randn(2, 3)], [torch.randn(2, 4, 3)], [0.1], [False], torch.tensor([0])
    torch.library.opcheck(update, args, test_utils=("test_schema", "test_faketensor"))
