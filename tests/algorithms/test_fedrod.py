"""FedRoD: balanced softmax, the step of both heads, identities, and a second implementation."""

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    RAGGED,
    SmallNet,
    assert_same,
    client_info,
    client_state,
    logreg_task,
    make_batch,
    make_federation,
    make_task,
    method,
    relabelled_federation,
    run_rounds,
    tensor,
)
from oracles import (
    PlainFedAvg,
    assert_equal,
    assert_finite,
    assert_like_plain,
    assert_modules,
    assert_near,
    assert_same_scores,
    average,
    dense_layers,
    dense_values,
    features,
    is_near,
    part,
    put,
    values,
    with_networks,
)

from fedloom.algorithms.fedrod import FedRoD, prior
from fedloom.core.task import Task
from fedloom.core.tree import take
from fedloom.engine.plan import Plan
from fedloom.nn.network import Network
from fedloom.studies.build import check


@pytest.mark.parametrize(("y", "expected"), [(0, 0.287682), (1, 1.386294)])
def test_fedrod_prior(y, expected):
    """z = (0, 0), counts (3, 1): the softmax of (log 3, log 1) is (3/4, 1/4); -log(3/4) and -log(1/4)."""
    task = logreg_task()
    found = task.losses(tensor([[0, 0]]) + prior(task, client_info([3, 1])), torch.tensor([y]))
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_fedrod_prior_of_an_absent_class_is_finite():
    """log 1e-12 = -27.631; the loss of the class that is there is log(1 + 1e-12 / 5)."""
    for dtype in (torch.float32, torch.float64):
        task = SimpleNamespace(network=SimpleNamespace(outputs=3), classes=2, dtype=dtype)
        found = prior(task, client_info([5, 0]))
        torch.testing.assert_close(found, torch.tensor([math.log(5), -27.631021, -27.631021], dtype=dtype))


def test_fedrod_step():
    """x = (1, 2), y = 0, eta = 0.1, all heads 0. Generic: (3/4, 1/4) - (1, 0) = (-1/4, 1/4), so row 0 of h becomes
    0.1 * 1/4 * (1, 2) = (0.025, 0.05), its bias 0.025. Personal: (1/2, 1/2) - (1, 0), so row 0 of hP is (0.05, 0.1),
    its bias 0.05. The model adds them up: (0.025 + 0.05) * (1 * 1 + 2 * 2 + 1) = 0.45 for class 0."""
    task, alg, info = logreg_task(), FedRoD(), client_info([3, 1])
    down, state = alg.init_server(task, 0), alg.init_client(task, 0, torch.tensor(0))
    work = alg.step(task, alg.begin(task, down, state, info), make_batch([[1, 2]], [0]), down, info)
    state, up = alg.finish(task, work, down, state, info)
    torch.testing.assert_close(up["w"]["head.weight"], tensor([[0.025, 0.05], [-0.025, -0.05]]))
    torch.testing.assert_close(up["w"]["head.bias"], tensor([0.025, -0.025]))
    torch.testing.assert_close(state["hP"]["head.weight"], tensor([[0.05, 0.1], [-0.05, -0.1]]))
    torch.testing.assert_close(state["hP"]["head.bias"], tensor([0.05, -0.05]))
    logits = alg.logits(task, alg.model(task, work, down, info), tensor([[1, 2]]))
    torch.testing.assert_close(logits, tensor([[0.45, -0.45]]))


def test_fedrod_counts_every_training_sample():
    """Eleven samples in batches of ten, the eleventh the only one of its class."""
    labels = [[0, 1] * 5 + [3], [2] * 21]
    task = make_task((11, 21), federation=relabelled_federation((11, 21), labels))

    @dataclass(frozen=True)
    class Watched(FedRoD):
        def report(self, task, work, down, info):
            return {"prior": prior(task, info)}

    run, records = run_rounds(Watched(), task, rounds=2)
    absent = math.log(1e-12)
    expected = [[math.log(5), math.log(5), absent, 0], [absent, absent, math.log(21), absent]]
    np.testing.assert_allclose(records[0].reports["prior"], expected)
    assert_finite(run)


@pytest.mark.parametrize("head", ["linear", "hyper"])
def test_fedrod_with_balanced_classes_has_fedavg_for_its_global_model(head):
    """A prior that is the same for all classes cancels in the softmax; the personal head does not reach the body."""
    sizes = (8, 40, 12)
    data = relabelled_federation(sizes, [np.arange(n) % 4 for n in sizes])
    task = make_task(sizes, federation=data, epochs=2, momentum=0.5, weight_decay=0.01, clip=0.3, norm=True)
    run, records = run_rounds(FedRoD(personal_head=head), task, evaluate=True)
    fedavg, expected = run_rounds(method("fedavg"), task, evaluate=True)
    assert_near(run.server["w"], fedavg.server["w"])
    assert_same_scores(records, expected, ["global"], 1e-12)
    assert not np.allclose(records[-1].scores["pre"]["test"], expected[-1].scores["pre"]["test"])


def test_fedrods_personal_head_does_not_touch_the_generic_model():
    task = make_task(RAGGED, epochs=2, clip=0.3)
    linear, hyper = (run_rounds(FedRoD(personal_head=v), task)[0] for v in ("linear", "hyper"))
    assert_near(linear.server["w"], hyper.server["w"])
    assert set(linear.server) == {"w"}
    assert client_state(hyper) == {}
    fedavg, _ = run_rounds(method("fedavg"), task)
    assert not is_near(linear.server["w"], fedavg.server["w"], 1e-3)  # skewed classes: the prior matters


def test_fedrods_hypernetwork_makes_heads_of_class_proportions():
    """Equal proportions, equal heads. At first it is the same for a seed and another for another one."""
    task, alg = make_task((4, 8, 8)), FedRoD(personal_head="hyper", hidden=5)
    down = alg.init_server(task, 1)
    assert {k: tuple(v.shape) for k, v in down["nu"].items()} == {
        "fc1.weight": (5, 4), "fc1.bias": (5,), "fc2.weight": (36, 5), "fc2.bias": (36,),
    }  # fmt: skip
    a, b, c = (alg.personal(task, down, client_info(counts)) for counts in ([1, 3, 0, 0], [2, 6, 0, 0], [3, 1, 0, 0]))
    assert {k: v.shape for k, v in a.items()} == {"head.weight": (4, 8), "head.bias": (4,)}
    assert_equal(a, b)
    assert not is_near(a, c, 1e-3)
    assert_equal(down, alg.init_server(task, 1))
    assert not is_near(down["nu"], alg.init_server(task, 2)["nu"], 1e-3)


def test_fedrod_with_more_outputs_than_classes():
    data = make_federation(RAGGED)
    task = Task(data, Network(lambda: SmallNet(classes=6), "head", data.x[:2], data.dtype), lr=0.1)
    for head in ("linear", "hyper"):
        assert_finite(assert_same(FedRoD(personal_head=head), task, Plan("stacked", "traced", chunk=5, shrink=0), 1e-9))


@pytest.mark.parametrize("head", ["linear", "hyper"])
def test_fedrod_with_a_single_layer_has_two_heads_on_the_inputs(head):
    task = logreg_task(RAGGED, dim=6, classes=4)
    alg = FedRoD(personal_head=head)
    check(alg, task)
    run, records = run_rounds(alg, task, evaluate=True)
    assert_finite(run)
    assert not np.allclose(records[-1].scores["pre"]["test"], records[-1].scores["global"]["test"])


def test_fedrod_late_clients_start_from_their_initial_head_and_the_newest_shared_model():
    task = make_task(RAGGED)
    run, _ = run_rounds(FedRoD(), task, cohorts=[(1, 4), (1, 4)])
    late = client_state(run, "hP", 0)
    assert_equal(late, task.head(task.init(run.key)))
    work = take(run.executor.begin(run.cohort(np.array([0]), run.t)), 0)
    assert_equal(work["w"].params, run.server["w"])
    assert_equal(work["hP"].params, late)


class PlainFedRoD(PlainFedAvg):
    """Generic model, and personal heads that are trained or made by a hypernetwork."""

    def prepare(self, server):
        self.hyper = self.settings.get("personal_head") == "hyper"
        self.nu = dense_layers(server["nu"]) if self.hyper else None
        self.heads = [copy.deepcopy(self.start.head) for _ in self.train_data]

    def personal_logits(self, i, f, nu, head):
        if not self.hyper:
            return head(f)
        y = self.train_data[i][1]
        made = nu(torch.tensor([(y == c).double().mean() for c in range(4)]).double())
        return f @ made[:32].view(4, 8).T + made[32:]

    def client(self, t, i):
        (x, y), net, nu = self.train_data[i], put(self.nets[i].train(), self.w), copy.deepcopy(self.nu)
        counts = torch.tensor([max(float((y == c).sum()), 1e-12) for c in range(4)]).double()

        def loss():
            f = features(net, x)
            z = net.head(f)
            balanced = counts * torch.exp(z)
            generic = -torch.log(balanced[torch.arange(len(y)), y] / balanced.sum(1)).mean()
            return generic + F.cross_entropy(z.detach() + self.personal_logits(i, f.detach(), nu, self.heads[i]), y)

        self.minimise([self.optimizer(net), self.optimizer(nu if self.hyper else self.heads[i])], loss)
        self.trained[i] = copy.deepcopy((net, nu, self.heads[i]))
        return {**values(net), **({f"nu.{k}": v for k, v in values(nu).items()} if self.hyper else {})}

    def merge(self, weights, sent):
        found = average(sent, weights)
        self.w = {k: v for k, v in found.items() if not k.startswith("nu.")}
        if self.hyper:
            put(self.nu, {k.removeprefix("nu."): v for k, v in part(found, "nu.").items()})

    def both(self, i, x, net, nu, head):
        f = features(net.eval(), x)
        return net.head(f) + self.personal_logits(i, f, nu, head)

    def pre(self, i, x):
        return self.both(i, x, put(self.nets[i], self.w), self.nu, self.heads[i])

    def post(self, i, x):
        return self.both(i, x, *self.trained[i])

    def check(self, run):
        if self.hyper:
            assert_near(run.server["nu"], dense_values(self.nu), 1e-10)
        else:
            assert_modules(client_state(run, "hP"), self.heads, "head.")


@with_networks
@pytest.mark.parametrize("settings", [{}, {"personal_head": "hyper"}], ids=["linear", "hyper"])
def test_fedrod_against_plain_pytorch(settings, norm, clip):
    assert_like_plain(PlainFedRoD, "fedrod", settings, norm, clip)
