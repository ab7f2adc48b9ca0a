"""FedProto: prototypes at clients and server, predictions by the nearest one, and a second implementation."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EAGER,
    RAGGED,
    SingleRun,
    client_state,
    logreg_task,
    make_batch,
    make_task,
    method,
    relabelled_federation,
    run_rounds,
    running_statistics,
    tensor,
)
from oracles import (
    PlainFedAvg,
    assert_finite,
    assert_like_plain,
    assert_modules,
    assert_near,
    assert_same_scores,
    client_samples,
    features,
    is_near,
    net_of,
    with_networks,
)

from fedloom.algorithms.fedproto import FedProto
from fedloom.studies.build import check


def test_fedproto_distance_counts_classes_without_prototype_as_zero():
    """f = (1, 0), (0, 2), (3, 4) and padding; G[0] = (0, 1) is known, G[1] is not. Class 0 twice: 1 + 1 = 2 and
    9 + 9 = 18; the sample of class 1 adds nothing, but counts: 20 / (3 * 2)."""
    down = {"G": tensor([[0, 1], [7, 7]]), "known": torch.tensor([True, False])}
    f = tensor([[1, 0], [0, 2], [3, 4], [90, 90]]).requires_grad_()
    found = FedProto().gap(f, make_batch([[0]] * 4, [0, 1, 0, 0], [1, 1, 1, 0]), down)
    assert found.item() == pytest.approx(20 / 6)
    (gradient,) = torch.autograd.grad(found, f)  # 2 (f - G) / 6
    torch.testing.assert_close(gradient, tensor([[1, -1], [0, 0], [3, 3], [0, 0]]) / 3)


def test_fedproto_server_takes_plain_means_over_those_who_have_a_class():
    """Class 0: (1 + 3) / 2, however many samples there are; class 1: one client; class 2: nobody now, but before;
    class 3: nobody ever."""
    server = {"G": tensor([[9], [9], [5], [0]]), "known": torch.tensor([False, True, True, False])}
    up = {
        "C": tensor([[[1], [4], [0], [0]], [[3], [0], [0], [0]]]),
        "has": torch.tensor([[True, True, False, False], [True, False, False, False]]),
    }
    info = SimpleNamespace(n=torch.tensor([100, 1]))
    found = FedProto().aggregate(make_task((4, 4)), server, up, info, 0, 0)
    assert found["G"].flatten().tolist() == [2, 4, 5, 0]
    assert found["known"].tolist() == [True, True, True, False]


def proto_logits(f, G, known, classes=3):
    """The logits of a sample with features f, from a model whose head has four outputs."""
    task = SimpleNamespace(classes=classes)
    task.predict = lambda slot, x: SimpleNamespace(logits=tensor([[0, 0, 7, 9]]), features=x)
    return FedProto().logits(task, {"theta": None, "G": tensor(G), "known": torch.tensor(known)}, tensor([f]))[0]


def test_fedproto_predicts_the_nearest_prototype():
    """f = (1, 1): squared distances to (0, 0), (1, 3), (2, 2) are 2, 4, 2 (and 2 ties: the first); differences of
    logits are differences of squared distances."""
    G = [[0, 0], [1, 3], [2, 2]]
    found = proto_logits([1, 1], G, [True] * 3)
    torch.testing.assert_close(found - found[0], tensor([0, -2, 0]))
    assert proto_logits([1.1, 1.1], G, [True] * 3).argmax() == 2


def test_fedproto_never_predicts_a_class_without_prototype():
    """However near its place; and the loss of such a class is large, but a number."""
    found = proto_logits([2, 2], [[50, 50], [1, 300], [2, 2]], [True, True, False])
    assert found.argmax() == 0
    assert found[2] < found[1] - 20
    assert torch.isfinite(found).all()


def test_fedproto_uses_the_head_before_there_are_prototypes():
    """Its outputs beyond the classes are left out."""
    assert proto_logits([2, 2], [[0, 0]] * 3, [False] * 3).tolist() == [0, 0, 7]


def test_fedproto_without_its_term_is_local():
    task = make_task(RAGGED, participation=0.5, epochs=2, momentum=0.5)
    run, _ = run_rounds(FedProto(lam=0.0), task)
    local, _ = run_rounds(method("local"), task)
    assert_near(client_state(run), client_state(local))


def test_fedproto_has_no_term_in_the_first_round_and_one_later():
    task = make_task(RAGGED)
    run, local = (SingleRun(method(name), task, 3, plan=EAGER) for name in ("fedproto", "local"))
    for agree in (True, False):
        record, expected = run.advance(), local.advance()
        assert is_near(client_state(run), client_state(local)) == agree
        if agree:  # trained without prototypes, the head predicts right after
            assert_same_scores([record], [expected], ["post"], 1e-12)


def test_fedproto_prototypes_are_means_of_the_trained_model_in_evaluation_mode():
    """Of all training samples (batches of 10 and of 64 or more do not matter), dropout off, statistics as trained."""
    sizes = (1, 90, 13)
    task = make_task(sizes, norm=True, dropout=0.5)
    run, _ = run_rounds(FedProto(), task, rounds=1)
    sums, senders = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 1)
    for i in range(3):
        net = net_of({**client_state(run, "theta", i), **running_statistics(run, "theta", i)}, norm=True).eval()
        x, y = client_samples(task, "train")[i]
        with torch.no_grad():
            f = features(net, x)
        for c in set(y.tolist()):
            sums[c] += f[y == c].mean(0)
            senders[c] += 1
    assert run.server["known"].tolist() == (senders[:, 0] > 0).tolist()
    torch.testing.assert_close(run.server["G"], sums / senders.clamp(min=1))


def test_fedproto_with_classes_that_nobody_or_one_client_has():
    labels = [[0] * 12, [0, 1] * 5 + [1], [0]]
    data = relabelled_federation((12, 11, 1), labels)
    task = make_task((12, 11, 1), federation=data)
    run, records = run_rounds(FedProto(), task, evaluate=True)
    assert run.server["known"].tolist() == [True, True, False, False]
    assert (run.server["G"][2:] == 0).all()
    assert_finite(run)
    assert all(np.isfinite(r.scores[v]["test"]).all() for r in records for v in ("pre", "post"))
    assert "global" not in records[-1].scores


def test_fedproto_keeps_prototypes_of_those_who_are_away():
    labels = [[0, 1] * 6, [2, 3] * 6]
    task = make_task((12, 12), federation=relabelled_federation((12, 12), labels))
    run, _ = run_rounds(FedProto(), task, cohorts=[(0, 1), (0,)])
    once, _ = run_rounds(FedProto(), task, cohorts=[(0, 1)])
    assert torch.equal(run.server["G"][2:], once.server["G"][2:])
    assert not torch.allclose(run.server["G"][:2], once.server["G"][:2])


def test_fedproto_with_a_single_layer_has_class_means_of_the_inputs():
    task = logreg_task(RAGGED, dim=6, classes=4)
    check(FedProto(), task)
    run, records = run_rounds(FedProto(), task, evaluate=True)
    for c in range(4):
        means = [x[y == c].mean(0) for x, y in client_samples(task, "train") if (y == c).any()]
        torch.testing.assert_close(run.server["G"][c], torch.stack(means).mean(0))
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()


class PlainFedProto(PlainFedAvg):
    """Models stay with their clients; prototypes of the classes are averaged, and the nearest one predicts."""

    def prepare(self, server):
        self.G = {}

    def client(self, t, i):
        (x, y), net, G = self.train_data[i], self.nets[i].train(), dict(self.G)

        def loss():
            f = features(net, x)
            gaps = [((f[j] - G[c]) ** 2).sum() for j, c in enumerate(y.tolist()) if c in G]
            return F.cross_entropy(net.head(f), y) + self.settings["lam"] * sum(gaps) / (len(y) * 8)

        self.minimise([self.optimizer(net)], loss)
        self.trained[i] = copy.deepcopy(net), G
        with torch.no_grad():
            f = features(net.eval(), x)
        return {c: f[y == c].mean(0) for c in set(y.tolist())}

    def merge(self, weights, sent):
        for c in {c for one in sent for c in one}:
            found = [one[c] for one in sent if c in one]
            self.G[c] = sum(found) / len(found)

    def nearest(self, net, G, x):
        f = features(net.eval(), x)
        if not G:
            return net.head(f)
        return -torch.stack([((f - G[c]) ** 2).sum(1) if c in G else f.new_full((len(f),), 1e6) for c in range(4)], 1)

    def pre(self, i, x):
        return self.nearest(self.nets[i], self.G, x)

    def post(self, i, x):
        return self.nearest(*self.trained[i], x) if self.trained[i] else self.pre(i, x)

    global_logits = None

    def check(self, run):
        assert_modules(client_state(run, "theta"), self.nets)
        assert run.server["known"].tolist() == [c in self.G for c in range(4)]
        for c, proto in self.G.items():
            torch.testing.assert_close(run.server["G"][c], proto, rtol=1e-9, atol=1e-11)


@with_networks
def test_fedproto_against_plain_pytorch(norm, clip):
    assert_like_plain(PlainFedProto, "fedproto", {"lam": 3.0}, norm, clip)
