"""FedPHP: the schedule of inheritance, both kinds of transfer, identities, and a second implementation."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    RAGGED,
    client_state,
    make_batch,
    make_task,
    method,
    run_rounds,
    running_statistics,
    tensor,
)
from oracles import (
    PlainFedAvg,
    assert_like_plain,
    assert_modules,
    assert_near,
    features,
    put,
    values,
    with_networks,
)

from fedloom.algorithms.fedphp import FedPHP, mmd
from fedloom.core.algorithm import Slot
from fedloom.core.task import Task

LN3 = math.log(3)


def inherited(c, rounds=10, participation=1.0, clients=12, q=1.0, w=3.0, **settings):
    """The one parameter of a client's inherited model after its participation number c, from q and w."""
    data = SimpleNamespace(clients=clients, dtype=torch.float64)
    task = Task(data, None, rounds=rounds, participation=participation)
    slots = {name: Slot({"p": tensor(v)}, {"p": tensor(v)}, {}) for name, v in (("q", q), ("w", w))}
    work = {**slots, "c": torch.tensor(c)}
    work = FedPHP(**settings).inherit(task, work, {}, None)
    assert work["c"] == c + 1
    assert work["q"].buffers == work["q"].params  # running statistics are mixed as parameters are
    assert work["w"].params["p"] == w
    return work["q"].params["p"].item()


def test_fedphp_first_participation():
    """mu = 0.9 * min(1, 0 / 10) = 0"""
    assert inherited(0) == 3.0


@pytest.mark.parametrize(
    ("c", "settings", "expected"),
    [
        (5, {}, 2.1),  # mu = 0.9 * 5/10 = 0.45: 0.45 * 1 + 0.55 * 3
        (5, {"participation": 0.5}, 1.2),  # 5 of 5 expected: mu = 0.9
        (5, {"participation": 6.0}, 1.2),  # 6 of 12 clients are a half
        (9, {"participation": 0.5}, 1.2),  # not more than 0.9
        (2, {"mu_max": 0.5}, 2.8),  # mu = 0.5 * 0.2
        (7, {"participation": 0.01}, 1.2),  # floor(0.1) would be 0 participations: at least 1
        (29, {"participation": 0.29, "rounds": 100}, 1.2),  # 0.29 * 100 is 28.999... in floating point, yet 29
        (14, {"participation": 0.29, "rounds": 100}, 3 - 2 * 0.9 * 14 / 29),
    ],
)
def test_fedphp_schedule(c, settings, expected):
    assert inherited(c, **settings) == pytest.approx(expected, abs=1e-12)


def test_fedphp_mmd_of_two_points():
    """||(0, 0) - (2, 0)||^2 = 4: k = e^-4/20 + e^-4/30 + e^-4/40 + e^-4/100 = 0.818731 + 0.875173 + 0.904837 +
    0.960789 = 3.559531, and 4 of a point with itself: 4 + 4 - 2 k = 0.880939"""
    found = mmd(tensor([[0, 0]]), tensor([[2, 0]]), tensor([1]))
    assert found.item() == pytest.approx(0.880939, abs=2e-6)


def pairs_mmd(a, b):
    """Maximum mean discrepancy with four Gaussian kernels, pair by pair."""

    def k(p, q):
        return sum(math.exp(-float(((p - q) ** 2).sum()) / (2 * s)) for s in (10, 15, 20, 50))

    def mean(p, q):
        return sum(k(x, y) for x in p for y in q) / (len(p) * len(q))

    return mean(a, a) + mean(b, b) - 2 * mean(a, b)


def test_fedphp_mmd_of_all_pairs_without_padding():
    draw = torch.Generator().manual_seed(2)
    a, b = (3 * torch.randn(5, 4, dtype=torch.float64, generator=draw) for _ in range(2))
    ones = tensor([1] * 5)
    assert mmd(a, b, ones).item() == pytest.approx(pairs_mmd(a, b), rel=1e-9)
    assert mmd(a, b, tensor([1, 1, 0, 1, 0])).item() == pytest.approx(pairs_mmd(a[[0, 1, 3]], b[[0, 1, 3]]), rel=1e-9)
    assert mmd(a, a, ones).item() == pytest.approx(0, abs=1e-12)
    near = a.clone().requires_grad_()
    assert torch.autograd.grad(mmd(near, a, ones), near)[0].abs().max() < 1e-12


@pytest.mark.parametrize(("z", "expected"), [(0.0, 0.693147), (LN3, 0.562335)])
def test_fedphp_distillation(z, expected):
    """z_q / 4 = (ln 3, 0), softmax (3/4, 1/4). The student is not softened: against (1/2, 1/2) it is ln 2, against
    (3/4, 1/4) it is -3/4 ln(3/4) - 1/4 ln(1/4)."""
    q = SimpleNamespace(logits=tensor([[4 * LN3, 0]] * 2))
    student = SimpleNamespace(logits=tensor([[z, 0], [50, -50]]))
    found = FedPHP(transfer="kd").difference(student, q, make_batch([[0]] * 2, [0, 0], [1, 0]))
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_fedphp_without_transfer_has_fedavg_for_its_global_model():
    task = make_task(RAGGED, participation=0.5, epochs=2)
    run, _ = run_rounds(FedPHP(lam=0.0), task)
    fedavg, _ = run_rounds(method("fedavg"), task)
    assert_near(run.server["w"], fedavg.server["w"])


def test_fedphp_learns_from_labels_with_its_defaults():
    """In the first round q_i = w^t: MMD is at its minimum, and 1 - lambda = 0.99 of FedAvg's one step is left."""
    task = make_task((9, 14, 5), batch_size=14)
    run, fedavg = (run_rounds(method(name), task, rounds=1)[0] for name in ("fedphp", "fedavg"))
    start = task.init(run.key)
    for name, p in start.items():
        torch.testing.assert_close(run.server["w"][name] - p, 0.99 * (fedavg.server["w"][name] - p))


def test_fedphp_uses_the_inherited_model_before_and_after_training():
    task = make_task(RAGGED, norm=True)
    run, records = run_rounds(FedPHP(), task, cohorts=[(1, 4), (1, 7)], evaluate=True)
    scores, known = records[-1].scores, [1, 4, 7]
    np.testing.assert_allclose(scores["pre"]["test"][known], scores["post"]["test"][known], rtol=1e-12)
    assert not np.allclose(scores["pre"]["test"][known], scores["global"]["test"][known])
    assert client_state(run, "c").tolist() == [0, 2, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0]


class PlainFedPHP(PlainFedAvg):
    """Personal models q that inherit from the trained ones, and transfer of knowledge from them."""

    def prepare(self, server):
        self.q = [copy.deepcopy(self.start) for _ in self.train_data]
        self.times = [0] * len(self.train_data)

    def client(self, t, i):
        (x, y), net, q = self.train_data[i], put(self.nets[i].train(), self.w), self.q[i].eval()
        lam = self.settings["lam"]

        def kernel(a, b):
            gaps = torch.stack([((p - r) ** 2).sum() for p in a for r in b])
            return sum(torch.exp(-gaps / (2 * s)) for s in (10, 15, 20, 50)).mean()

        def loss():
            f = features(net, x)
            z = net.head(f)
            fq = features(q, x).detach()
            if self.settings.get("transfer") == "kd":
                R = F.cross_entropy(z, F.softmax(q.head(fq).detach() / 4, 1))
            else:
                R = kernel(f, f) + kernel(fq, fq) - 2 * kernel(f, fq)
            return (1 - lam) * F.cross_entropy(z, y) + lam * R

        self.minimise([self.optimizer(net)], loss)
        mu = 0.9 * min(1, self.times[i] / 2)  # half of the clients in each of 4 rounds
        self.times[i] += 1
        old, new = self.q[i].state_dict(), net.state_dict()
        kept = [k for k in old if "num_batches" not in k]
        self.q[i].load_state_dict({**old, **{k: mu * old[k] + (1 - mu) * new[k] for k in kept}})
        return values(net)

    def pre(self, i, x):
        return self.q[i].eval()(x) if self.times[i] else self.global_logits(i, x)

    post = pre

    def check(self, run):
        assert_modules(client_state(run, "q"), self.q)
        assert_modules(running_statistics(run, "q"), self.q)
        assert client_state(run, "c").tolist() == self.times


@with_networks
@pytest.mark.parametrize("settings", [{"lam": 0.4}, {"lam": 0.4, "transfer": "kd"}], ids=["mmd", "kd"])
def test_fedphp_against_plain_pytorch(settings, norm, clip):
    assert_like_plain(PlainFedPHP, "fedphp", settings, norm, clip)
