"""Hand-computed numbers of single steps, for a model with one scalar parameter and a prescribed gradient."""

from types import SimpleNamespace

import torch
from helpers import method

from fedloom.core.algorithm import Info
from fedloom.core.task import Task


class ScalarTask(Task):
    """One parameter `p`; every batch has the gradient `slope`."""

    slope = 0.0

    def grad(self, slot, batch, only=None, loss=None):
        return {"p": torch.tensor(self.slope)}, slot


def scalar_task(slope, lr, **settings):
    data = SimpleNamespace(dtype=torch.float32, clients=1)
    task = ScalarTask(data, SimpleNamespace(buffers={}), lr=lr, **settings)
    object.__setattr__(task, "slope", slope)
    return task


def one(value):
    return {"p": torch.tensor(float(value))}


INFO = Info(*(torch.tensor(v) for v in (0, 1, 1, 0, True, 0)))


def stacked(tree):
    return {k: {n: v[None] for n, v in part.items()} for k, part in tree.items()}


def test_fedprox_step():
    """grad + mu (w - w^t) = 1 + 0.1 * (1 - 0.5) = 1.05; 1 - 1 * 1.05 = -0.05"""
    alg, task = method("fedprox", mu=0.1), scalar_task(slope=1.0, lr=1.0)
    work = {"w": task.slot(one(1))}
    work = alg.step(task, work, None, {"w": one(0.5)}, INFO)
    torch.testing.assert_close(work["w"].params, one(-0.05))


def test_ditto_personal_step():
    """2 + 0.5 * (0 - 1) = 1.5; 0 - 0.1 * 1.5 = -0.15"""
    alg, task = method("ditto", lam=0.5), scalar_task(slope=2.0, lr=0.1)
    down = {"w": one(1)}
    work = alg.personal_step(task, alg.begin(task, down, {"v": one(0)}, INFO), None, down, INFO)
    torch.testing.assert_close(work["v"].params, one(-0.15))
    torch.testing.assert_close(work["w"].params, one(1))


def test_scaffold_round_with_one_step():
    """y = 1 - 0.1 (2 - 0.5 + 1) = 0.75; c_i+ = 0.5 - 1 + (1 - 0.75) / 0.1 = 2; Delta c = 1.5;
    with N = m = 1: w = 1 + (0.75 - 1) = 0.75, c = 1 + 1.5 = 2.5"""
    alg, task = method("scaffold"), scalar_task(slope=2.0, lr=0.1)
    down, own = {"w": one(1), "c": one(1)}, {"c": one(0.5)}
    work = alg.step(task, alg.begin(task, down, own, INFO), None, down, INFO)
    torch.testing.assert_close(work["w"].params, one(0.75))
    kept, up = alg.finish(task, work, down, own, INFO)
    torch.testing.assert_close(kept["c"], one(2))
    torch.testing.assert_close(up["dc"], one(1.5))
    server = alg.aggregate(task, down, stacked(up), INFO, 0, 0)
    torch.testing.assert_close(server, {"w": one(0.75), "c": one(2.5)})


def test_scaffold_keeps_its_control_variate_without_a_step():
    alg, task = method("scaffold"), scalar_task(slope=2.0, lr=0.1)
    down, own = {"w": one(1), "c": one(1)}, {"c": one(0.5)}
    kept, up = alg.finish(task, alg.begin(task, down, own, INFO), down, own, INFO)
    torch.testing.assert_close(kept["c"], one(0.5))
    torch.testing.assert_close(up["dc"], one(0))


def test_sgd_with_clipping_decay_and_momentum():
    """clip 3 to 1.5 (up to 1e-6 in the divisor); + 0.1 * 2 = 1.7; v = 0.5 * 0 + 1.7; w = 2 - 0.1 * 1.7 = 1.83
    then: 1.5 + 0.1 * 1.83 = 1.683; v = 0.5 * 1.7 + 1.683 = 2.533; w = 1.83 - 0.2533 = 1.5767"""
    task = scalar_task(slope=3.0, lr=0.1, momentum=0.5, weight_decay=0.1, clip=1.5)
    slot = task.slot(one(2))
    for expected in (1.83, 1.5767):
        g, slot = task.grad(slot, None)
        slot = task.sgd(slot, g)
        torch.testing.assert_close(slot.params, one(expected), rtol=1e-5, atol=0)
