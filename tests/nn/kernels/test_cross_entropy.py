"""The mean cross-entropy of stacked clients and its derivatives, by operators and by kernels."""

import pytest
import torch
from helpers import method, model_task, run_and_evaluate, token_task

from fedloom.core.algorithm import Batch, Output
from fedloom.engine.plan import Plan
from fedloom.nn.kernels import cross_entropy
from fedloom.nn.kernels.cross_entropy import cross_entropy_gradient, cross_entropy_terms, fused_mean

TASK = token_task()


def case(n, shape, classes, dtype, device="cpu"):
    """Logits, labels (of sequences some are unknown) and a mask in which every client has at least one sample."""
    draw = torch.Generator().manual_seed(classes)
    logits = 5 * torch.randn(n, *shape, classes, dtype=dtype, generator=draw)
    y = torch.randint(0 if len(shape) == 1 else -1, classes, (n, *shape), generator=draw)
    mask = (torch.rand(n, shape[0], generator=draw) < 0.7).to(dtype)
    y[:, 0], mask[:, 0] = y[:, 0].clamp(min=0), 1
    return logits.to(device), y.to(device), mask.to(device)


def task_loss(logits, y, mask):
    return TASK.loss(Output(logits, None, {}), Batch(None, y, mask, None, None, None, None))


@pytest.mark.parametrize("shape", [(7,), (3, 4)])
def test_value_and_derivatives_are_those_of_the_task(shape):
    """Second derivatives also to the mask and to what the gradient is multiplied with."""
    logits, y, mask = case(3, shape, 5, torch.float64)

    def all_of(f):
        def one(z, y, m, s):
            def gradient(z, m, s):
                return torch.func.grad(lambda z: s * f(z, y, m))(z)

            second = torch.func.grad(lambda *at: (gradient(*at) ** 2).sum(), argnums=(0, 1, 2))(z, m, s)
            return f(z, y, m), gradient(z, m, s), torch.func.grad(lambda m: f(z, y, m))(m), *second

        return torch.func.vmap(one)(logits, y, mask, torch.tensor([1.0, 2.0, -3.0], dtype=logits.dtype))

    for found, expected in zip(all_of(fused_mean), all_of(task_loss), strict=True):
        torch.testing.assert_close(found, expected)
        assert expected.abs().sum() > 0


@pytest.mark.parametrize("alg", ["fedavg", "per-fedavg"])
@pytest.mark.parametrize("replay", ["eager", "traced"])
def test_stacked_steps_with_the_operators_equal_those_of_single_clients(alg, replay, monkeypatch):
    calls = []
    monkeypatch.setattr(cross_entropy, "has_cuda_kernels", lambda x: True)
    monkeypatch.setattr(cross_entropy, "_use_kernel", lambda *_: calls.append(1) or True)
    for task in (token_task(), model_task("mlp", (6,))):
        expected, _ = run_and_evaluate(method(alg), task, Plan("per-client"), rounds=1)
        assert not calls  # one client at a time keeps the plain operations
        found, _ = run_and_evaluate(method(alg), task, Plan("stacked", replay, chunk=3), rounds=1)
        assert calls
        calls.clear()
        torch.testing.assert_close(found.server["w"], expected.server["w"], rtol=1e-9, atol=1e-12)


def test_the_kernel_is_for_float32_and_limited_numbers_of_labels_and_classes():
    def used(labels, classes, dtype=torch.float32):
        logits, y = (torch.empty(labels, *v, device="meta") for v in ((classes,), ()))
        return cross_entropy._use_kernel(logits.to(dtype), y)

    labels, classes = cross_entropy.MAX_LABELS, cross_entropy.MAX_CLASSES
    assert used(labels, classes)
    assert not used(labels + 1, 10)
    assert not used(10, classes + 1)
    assert not used(10, 10, torch.float64)


@pytest.mark.parametrize(
    ("shape", "classes"),
    [
        ((10,), 10),
        ((1,), 2),
        ((3, 13), 80),  # several programs for a client, the last with fewer rows
        ((1100, 1), 3),  # more labels than are counted at once
        ((2, 3), 2500),  # more classes than the block of a program has logits
    ],
)
def test_kernels_give_what_plain_operations_give(shape, classes, triton_module, device):
    module = triton_module("cross_entropy")
    logits, y, mask = case(3, shape, classes, torch.float32, device)
    if len(shape) == 1:
        logits, y = logits.unsqueeze(2), y.unsqueeze(2)
    else:
        logits = logits.transpose(1, 2).contiguous().transpose(1, 2)  # as a recurrent layer leaves them
    y, mask = (torch.stack([v, v], 1)[:, 1] for v in (y, mask))  # one of a group of batches
    g = torch.tensor(2.0, device=device).expand(3)
    exact = [v.double() if v.is_floating_point() else v for v in (logits, y, mask)]
    for found, expected in (
        (module.terms(logits, y, mask), cross_entropy._terms(*exact)),
        (module.gradient(g, logits, y, mask), cross_entropy._gradient(g.double(), *exact)),
    ):
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-7)


def test_fake_tensors_have_the_shapes_of_the_results(device):
    logits, y, mask = case(2, (3, 4), 5, torch.float32, device)
    for op, args in ((cross_entropy_terms, ()), (cross_entropy_gradient, (mask[:, 0],))):
        torch.library.opcheck(op, (*args, logits, y, mask), test_utils=("test_schema", "test_faketensor"))
