"""Optimisers of local training equal torch's, step by step; schedules of the learning rate."""

import math

import pytest
import torch
from helpers import make_federation, make_task

from fedloom.core.optimizers import Optimizer, Schedule

SHAPES = {"a": (3, 2), "b": (4,)}


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sgd", {}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("adam", {}),
        ("adam", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
        ("adamw", {"weight_decay": 0.1}),
        ("adamw", {"betas": (0.8, 0.95)}),
    ],
)
def test_steps_are_those_of_torch(kind, settings):
    """20 steps in float64, to 1e-12."""
    mine = {k: v for k, v in settings.items() if k in ("nesterov", "betas", "eps")}
    momentum, decay = settings.get("momentum", 0.0), settings.get("weight_decay", 0.0)
    optimizer = Optimizer(kind, **mine)
    params = drawn(0)
    moments = optimizer.init(params, momentum)
    theirs = {name: v.clone().requires_grad_() for name, v in params.items()}
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    reference = classes[kind](list(theirs.values()), lr=0.03, **{"weight_decay": 0.0, **settings})
    for t in range(20):
        gradient = drawn(t + 1)
        params, moments = optimizer.step(params, gradient, moments, 0.03, momentum, decay)
        for name, v in theirs.items():
            v.grad = gradient[name]
        reference.step()
        for name, v in theirs.items():
            torch.testing.assert_close(params[name], v.detach(), rtol=1e-12, atol=1e-12)


def test_a_parameter_that_is_not_in_the_gradient_stays_and_counts_no_step():
    optimizer = Optimizer("adam")
    params = drawn(0)
    both = optimizer.init(params, 0.0)
    moved, moments = optimizer.step(params, {"a": drawn(1)["a"]}, both, 0.1, 0.0, 0.0)
    assert torch.equal(moved["b"], params["b"])
    assert (moments["steps"]["a"].item(), moments["steps"]["b"].item()) == (1, 0)


def factors(rounds, **settings):
    schedule = Schedule(rounds=rounds, **settings)
    return [schedule.factor(torch.tensor(t), torch.float64).item() for t in range(rounds)]


def test_schedules_are_those_of_torch():
    parameter = torch.nn.Parameter(torch.zeros(1))
    for mine, theirs in (
        ({"kind": "cosine"}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)),
        ({"kind": "step", "every": 3, "gamma": 0.5}, lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)),
    ):
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scheduler, expected = theirs(optimizer), []
        for _ in range(10):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert factors(10, **mine) == pytest.approx(expected, abs=1e-12)


def test_a_warm_up_comes_first():
    assert factors(5, warmup=3) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])
    found = factors(6, kind="cosine", warmup=2)
    assert found == pytest.approx([0.5, 1, *((1 + math.cos(math.pi * t / 4)) / 2 for t in range(4))])


def test_a_model_that_adapts_after_the_last_round_does_so_as_in_it():
    schedule = Schedule("cosine", rounds=4)
    last, after = (schedule.factor(torch.tensor(t), torch.float64) for t in (3, 4))
    assert torch.equal(last, after)
    assert last > 0


def test_the_learning_rate_of_a_round_reaches_every_step():
    task = make_task((), federation=make_federation((5,)), lr=0.2, schedule=Schedule("step", every=1, gamma=0.5))
    now = task.in_round(torch.tensor(2))
    assert now.eta.item() == pytest.approx(0.05)
    slot = task.slot(task.init(0))
    g = {name: torch.ones_like(v) for name, v in slot.params.items()}
    for lr, expected in ((None, 0.05), (1.0, 0.25)):
        moved = now.step(slot, g, lr=lr).params
        for name, v in slot.params.items():
            torch.testing.assert_close(v - moved[name], torch.full_like(v, expected))
