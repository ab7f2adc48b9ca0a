"""Losses, divergences and predictions of classes, labels and numbers, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from helpers import make_batch, make_federation, make_task, with_targets

from fedloom.core.algorithm import Output
from fedloom.core.targets import Classes, Labels, Number

Z = torch.tensor([[0.5, -2.0, 30.0], [-0.1, 1.5, -40.0]], dtype=torch.float64)
TEACHER = torch.tensor([[1.0, -1.0, 2.0], [0.0, 0.3, -3.0]], dtype=torch.float64)
LABELS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
NUMBERS = torch.tensor([0.7, -1.0], dtype=torch.float64)


def test_losses_are_those_of_torch():
    y = torch.tensor([2, 0])
    torch.testing.assert_close(Classes().losses(Z, y), F.cross_entropy(Z, y, reduction="none"))
    expected = F.binary_cross_entropy_with_logits(Z, LABELS, reduction="none").mean(-1)
    torch.testing.assert_close(Labels().losses(Z, LABELS), expected)
    torch.testing.assert_close(Number().losses(Z[:, :1], NUMBERS), F.mse_loss(Z[:, 0], NUMBERS, reduction="none"))


@pytest.mark.parametrize("delta", [0.1, 0.5, 3.0])
def test_hubers_loss_is_twice_that_of_torch(delta):
    found = Number(huber=delta).losses(Z[:, :1], NUMBERS)
    torch.testing.assert_close(found, 2 * F.huber_loss(Z[:, 0], NUMBERS, reduction="none", delta=delta))


def test_divergences_are_those_of_torchs_distributions():
    d = torch.distributions
    expected = d.kl_divergence(d.Categorical(logits=TEACHER), d.Categorical(logits=Z))
    torch.testing.assert_close(Classes().divergence(Z, TEACHER), expected)
    expected = d.kl_divergence(d.Bernoulli(logits=TEACHER), d.Bernoulli(logits=Z)).mean(-1)
    torch.testing.assert_close(Labels().divergence(Z, TEACHER), expected)
    std = torch.tensor(0.5, dtype=torch.float64).sqrt()
    expected = d.kl_divergence(d.Normal(TEACHER[:, 0], std), d.Normal(Z[:, 0], std))
    torch.testing.assert_close(Number().divergence(Z[:, :1], TEACHER[:, :1]), expected)


@pytest.mark.parametrize("targets", [Classes(), Labels()])
def test_a_model_does_not_differ_from_itself(targets):
    torch.testing.assert_close(targets.divergence(Z, Z), torch.zeros(2, dtype=torch.float64))


def test_numbers_are_scaled_back():
    targets = Number(mean=100.0, std=20.0)
    assert targets.predictions(torch.tensor([[0.5], [-1.0]])).tolist() == [110.0, 80.0]
    assert targets.in_unit(torch.tensor([0.5, -1.0])).tolist() == [110.0, 80.0]
    assert targets.quality(torch.tensor([[0.5]]), torch.tensor([0.0])).tolist() == [100.0]


def test_labels_are_right_one_by_one():
    """Of three labels each: the first sample's are all right, the second's first and third are wrong."""
    z = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -1.0]])
    y = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    torch.testing.assert_close(Labels().quality(z, y), torch.tensor([1.0, 1 / 3]))


def test_weights_of_labels_are_torchs_pos_weight_up_to_a_factor():
    """10 samples of which 2 have the label: it counts 10 / 4 where it is there, 10 / 16 where not, a ratio of 4. A
    label that none of the client's samples has counts 1."""
    counts, n = torch.tensor([2.0, 0.0, 10.0]), torch.tensor(10.0)
    found = Labels().weights(LABELS, counts, n)
    torch.testing.assert_close(found, torch.tensor([[2.5, 1.0, 1.0], [0.625, 1.0, 1.0]]))
    mine = Labels().losses(Z[:, :1], LABELS[:, :1], found[:, :1].double())
    expected = F.binary_cross_entropy_with_logits(
        Z[:, :1], LABELS[:, :1], pos_weight=torch.tensor([4.0]).double(), reduction="none"
    )
    torch.testing.assert_close(mine, 0.625 * expected.squeeze(-1))


@pytest.mark.parametrize("kind", ["labels", "number"])
def test_padding_of_a_batch_does_not_count(kind):
    task = make_task((), federation=with_targets(make_federation((5,)), kind))
    rows = torch.arange(3)
    whole = make_batch(task.data.x[rows], task.data.y[rows])
    padded = make_batch(task.data.x[[0, 1, 2, 2]], task.data.y[[0, 1, 2, 2]] * 1e6, mask=(1, 1, 1, 0))
    padded = padded._replace(y=torch.cat([task.data.y[rows], padded.y[3:]]))
    logits = torch.randn(4, task.classes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a, b = (task.loss(Output(logits[: len(batch.x)], logits, {}), batch) for batch in (whole, padded))
    torch.testing.assert_close(a, b)
    scores = task.score(logits, padded.y, padded.mask)
    assert scores[3].tolist() == [0, 0, 0]
    torch.testing.assert_close(scores[:3, 1].mean(), a)


def test_counts_of_labels_and_numbers():
    data = with_targets(make_federation((4, 6)), "labels")
    train = data.splits["train"]
    expected = torch.stack([data.y[train[i]].sum(0) for i in range(2)]).long()
    assert torch.equal(data.counts(torch.arange(2).numpy()), expected)
    assert with_targets(make_federation((4, 6)), "number").counts(torch.arange(2).numpy()).tolist() == [[4], [6]]
