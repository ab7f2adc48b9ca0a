"""FML: the mutual loss, identities, and a second implementation."""

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    RAGGED,
    client_info,
    client_state,
    logreg_task,
    make_batch,
    make_task,
    method,
    run_rounds,
    tensor,
)
from oracles import (
    PlainFedAvg,
    assert_equal,
    assert_like_plain,
    assert_modules,
    assert_near,
    client_samples,
    is_near,
    put,
    values,
    with_networks,
)

from fedloom.algorithms.fml import FML


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.130812), (1.0, 0.693147), (0.5, 0.411980)])
def test_fml_loss(share, expected):
    """z = (0, 0), zg = (ln 3, 0), y = 0: KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 ln(3/2) + 1/4 ln(1/2) = 0.130812, the
    cross-entropy is ln 2, and half of each is 0.411980. Padding does not count."""
    task = logreg_task()
    out, other = (SimpleNamespace(logits=tensor(z)) for z in ([[0, 0], [9, 1]], [[math.log(3), 0], [-3, 4]]))
    found = FML().mutual(task, out, other, make_batch([[0]] * 2, [0, 0], [1, 0]), share)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_fml_without_mutual_learning_is_local_and_fedavg():
    """Equal sizes, so that FedAvg's weights are equal too."""
    sizes = (12, 12, 12)
    task = make_task(sizes, participation=2.0, epochs=2, momentum=0.5, clip=0.5)
    run, fedavg, local = (run_rounds(alg, task)[0] for alg in (FML(a=1.0, b=1.0), method("fedavg"), method("local")))
    assert_near(run.server, fedavg.server)
    assert_near(client_state(run), client_state(local))


def test_fml_averages_clients_equally():
    seen = []

    @dataclass(frozen=True)
    class Watched(FML):
        def aggregate(self, task, server, up, info, t, key):
            seen.append(up["w"])
            return super().aggregate(task, server, up, info, t, key)

    run, _ = run_rounds(Watched(), make_task((3, 40)), rounds=1)
    for name, v in run.server["w"].items():
        torch.testing.assert_close(v, (seen[0][name][0] + seen[0][name][1]) / 2)


def test_fmls_targets_are_constants():
    """One step: what the other model's loss is made of does not reach a model's gradient, only its predictions do."""
    task = make_task(RAGGED, batch_size=60)
    for settings, same, changed in (({"b": 0.9}, "theta", "w"), ({"a": 0.9}, "w", "theta")):
        alg, other = FML(), FML(**settings)
        down, state = {"w": task.init(1)}, {"theta": task.init(2)}
        batch = make_batch(*client_samples(task, "train")[1])
        a, b = (m.step(task, m.begin(task, down, state, client_info([60])), batch, down, None) for m in (alg, other))
        assert_equal(a[same].params, b[same].params)
        assert not is_near(a[changed].params, b[changed].params, 1e-6)


class PlainFML(PlainFedAvg):
    """A personal and a global model that learn from labels and from each other."""

    equal_weights = True

    def prepare(self, server):
        self.theta = [copy.deepcopy(self.start) for _ in self.train_data]

    def client(self, t, i):
        (x, y), net, theta = self.train_data[i], put(self.nets[i].train(), self.w), self.theta[i].train()

        def towards(z, target):
            return F.kl_div(F.log_softmax(z, 1), F.softmax(target.detach(), 1), reduction="batchmean")

        def loss():
            z, zg = theta(x), net(x)
            a, b = self.settings["a"], self.settings["b"]
            personal = a * F.cross_entropy(z, y) + (1 - a) * towards(z, zg)
            return personal + b * F.cross_entropy(zg, y) + (1 - b) * towards(zg, z)

        self.minimise([self.optimizer(theta), self.optimizer(net)], loss)
        return values(net)

    def pre(self, i, x):
        return self.theta[i].eval()(x)

    post = pre

    def check(self, run):
        assert_modules(client_state(run, "theta"), self.theta)


@with_networks
def test_fml_against_plain_pytorch(norm, clip):
    assert_like_plain(PlainFML, "fml", {"a": 0.3, "b": 0.8}, norm, clip)
