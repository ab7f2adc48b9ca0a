"""The batched L-BFGS does what torch.optim.LBFGS does with each problem by itself."""

import pytest
import torch
from torch.func import grad, vmap

from fedloom.attacks.lbfgs import minimise


def valley(x, scale):
    """Rosenbrock's function, flatter or steeper."""
    return scale * (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def bowl(x, scale):
    return 0.5 * (scale * torch.arange(1, len(x) + 1, dtype=x.dtype) * x**2).sum()


def logarithm(x, scale):
    """Falls without end towards 0, behind which it is NaN, but its gradient is not."""
    return scale * x.log().sum()


def power(x, scale):
    """Has its minimum at 0, behind which it and its gradient are NaN."""
    return scale * (x**1.5).sum()


def batched(function, scales):
    value_and_gradient = vmap(lambda x, s: (function(x, s), grad(function)(x, s)))
    return lambda points: value_and_gradient(points, scales)


def by_torch(function, start, scale, steps, **options):
    x = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([x], **options)

    def closure():
        optimizer.zero_grad()
        value = function(x, scale)
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(closure)
    return x.detach()


CASES = {  # function, lr, calls of step, size of the history
    "short history": (valley, 0.01, 4, 3),
    "long history": (valley, 0.01, 4, 100),
    "one that ends early": (bowl, 1.0, 5, 100),
}


@pytest.mark.parametrize("case", CASES)
def test_every_problem_is_solved_as_by_torch(case):
    function, lr, steps, history = CASES[case]
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(4, 5, generator=draw, dtype=torch.float64)
    scales = torch.tensor([1.0, 0.3, 2.0, 1e-9], dtype=torch.float64)  # of the last, the first step is tiny: it stops
    found, values = minimise(batched(function, scales), start, steps, history=history, lr=lr)
    for i in range(len(start)):
        options = {"lr": lr, "max_iter": 20, "history_size": history}
        expected = by_torch(function, start[i], scales[i], steps, **options)
        # how far torch itself gets from this point if every coordinate of the start is rounded differently
        nudged = by_torch(function, start[i] * (1 + torch.finfo(torch.float64).eps), scales[i], steps, **options)
        tolerance = 1e-13 + 1000 * (nudged - expected).abs().max()
        assert tolerance < 1e-3  # else the comparison would say nothing
        assert (found[i] - expected).abs().max() <= tolerance
        assert torch.isclose(values[i], function(found[i], scales[i]), rtol=1e-12)
    assert not torch.equal(found[:3], start[:3])


@pytest.mark.parametrize("function", [logarithm, power])
def test_a_problem_that_leaves_the_numbers_ends_as_in_torch_and_harms_no_other(function):
    start = torch.full((2, 3), 0.5, dtype=torch.float64)
    scales = torch.tensor([1.0, 0.0], dtype=torch.float64)
    expected = by_torch(function, start[0], scales[0], 3)
    found, values = minimise(batched(function, scales), start, 3)
    assert torch.allclose(found[0], expected, rtol=1e-3, equal_nan=True)  # steps near the pole of 1 / x
    assert expected.isnan().all() == (function is power)
    assert values[0].isnan()
    assert torch.equal(found[1], start[1])  # its gradient is 0


def test_problems_do_not_depend_on_their_neighbours():
    draw = torch.Generator().manual_seed(1)
    start = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    scales = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
    together, _ = minimise(batched(bowl, scales), start, 2)
    for i in range(3):
        alone, _ = minimise(batched(bowl, scales[i : i + 1]), start[i : i + 1], 2)
        assert torch.allclose(together[i], alone[0], rtol=0, atol=1e-12)
