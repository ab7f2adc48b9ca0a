"""Reconstruction of samples: the attack of GPFL's authors against a second implementation of it, and the attack on one
step where it must succeed."""

import pytest
import torch
from helpers import SmallNet, logreg_task, make_task
from torch import nn

from fedloom.attacks import inversion
from fedloom.attacks.inversion import Range, deep_leakage, in_best_order, one_step, problems
from fedloom.attacks.scores import psnr, reference_psnr
from fedloom.attacks.uploads import Shown, View
from fedloom.core.keys import fold, normal, root

KEYS = torch.tensor([fold(root(0, "attack"), i) for i in range(2)])


def whole(task):
    network = task.network

    def outputs(params, x):
        return network.apply(params, network.buffers, x, train=False).logits

    return View("model", (*network.body, *network.head), outputs)


def trained(params, x, u, rate):
    """What a model and its upload show after one step with these gradients u of the loss to the outputs."""
    leaves = {name: v.clone().requires_grad_() for name, v in params["params"].items()}
    gradient = torch.autograd.grad((params["view"].forward(leaves, x) * u).sum(), list(leaves.values()))
    uploaded = {name: v.detach() - rate * g for (name, v), g in zip(leaves.items(), gradient, strict=True)}
    return Shown(params["params"], uploaded)


def by_torch(net, sent, x, start, steps, body_only):
    """Section 4.7 of the paper, as its authors' library does it: one batch, autograd, torch.optim.LBFGS."""
    net.eval()
    attacked = {name: p for name, p in net.named_parameters() if not (body_only and name.startswith("head"))}
    delta = {name: sent[name] - p.detach() for name, p in attacked.items()}

    def phi(v):
        features = torch.tanh(net.norm(net.first(v)))
        return features if body_only else net.head(features)

    xd = start[: x.numel()].view(x.shape).clone().requires_grad_()
    zd = start[x.numel() :].view(phi(x).shape).clone().requires_grad_()
    optimizer = torch.optim.LBFGS([xd, zd])

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(phi(torch.sigmoid(xd)), zd)
        made = torch.autograd.grad(loss, list(attacked.values()), create_graph=True)
        gap = sum(((g - d) ** 2).sum() for g, d in zip(made, delta.values(), strict=True))
        xd.grad, zd.grad = torch.autograd.grad(gap, [xd, zd])
        return gap

    for _ in range(steps):
        optimizer.step(closure)
    return torch.sigmoid(xd).detach()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "BatchNorm"])
@pytest.mark.parametrize("body_only", [False, True], ids=["model", "body"])
def test_the_attack_on_a_round_is_that_of_the_paper(norm, body_only):
    """In float64, two problems at once, two steps of 20 iterations each."""
    task = make_task((4, 4), norm=norm)
    sent, x = task.init(3), torch.rand(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    network = task.network

    def features(params, x):
        return network.apply({**sent, **params}, network.buffers, x, train=False).features

    view = View("body", network.body, features) if body_only else whole(task)
    uploaded = [
        {name: v + 0.05 * torch.randn(v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(i))
         for name, v in sent.items()}
        for i in range(2)
    ]  # fmt: skip
    outputs = 8 if body_only else 4
    given = problems(view, [Shown(sent, up) for up in uploaded], (3, 6), KEYS)
    found = deep_leakage(given, 2)
    assert ((found.x >= 0) & (found.x <= 1)).all()
    for i in range(2):
        net = SmallNet(norm=norm).double()
        net.load_state_dict({**uploaded[i], **network.buffers}, strict=not norm)
        start = normal(KEYS[i], (3 * 6 + 3 * outputs,), torch.float64)
        expected = by_torch(net, sent, x[i], start, 2, body_only)
        nudged = by_torch(net, sent, x[i], start * (1 + torch.finfo(torch.float64).eps), 2, body_only)
        tolerance = 1e-12 + 1000 * (nudged - expected).abs().max()  # what rounding of the start makes of itself
        assert tolerance < 1e-3
        assert (found.x[i] - expected).abs().max() <= tolerance
        assert reference_psnr(x[i], found.x[i]) == pytest.approx(reference_psnr(x[i], expected), abs=1e-2)


def test_the_distance_is_that_of_the_change_that_the_samples_would_make():
    task = make_task((4, 4))
    sent = task.init(0)
    given = problems(whole(task), [Shown(sent, {k: 0.9 * v for k, v in sent.items()})], (2, 6), KEYS[:1])
    long, short = (deep_leakage(given, steps).distance.item() for steps in (5, 1))
    assert 0 <= long < short < sum((0.1 * v).square().sum() for v in sent.values())


def test_problems_that_do_not_fit_memory_together_are_solved_in_parts(monkeypatch):
    task = make_task((4, 4))
    sent = task.init(0)
    given = problems(whole(task), [Shown(sent, {k: c * v for k, v in sent.items()}) for c in (0.9, 1.1)], (2, 6), KEYS)
    together = deep_leakage(given, 1)
    monkeypatch.setattr(inversion, "MAX_NUMBERS", 1)
    apart = deep_leakage(given, 1)
    assert torch.allclose(together.x, apart.x, rtol=0, atol=1e-9)
    assert torch.allclose(together.distance, apart.distance, rtol=1e-6)


def test_one_sample_of_a_linear_model_is_recovered():
    """The gradient of the weights is u x^T and that of the bias u, so x is determined: whatever the learning rate and
    the labels, above 40 dB."""
    task = logreg_task(dim=12, classes=3)
    view, x = whole(task), torch.rand(2, 1, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2 - 1
    params = {"params": task.init(0), "view": view}
    u = torch.tensor([[[0.4, -0.7, 0.3]], [[-0.1, -0.2, 0.3]]], dtype=torch.float64)
    seen = [trained(params, x[i], u[i], rate) for i, rate in enumerate((0.5, 1e-3))]
    found = one_step(problems(view, seen, (1, 12), KEYS), Range(-1.0, 1.0), 250)
    for i in range(2):
        assert psnr(x[i], found.x[i], 2.0) > 40
        assert found.distance[i] < 1e-6


def test_samples_stay_within_their_range():
    task = make_task((4, 4))
    sent = task.init(0)
    given = problems(whole(task), [Shown(sent, {k: -v for k, v in sent.items()})], (2, 6), KEYS[:1])
    found = one_step(given, Range(3.0, 5.0), 20)
    assert 3.0 <= found.x.min() <= found.x.max() <= 5.0


def test_recovered_samples_are_compared_in_the_order_that_fits_best():
    x = torch.arange(12.0).view(4, 3)
    assert torch.equal(in_best_order(x, x[[2, 0, 3, 1]] + 0.1), x + 0.1)
    broken = x[[1, 0, 3, 2]].clone()
    broken[0] = torch.nan  # it is the farthest from all but the first, to whose place it is put
    assert in_best_order(x, broken).isnan().any(1).sum() == 1
