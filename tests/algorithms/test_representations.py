"""FedRoD, FedPHP, FedProto, FedALA, FML and MOON: numbers by hand, identities, edges, and a second implementation of
each in plain PyTorch."""

import copy
import math
import zlib
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ALONE, RAGGED, SingleRun, SmallNet, assert_same, make_federation, make_task, method, token_task
from sentences import user_error
from torch import nn

from fedloom.algorithms.fedala import FedALA
from fedloom.algorithms.fedphp import FedPHP, mmd
from fedloom.algorithms.fedproto import FedProto
from fedloom.algorithms.fedrod import FedRoD, prior
from fedloom.algorithms.fml import FML
from fedloom.algorithms.moon import Moon
from fedloom.core.algorithm import ALGORITHMS, Batch, Draw, Info, Slot
from fedloom.core.federation import Federation
from fedloom.core.settings import build
from fedloom.core.task import Task
from fedloom.core.tree import leaves, take, tree_map
from fedloom.engine.planning.plan import Plan
from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network
from fedloom.studies.build import check

EAGER = Plan("stacked", "eager", chunk=len(RAGGED))
LN3 = math.log(3)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def batch_of(x, y, mask=None):
    zero = torch.tensor(0)
    x = x if isinstance(x, torch.Tensor) else tensor(x)
    y = torch.as_tensor(y)
    mask = torch.ones(len(y), dtype=torch.float64) if mask is None else tensor(mask)
    return Batch(x, y, mask, zero, zero, torch.tensor(True), zero)


def info_of(counts, first=False):
    counts = torch.tensor(counts)
    return Info(torch.tensor(0), counts.sum(), counts, torch.tensor(0), torch.tensor(first), torch.tensor(0))


def out_of(logits=None, features=None):
    return SimpleNamespace(logits=logits, features=features)


def logreg_task(sizes=(4, 4), dim=2, classes=2, **settings):
    """Nothing but a head, which starts at zero: the features are the inputs."""
    data = make_federation(sizes, classes=classes, dim=dim)
    network = Network(lambda: MODELS["logreg"]().build((dim,), classes), "head", data.x[:2], data.dtype)
    return Task(data, network, **{"lr": 0.1, "rounds": 3, **settings})


def advanced(alg, task, rounds=3, evaluate=False, cohorts=None, plan=EAGER):
    run = SingleRun(alg, task, 3, plan=plan)
    cohorts = cohorts or [None] * rounds
    return run, [run.advance(evaluate=evaluate, cohort=c if c is None else np.array(c)) for c in cohorts]


def same(a, b, tolerance=0.0):
    flat_a, flat_b = leaves(a), leaves(b)
    return len(flat_a) == len(flat_b) and all(
        torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(flat_a, flat_b, strict=True)
    )


def finite(run):
    return all(torch.isfinite(v).all() for v in leaves((run.server, run.store.everyone())))


def assert_scores(a, b, views, tolerance=1e-12):
    for view in views:
        np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"], rtol=tolerance)


def relabelled(sizes, labels, classes=4, **rest):
    """A federation whose client i has the training labels labels[i]."""
    data = make_federation(sizes, classes=classes, **rest)
    y = data.y % classes
    for i, mine in enumerate(labels):
        y[data.splits["train"][i]] = torch.as_tensor(mine)
    return Federation(data.x, y, classes, data.splits, dtype=data.dtype)


# -- FedRoD ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("y", "expected"), [(0, 0.287682), (1, 1.386294)])
def test_fedrod_prior(y, expected):
    """z = (0, 0), counts (3, 1): the softmax of (log 3, log 1) is (3/4, 1/4); -log(3/4) and -log(1/4)."""
    task = logreg_task()
    found = task.losses(tensor([[0, 0]]) + prior(task, info_of([3, 1])), torch.tensor([y]))
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_fedrod_prior_of_an_absent_class_is_finite():
    """log 1e-12 = -27.631; the loss of the class that is there is log(1 + 1e-12 / 5)."""
    for dtype in (torch.float32, torch.float64):
        task = SimpleNamespace(network=SimpleNamespace(outputs=3), classes=2, dtype=dtype)
        found = prior(task, info_of([5, 0]))
        torch.testing.assert_close(found, torch.tensor([math.log(5), -27.631021, -27.631021], dtype=dtype))


def test_fedrod_step():
    """x = (1, 2), y = 0, eta = 0.1, all heads 0. Generic: (3/4, 1/4) - (1, 0) = (-1/4, 1/4), so row 0 of h becomes
    0.1 * 1/4 * (1, 2) = (0.025, 0.05), its bias 0.025. Personal: (1/2, 1/2) - (1, 0), so row 0 of hP is (0.05, 0.1),
    its bias 0.05. The model adds them up: (0.025 + 0.05) * (1 * 1 + 2 * 2 + 1) = 0.45 for class 0."""
    task, alg, info = logreg_task(), FedRoD(), info_of([3, 1])
    down, own = alg.init_server(task, 0), alg.init_client(task, 0, torch.tensor(0))
    work = alg.step(task, alg.begin(task, down, own, info), batch_of([[1, 2]], [0]), down, info)
    kept, up = alg.finish(task, work, down, own, info)
    torch.testing.assert_close(up["w"]["head.weight"], tensor([[0.025, 0.05], [-0.025, -0.05]]))
    torch.testing.assert_close(up["w"]["head.bias"], tensor([0.025, -0.025]))
    torch.testing.assert_close(kept["hP"]["head.weight"], tensor([[0.05, 0.1], [-0.05, -0.1]]))
    torch.testing.assert_close(kept["hP"]["head.bias"], tensor([0.05, -0.05]))
    logits = alg.logits(task, alg.model(task, work, down, info), tensor([[1, 2]]))
    torch.testing.assert_close(logits, tensor([[0.45, -0.45]]))


def test_fedrod_counts_every_training_sample():
    """Eleven samples in batches of ten, the eleventh the only one of its class."""
    labels = [[0, 1] * 5 + [3], [2] * 21]
    task = make_task((11, 21), federation=relabelled((11, 21), labels))

    @dataclass(frozen=True)
    class Watched(FedRoD):
        def report(self, task, work, down, info):
            return {"prior": prior(task, info)}

    run, records = advanced(Watched(), task, rounds=2)
    absent = math.log(1e-12)
    expected = [[math.log(5), math.log(5), absent, 0], [absent, absent, math.log(21), absent]]
    np.testing.assert_allclose(records[0].reports["prior"], expected)
    assert finite(run)


@pytest.mark.parametrize("head", ["linear", "hyper"])
def test_fedrod_with_balanced_classes_has_fedavg_for_its_global_model(head):
    """A prior that is the same for all classes cancels in the softmax; the personal head does not reach the body."""
    sizes = (8, 40, 12)
    data = relabelled(sizes, [np.arange(n) % 4 for n in sizes])
    task = make_task(sizes, federation=data, epochs=2, momentum=0.5, weight_decay=0.01, clip=0.3, norm=True)
    ours, a = advanced(FedRoD(personal_head=head), task, evaluate=True)
    theirs, b = advanced(method("fedavg"), task, evaluate=True)
    assert same(ours.server["w"], theirs.server["w"], 1e-12)
    assert_scores(a[-1], b[-1], ["global"])
    assert not np.allclose(a[-1].scores["pre"]["test"], b[-1].scores["pre"]["test"])


def test_fedrods_personal_head_does_not_touch_the_generic_model():
    task = make_task(RAGGED, epochs=2, clip=0.3)
    linear, hyper = (advanced(FedRoD(personal_head=v), task)[0] for v in ("linear", "hyper"))
    assert same(linear.server["w"], hyper.server["w"])
    assert set(linear.server) == {"w"}
    assert hyper.store.everyone()["own"] == {}
    plain, _ = advanced(method("fedavg"), task)
    assert not same(linear.server["w"], plain.server["w"], 1e-3)  # skewed classes: the prior matters


def test_fedrods_hypernetwork_makes_heads_of_class_proportions():
    """Equal proportions, equal heads. At first it is the same for a seed and another for another one."""
    task, alg = make_task((4, 8, 8)), FedRoD(personal_head="hyper", hidden=5)
    down = alg.init_server(task, 1)
    assert {k: tuple(v.shape) for k, v in down["nu"].items()} == {
        "fc1.weight": (5, 4), "fc1.bias": (5,), "fc2.weight": (36, 5), "fc2.bias": (36,),
    }  # fmt: skip
    a, b, c = (alg.personal(task, down, info_of(counts)) for counts in ([1, 3, 0, 0], [2, 6, 0, 0], [3, 1, 0, 0]))
    assert {k: v.shape for k, v in a.items()} == {"head.weight": (4, 8), "head.bias": (4,)}
    assert same(a, b)
    assert not same(a, c, 1e-3)
    assert same(down, alg.init_server(task, 1))
    assert not same(down["nu"], alg.init_server(task, 2)["nu"], 1e-3)


def test_fedrod_with_more_outputs_than_classes():
    data = make_federation(RAGGED)
    task = Task(data, Network(lambda: SmallNet(classes=6), "head", data.x[:2], data.dtype), lr=0.1)
    for head in ("linear", "hyper"):
        assert finite(assert_same(FedRoD(personal_head=head), task, Plan("stacked", "traced", chunk=5, shrink=0), 1e-9))


@pytest.mark.parametrize("head", ["linear", "hyper"])
def test_fedrod_with_a_single_layer_has_two_heads_on_the_inputs(head):
    task = logreg_task(RAGGED, dim=6, classes=4)
    alg = FedRoD(personal_head=head)
    check(alg, task)
    run, records = advanced(alg, task, evaluate=True)
    assert finite(run)
    assert not np.allclose(records[-1].scores["pre"]["test"], records[-1].scores["global"]["test"])


def test_fedrod_late_clients_start_from_their_initial_head_and_the_newest_shared_model():
    task = make_task(RAGGED)
    run, _ = advanced(FedRoD(), task, cohorts=[(1, 4), (1, 4)])
    late = take(run.store.everyone()["own"]["hP"], 0)
    assert same(late, task.head(task.init(run.key)))
    work = take(run.executor.begin(run.cohort(np.array([0]), run.t)), 0)
    assert same(work["w"].params, run.server["w"])
    assert same(work["hP"].params, late)


# -- FedPHP ---------------------------------------------------------------------------------------------------------


def inherited(c, rounds=10, participation=1.0, clients=12, q=1.0, w=3.0, **settings):
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
    q = out_of(logits=tensor([[4 * LN3, 0]] * 2))
    student = out_of(logits=tensor([[z, 0], [50, -50]]))
    found = FedPHP(transfer="kd").difference(student, q, batch_of([[0]] * 2, [0, 0], [1, 0]))
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_fedphp_without_transfer_is_fedavg_and_its_model_an_average_of_trained_ones():
    task = make_task(RAGGED, participation=0.5, epochs=2)
    ours, _ = advanced(FedPHP(lam=0.0), task)
    theirs, _ = advanced(method("fedavg"), task)
    assert same(ours.server["w"], theirs.server["w"], 1e-12)


def test_fedphp_learns_from_labels_with_its_defaults():
    """In the first round q_i = w^t: MMD is at its minimum, and 1 - lambda = 0.99 of FedAvg's one step is left."""
    task = make_task((9, 14, 5), batch_size=14)
    ours, theirs = (advanced(method(name), task, rounds=1)[0] for name in ("fedphp", "fedavg"))
    start = task.init(ours.key)
    for name, p in start.items():
        torch.testing.assert_close(ours.server["w"][name] - p, 0.99 * (theirs.server["w"][name] - p))


def test_fedphp_uses_the_inherited_model_before_and_after_training():
    task = make_task(RAGGED, norm=True)
    run, records = advanced(FedPHP(), task, cohorts=[(1, 4), (1, 7)], evaluate=True)
    scores, known = records[-1].scores, [1, 4, 7]
    np.testing.assert_allclose(scores["pre"]["test"][known], scores["post"]["test"][known], rtol=1e-12)
    assert not np.allclose(scores["pre"]["test"][known], scores["global"]["test"][known])
    assert run.store.everyone()["own"]["c"].tolist() == [0, 2, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0]


# -- FedProto -------------------------------------------------------------------------------------------------------


def test_fedproto_distance_counts_classes_without_prototype_as_zero():
    """f = (1, 0), (0, 2), (3, 4) and padding; G[0] = (0, 1) is known, G[1] is not. Class 0 twice: 1 + 1 = 2 and
    9 + 9 = 18; the sample of class 1 adds nothing, but counts: 20 / (3 * 2)."""
    down = {"G": tensor([[0, 1], [7, 7]]), "known": torch.tensor([True, False])}
    f = tensor([[1, 0], [0, 2], [3, 4], [90, 90]]).requires_grad_()
    found = FedProto().gap(f, batch_of([[0]] * 4, [0, 1, 0, 0], [1, 1, 1, 0]), down)
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
    found = FedProto().aggregate(None, server, up, info, 0, 0)
    assert found["G"].flatten().tolist() == [2, 4, 5, 0]
    assert found["known"].tolist() == [True, True, True, False]


def proto_logits(f, G, known, classes=3):
    task = SimpleNamespace(predict=lambda slot, x: out_of(tensor([[0, 0, 7, 9]]), x), classes=classes)
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
    ours = advanced(FedProto(lam=0.0), task)[0].store.everyone()["own"]
    assert same(ours, advanced(method("local"), task)[0].store.everyone()["own"], 1e-12)


def test_fedproto_has_no_term_in_the_first_round_and_one_later():
    task = make_task(RAGGED)
    ours, theirs = (SingleRun(method(name), task, 3, plan=EAGER) for name in ("fedproto", "local"))
    for agree in (True, False):
        a, b = ours.advance(), theirs.advance()
        assert same(ours.store.everyone()["own"], theirs.store.everyone()["own"], 1e-12) == agree
        if agree:  # trained without prototypes, the head predicts right after
            assert_scores(a, b, ["post"])


def test_fedproto_prototypes_are_means_of_the_trained_model_in_evaluation_mode():
    """Of all training samples (batches of 10 and of 64 or more do not matter), dropout off, statistics as trained."""
    sizes = (1, 90, 13)
    task = make_task(sizes, norm=True, dropout=0.5)
    run, _ = advanced(FedProto(), task, rounds=1)
    kept, sums = run.store.everyone(), torch.zeros(4, 8, dtype=torch.float64)
    senders = torch.zeros(4, 1)
    for i in range(3):
        net = SmallNet(norm=True).double().eval()
        own = {k: v[i] for k, v in {**kept["own"]["theta"], **kept["stats"]["theta"]}.items()}
        net.load_state_dict({**net.state_dict(), **own})
        rows = task.data.splits["train"][i]
        with torch.no_grad():
            f, y = torch.tanh(net.norm(net.first(task.data.x[rows]))), task.data.y[rows]
        for c in set(y.tolist()):
            sums[c] += f[y == c].mean(0)
            senders[c] += 1
    assert run.server["known"].tolist() == (senders[:, 0] > 0).tolist()
    torch.testing.assert_close(run.server["G"], sums / senders.clamp(min=1))


def test_fedproto_with_classes_that_nobody_or_one_client_has():
    labels = [[0] * 12, [0, 1] * 5 + [1], [0]]
    data = relabelled((12, 11, 1), labels)
    task = make_task((12, 11, 1), federation=data)
    run, records = advanced(FedProto(), task, evaluate=True)
    assert run.server["known"].tolist() == [True, True, False, False]
    assert (run.server["G"][2:] == 0).all()
    assert finite(run)
    assert all(np.isfinite(r.scores[v]["test"]).all() for r in records for v in ("pre", "post"))
    assert "global" not in records[-1].scores


def test_fedproto_keeps_prototypes_of_those_who_are_away():
    labels = [[0, 1] * 6, [2, 3] * 6]
    task = make_task((12, 12), federation=relabelled((12, 12), labels))
    run, _ = advanced(FedProto(), task, cohorts=[(0, 1), (0,)])
    once, _ = advanced(FedProto(), task, cohorts=[(0, 1)])
    assert torch.equal(run.server["G"][2:], once.server["G"][2:])
    assert not torch.allclose(run.server["G"][:2], once.server["G"][:2])


def test_fedproto_with_a_single_layer_has_class_means_of_the_inputs():
    task = logreg_task(RAGGED, dim=6, classes=4)
    check(FedProto(), task)
    run, records = advanced(FedProto(), task, evaluate=True)
    rows = [task.data.splits["train"][i] for i in range(len(RAGGED))]
    for c in range(4):
        means = [task.data.x[r][task.data.y[r] == c].mean(0) for r in rows if (task.data.y[r] == c).any()]
        torch.testing.assert_close(run.server["G"][c], torch.stack(means).mean(0))
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()


# -- FedALA ---------------------------------------------------------------------------------------------------------


class SlopeTask(Task):
    """Parameters `first` and `p`; the loss is slope * p."""

    layers = (("first",), ("p",))

    def forward(self, slot, batch):
        return slot.params

    def loss(self, out, batch):
        return self.lr * out["p"]  # the setting serves as slope


def ala(theta, w, A, slope, alg):
    task = SlopeTask(SimpleNamespace(dtype=torch.float64), SimpleNamespace(buffers={}), lr=slope)
    down = {"w": {"first": tensor(7.0), "p": tensor(w)}}
    own = {"theta": {"first": tensor(-5.0), "p": tensor(theta)}, "A": {"p": tensor(A)}, "learnt": torch.tensor(True)}
    info = info_of([1])
    begun = alg.begin(task, down, own, info)
    return begun, alg.learn(task, begun, batch_of([[0]], [0]), down, info)


def test_fedala_step_of_the_weights():
    """theta = 0, w = 1, A = 1, gradient 2, eta_A = 1: A = clip(1 - 2 * (1 - 0), 0, 1) = 0, so theta_hat = 0."""
    begun, work = ala(0.0, 1.0, 1.0, 2.0, FedALA())
    assert begun["theta"].params["p"] == 1
    assert begun["theta"].params["first"] == 7  # all but the last layer come from w
    assert work["A"]["p"] == 0
    assert work["theta"].params == {"first": tensor(7.0), "p": tensor(0.0)}


def test_fedala_step_of_the_weights_inside_the_interval():
    """theta = 1, w = 3, A = 0.5: theta_hat = 2; gradient -0.1, eta_A = 0.5: A = 0.5 + 0.5 * 0.1 * 2 = 0.6, so
    theta_hat = 2.2. A gradient of -9 would give 9.5, which is clipped to 1."""
    begun, work = ala(1.0, 3.0, 0.5, -0.1, FedALA(eta_A=0.5))
    assert begun["theta"].params["p"] == 2
    assert work["A"]["p"].item() == pytest.approx(0.6)
    assert work["theta"].params["p"].item() == pytest.approx(2.2)
    assert ala(1.0, 3.0, 0.5, -9.0, FedALA(eta_A=0.5))[1]["A"]["p"] == 1


def test_fedala_without_steps_of_the_weights_is_fedavg():
    """A stays 1: everything comes from w."""
    task = make_task(RAGGED, participation=0.5, epochs=2, momentum=0.5, norm=True)
    ours, a = advanced(FedALA(eta_A=0.0, p=9), task, evaluate=True)
    theirs, b = advanced(method("fedavg"), task, evaluate=True)
    assert same(ours.server, theirs.server, 1e-12)
    assert same(ours.store.everyone()["stats"]["theta"], theirs.store.everyone()["stats"]["w"], 1e-12)
    assert_scores(a[-1], b[-1], ["pre", "post", "global"], 1e-9)


def test_fedala_first_participation_starts_from_the_global_model_whenever_it_is():
    task = make_task(RAGGED)
    run, _ = advanced(FedALA(), task, cohorts=[(1, 4), (1, 4), (1, 7)])
    own = run.store.everyone()["own"]
    assert own["learnt"].nonzero().flatten().tolist() == [1, 4]
    assert all((v[7] == 1).all() for v in own["A"].values())
    assert all((v[1] < 1).any() for v in own["A"].values())
    work = run.executor.begin(run.cohort(np.array([0]), run.t))
    assert same(take(work["theta"].params, 0), run.server["w"])


def settled_after(losses):
    window = [math.nan] * 10 + losses
    return bool(FedALA().validated({"losses": tensor(window[-10:])}))


def test_fedala_weights_are_learnt_when_ten_losses_hardly_differ():
    """The standard deviation of five 0 and five 0.2 is 0.1, which is not below 0.1."""
    assert not settled_after([1.0] * 9)
    assert settled_after([1.0] * 10)
    assert not settled_after([0.0, 0.2] * 5)
    assert settled_after([0.0, 0.199] * 5)
    assert settled_after([9.0] * 30 + [1.0] * 10)
    assert not settled_after([9.0] * 30 + [1.0] * 9)


@pytest.mark.parametrize(
    "plan", [ALONE, EAGER, Plan("stacked", "traced", chunk=5, shrink=0)], ids=lambda p: p.replay or "alone"
)
def test_fedala_epochs_on_the_weights(plan):
    """None at first, 10 to 50 at the second participation, one later."""

    @dataclass(frozen=True)
    class Watched(FedALA):
        def begin(self, task, down, own, info):
            return {**super().begin(task, down, own, info), "epochs": torch.zeros_like(info.n)}

        def learn(self, task, work, batch, down, info):
            found = super().learn(task, work, batch, down, info)
            return {**found, "epochs": work["epochs"] + batch.last}

        def report(self, task, work, down, info):
            return {"epochs": work["epochs"]}

    task = make_task(RAGGED, lr=0.6)
    counts = [r.reports["epochs"].tolist() for r in advanced(Watched(eta_A=5.0), task, rounds=4, plan=plan)[1]]
    assert set(counts[0]) == {0}
    assert min(counts[1]) == 10
    assert 10 < max(counts[1]) <= 50
    assert set(counts[2]) == set(counts[3]) == {1}
    capped = [r.reports["epochs"].tolist() for r in advanced(Watched(start_epochs=3), task, rounds=2, plan=plan)[1]]
    assert set(capped[1]) == {3}


def test_fedala_window_is_a_contiguous_part_drawn_from_the_named_stream():
    alg = FedALA(s=80)
    for n, size in ((1, 1), (2, 1), (5, 4), (10, 8), (60, 48)):
        starts = set()
        for t in range(60):
            rows = alg.window(n, Draw(5, 3, t))
            generator = np.random.default_rng([5, zlib.crc32(b"ala"), 3, t])
            assert rows.tolist() == list(range(rows[0], rows[0] + size))
            assert rows[0] == generator.integers(0, n - size + 1)
            starts.add(int(rows[0]))
        assert (min(starts), max(starts)) == (0, n - size)
    assert len(FedALA(s=29).window(100, Draw(0, 0, 0))) == 29  # 0.29 * 100 is 28.999... in floating point
    assert len(FedALA(s=100).window(7, Draw(0, 0, 0))) == 7


def test_fedala_evaluation_does_not_advance_the_weights():
    task = make_task(RAGGED, norm=True, participation=0.5)
    watched, blind = (advanced(FedALA(), task, rounds=4, evaluate=e)[0] for e in (True, False))
    assert same(watched.store.everyone(), blind.store.everyone())
    assert same(watched.server, blind.server)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("p", [1, 2, 7])
def test_fedala_weights_by_a_second_implementation(p, norm):
    """Several batches and many epochs, from the state after a round: what PM_pre uses, and the A_i that the next round
    keeps. Running statistics do not move while A_i is learnt."""
    sizes, seed, eta = (3, 42, 23), 3, 4.0
    task = make_task(sizes, norm=norm, batch_size=10, lr=0.3)
    run = SingleRun(FedALA(p=p, eta_A=eta), task, seed, plan=EAGER)
    scores = run.advance().scores
    before, w = tree_map(torch.clone, run.store.everyone()), run.server["w"]
    run.advance(evaluate=False)
    for i, n in enumerate(sizes):
        net = SmallNet(norm=norm).double()
        stats = {k: v[i] for k, v in before["stats"].get("theta", {}).items()}
        theta = {k: v[i] for k, v in before["own"]["theta"].items()}
        last = ["head.weight", "head.bias"] if p == 1 else list(theta)
        A = {k: torch.ones_like(theta[k], requires_grad=True) for k in last}

        def mixed(theta=theta, A=A):
            return {**w, **{k: theta[k] + (w[k] - theta[k]) * A[k] for k in A}}

        size = max(1, int(0.8 * n))
        start = int(np.random.default_rng([seed, zlib.crc32(b"ala"), i, 1]).integers(0, n - size + 1))
        rows = task.data.splits["train"][i][start : start + size]
        losses = []
        while len(losses) < 50 and not (len(losses) >= 10 and np.std(losses[-10:]) < 0.1):
            for some in rows.split(10):
                if norm and len(some) == 1:
                    continue
                net.load_state_dict({**net.state_dict(), **stats})
                out = torch.func.functional_call(net.train(), mixed(), task.data.x[some])
                loss = F.cross_entropy(out, task.data.y[some])
                # dF/dA = dF/dtheta_hat * (w - theta), by the chain rule
                found = torch.autograd.grad(loss, list(A.values()))
                for a, g in zip(A.values(), found, strict=True):
                    a.data = (a.data - eta * g).clamp(0, 1)
            losses.append(loss.item())
        for name, a in A.items():
            torch.testing.assert_close(run.store.everyone()["own"]["A"][name][i], a.detach(), rtol=1e-9, atol=1e-9)
        net.load_state_dict({**net.state_dict(), **stats})
        test = task.data.splits["test"][i]
        with torch.no_grad():
            out = torch.func.functional_call(net.eval(), mixed(), task.data.x[test])
        expected = F.cross_entropy(out, task.data.y[test], reduction="sum").item()
        assert scores["pre"]["test"][i, 1] == pytest.approx(expected, rel=1e-9)


def test_fedala_with_a_single_layer_mixes_the_whole_model():
    task = logreg_task(RAGGED, dim=6, classes=4)
    check(FedALA(), task)
    run, _ = advanced(FedALA(), task, evaluate=True)
    assert set(run.store.everyone()["own"]["A"]) == set(run.server["w"])
    assert finite(run)


def test_fedala_reports_how_much_comes_from_the_global_model():
    _, records = advanced(FedALA(), make_task(RAGGED))
    assert (records[0].reports["A"] == 1).all()
    assert ((records[-1].reports["A"] >= 0) & (records[-1].reports["A"] < 1)).any()


# -- FML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.130812), (1.0, 0.693147), (0.5, 0.411980)])
def test_fml_loss(share, expected):
    """z = (0, 0), zg = (ln 3, 0), y = 0: KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 ln(3/2) + 1/4 ln(1/2) = 0.130812, the
    cross-entropy is ln 2, and half of each is 0.411980. Padding does not count."""
    task = logreg_task()
    out, other = out_of(tensor([[0, 0], [9, 1]])), out_of(tensor([[LN3, 0], [-3, 4]]))
    found = FML().mutual(task, out, other, batch_of([[0]] * 2, [0, 0], [1, 0]), share)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_fml_that_listens_to_labels_only_is_local_and_fedavg():
    """Equal sizes, so that FedAvg's weights are equal too."""
    sizes = (12, 12, 12)
    task = make_task(sizes, participation=2.0, epochs=2, momentum=0.5, clip=0.5)
    ours = advanced(FML(a=1.0, b=1.0), task)[0]
    assert same(ours.server, advanced(method("fedavg"), task)[0].server, 1e-12)
    assert same(ours.store.everyone()["own"], advanced(method("local"), task)[0].store.everyone()["own"], 1e-12)


def test_fml_averages_clients_equally():
    seen = []

    @dataclass(frozen=True)
    class Watched(FML):
        def aggregate(self, task, server, up, info, t, key):
            seen.append(up["w"])
            return super().aggregate(task, server, up, info, t, key)

    run, _ = advanced(Watched(), make_task((3, 40)), rounds=1)
    for name, v in run.server["w"].items():
        torch.testing.assert_close(v, (seen[0][name][0] + seen[0][name][1]) / 2)


def test_fmls_targets_are_constants():
    """One step: what the other model's loss is made of does not reach a model's gradient, only its predictions do."""
    task = make_task(RAGGED, batch_size=60)
    for settings, part in (({"b": 0.9}, "theta"), ({"a": 0.9}, "w")):
        alg, other = FML(), FML(**settings)
        down, own = {"w": task.init(1)}, {"theta": task.init(2)}
        rows = task.data.splits["train"][1]
        batch = batch_of(task.data.x[rows], task.data.y[rows])
        a, b = (m.step(task, m.begin(task, down, own, info_of([60])), batch, down, None) for m in (alg, other))
        rest = {"theta": "w", "w": "theta"}[part]
        assert same(a[part].params, b[part].params)
        assert not same(a[rest].params, b[rest].params, 1e-6)


# -- MOON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proj", [None, 5])
def test_moon_without_its_term_is_fedavg(proj):
    task = make_task(RAGGED, participation=0.5, epochs=2, momentum=0.5, clip=0.5, norm=True)
    ours, a = advanced(Moon(mu=0.0, proj=proj), task, evaluate=True)
    theirs, b = advanced(method("fedavg"), task, evaluate=True)
    assert same(ours.server["w"], theirs.server["w"], 1e-12)
    assert_scores(a[-1], b[-1], ["pre", "post", "global"])


def test_moon_has_a_constant_term_in_the_first_round_and_one_that_matters_later():
    """OLD_i = w^0: the term is log 2 whatever the features are. A client that comes later has OLD_i = w^0 and w^t."""
    task = make_task(RAGGED)
    ours, theirs = (SingleRun(method(name), task, 3, plan=EAGER) for name in ("moon", "fedavg"))
    for agree in (True, False):
        ours.advance(evaluate=False, cohort=np.arange(6))
        theirs.advance(evaluate=False, cohort=np.arange(6))
        assert same(ours.server["w"], theirs.server["w"], 1e-12) == agree
        assert same(take(ours.store.everyone()["own"]["old"]["w"], 7), task.init(ours.key))


def test_moon_step():
    """Features are the inputs, so that only a projection learns from the term. Its first layer is the identity in the
    positive quadrant, x = (3, 4); its second one is (1, 0), (0, 1) for w, and what is compared is (3, 4) itself,
    for w^t (0, 1), (1, 0): (4, 3), for OLD_i (1, 0), (0, 0): (3, 0). cos(f, fg) = 24/25, cos(f, fo) = 3/5, so with
    tau = 0.5 the term is log(1 + e^{(0.6 - 0.96)/0.5}) = log(1 + e^-0.72) and its derivative by cos(f, fo) -
    cos(f, fg) is 2 / (1 + e^0.72) = 0.654786. Of f: (1, 0)/5 - 0.6 f/25 = (0.128, -0.096) for OLD_i and (4, 3)/25 -
    0.96 f/25 = (0.0448, -0.0336) for w^t; their difference (0.0832, -0.0624) times 0.654786 is (0.054478, -0.040859),
    which is the step of the second bias, as mu = 10 and eta = 0.1."""
    task, alg = logreg_task(), Moon(mu=10.0, proj=2)
    eye, zero = tensor([[1, 0], [0, 1]]), tensor([0, 0])

    def model(second):
        proj = {"fc1.weight": eye, "fc1.bias": zero, "fc2.weight": tensor(second), "fc2.bias": zero}
        return {"w": task.init(0), "proj": proj}

    down, old, info = model([[0, 1], [1, 0]]), model([[1, 0], [0, 0]]), info_of([1, 0])
    work = alg.begin(task, model([[1, 0], [0, 1]]), {"old": old}, info)
    work = alg.step(task, alg.freeze(task, work, down, info), batch_of([[3, 4], [8, 8]], [0, 0], [1, 0]), down, info)
    step = work["proj"].params["fc2.bias"]
    torch.testing.assert_close(step, tensor([-0.054478, 0.040859]), rtol=0, atol=1e-6)
    expected = tensor([[0.15, 0.2], [-0.15, -0.2]])  # the head: 0.1 * 1/2 * (3, 4), from the labels alone
    torch.testing.assert_close(work["w"].params["head.weight"], expected)


def test_moon_frozen_models_keep_the_statistics_of_the_start_of_the_round():
    task, alg = make_task((9, 14), norm=True), Moon()
    run, _ = advanced(alg, task, rounds=2)
    kept, down = take(run.store.everyone(), 1), run.server
    begun = alg.begin(task, down, kept["own"], None)
    stats = kept["stats"]["w"]
    work = alg.freeze(task, {**begun, "w": begun["w"]._replace(buffers=stats)}, down, None)
    rows = task.data.splits["train"][1]
    for _ in range(3):
        work = alg.step(task, work, batch_of(task.data.x[rows], task.data.y[rows]), down, None)
    assert same(work["statistics"], stats)
    assert not same(work["w"].buffers, stats, 1e-6)
    assert same(work["old"], kept["own"]["old"])


def test_moon_survives_features_that_are_zero():
    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
            nn.init.constant_(self.first.bias, -1e3)

        def forward(self, x):
            return self.head(torch.relu(self.first(x)))

    data = make_federation(RAGGED)
    task = Task(data, Network(Dead, "head", data.x[:2], data.dtype), lr=0.1)
    assert finite(advanced(Moon(), task)[0])


# -- all of them ----------------------------------------------------------------------------------------------------

VARIANTS = [
    ("fedrod", {}),
    ("fedrod", {"personal_head": "hyper", "hidden": 7}),
    ("fedphp", {"lam": 0.4}),
    ("fedphp", {"lam": 0.4, "transfer": "kd"}),
    ("fedproto", {"lam": 1.0}),
    ("fedala", {"p": 2, "s": 60.0, "start_epochs": 11}),
    ("fedala", {"eta_A": 3.0, "start_epochs": 12}),
    ("fml", {"a": 0.3, "b": 0.8}),
    ("moon", {"mu": 3.0}),
    ("moon", {"mu": 3.0, "tau": 0.2, "proj": 5}),
]


def variant_id(value):
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=variant_id)
def test_every_variant_runs_stacked_as_one_by_one(name, settings):
    task = make_task(RAGGED, norm=True, dropout=0.2, momentum=0.5, clip=1.0, epochs=2, lr=0.05, participation=0.7)
    assert_same(method(name, **settings), task, Plan("stacked", "traced", chunk=5, shrink=0), 1e-9, rounds=4)


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=variant_id)
def test_sequences_run_stacked_as_one_by_one(name, settings):
    assert finite(
        assert_same(method(name, **settings), token_task(), Plan("stacked", "traced", chunk=3, shrink=0), 1e-9)
    )


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=variant_id)
def test_every_known_position_of_a_sequence_is_a_sample(name, settings):
    """A step on two sequences and a padded one is a step on their five known positions; so is every other pass."""
    task, alg = token_task(), method(name, **settings)
    x = torch.tensor([[0, 1, 2, 3], [4, 0, 1, 2], [1, 1, 1, 1]])
    y = torch.tensor([[1, 2, -1, -1], [3, 0, 4, -1], [0, 0, 0, 0]])
    known = (y >= 0) & torch.tensor([True, True, False])[:, None]
    info = info_of([1, 1, 1, 1, 1])
    down = alg.init_server(task, 1)
    own = take(SingleRun(alg, task, 2, plan=EAGER).store.everyone()["own"], 0)
    if name == "fedproto":
        down = {"G": tensor(np.random.default_rng(0).normal(size=(5, 6))), "known": torch.arange(5) != 2}
    found = []
    for batch in (batch_of(x, y, [1, 1, 0]), batch_of(x[known], y[known])):
        work = alg.begin(task, down, own, info)
        for phase in alg.phases(task):
            work = work if phase.enter is None else phase.enter(task, work, down, info)
            work = phase.step(task, work, batch, down, info) if phase.epochs != 0 else work
        found.append(leaves(work))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)
    assert any(not torch.equal(a, b) for a, b in zip(found[0], leaves(alg.begin(task, down, own, info)), strict=False))


NUMBERS = {  # of the small net: body 6*8 + 8 = 56, head 8*4 + 4 = 36, in float64
    "fedrod": 92 * 8,
    "fedrod hyper": (92 + 4 * 32 + 32 + 32 * 36 + 36) * 8,
    "fedphp": 92 * 8,
    "fedproto": 4 * 8 * 8 + 4,  # prototypes of four classes, and for each a byte that says whether there is one
    "fedala": 92 * 8,
    "fml": 92 * 8,
    "moon": 92 * 8,
    "moon proj": (92 + 8 * 8 + 8 + 8 * 5 + 5) * 8,
}


@pytest.mark.parametrize("case", NUMBERS)
def test_traffic(case):
    name, *variant = case.split()
    settings = {"hyper": {"personal_head": "hyper"}, "proj": {"proj": 5}}.get("".join(variant), {})
    _, records = advanced(method(name, **settings), make_task(RAGGED), rounds=2)
    for done in records:
        assert (done.bytes_down, done.bytes_up) == (len(RAGGED) * NUMBERS[case],) * 2


@pytest.mark.parametrize("name", ["fedphp", "fml"])
def test_a_client_that_never_trained_is_served_by_the_global_model(name):
    run = SingleRun(method(name), make_task(RAGGED, norm=True), 0, plan=EAGER)
    run.advance(cohort=np.array([1, 4]))
    scores = run.advance(cohort=np.array([1, 7])).scores
    known = [1, 4, 7]
    fresh = [i for i in range(len(RAGGED)) if i not in known]
    for view in ("pre", "post"):
        np.testing.assert_allclose(scores[view]["test"][fresh], scores["global"]["test"][fresh])
        assert not np.allclose(scores[view]["test"][known], scores["global"]["test"][known])


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("fedrod", {"personal_head": "hype"}, ["personal_head", "hyper"]),
        ("fedrod", {"hidden": 0}, ["hidden must be at least 1"]),
        ("fedphp", {"lam": 1.0}, ["lam must be at most 0.9999"]),
        ("fedphp", {"transfer": "mdm"}, ["transfer", "mmd"]),
        ("fedphp", {"temperature": 0}, ["temperature must be greater than 0"]),
        ("fedproto", {"lam": -1}, ["lam must be at least 0"]),
        ("fedala", {"p": 0}, ["p must be at least 1"]),
        ("fedala", {"s": 101}, ["s must be at most 100"]),
        ("fedala", {"s": 0}, ["s must be greater than 0"]),
        ("fml", {"a": 1.5}, ["a must be at most 1"]),
        ("moon", {"tau": 0}, ["tau must be greater than 0"]),
        ("moon", {"proj": 0}, ["proj must be at least 1"]),
    ],
)
def test_refused_settings(name, values, words):
    with user_error(*words):
        build(ALGORITHMS[name], values, f"algorithm '{name}'")


# -- second implementations -----------------------------------------------------------------------------------------
# Modules, optimisers and loops in plain PyTorch. They are given data and initial values. A batch holds all samples of
# a client, so that the order of samples does not matter; rounds, sizes, late and missed participations do.

COHORTS = ((0, 1, 3), (1, 2), (0, 1, 2, 3), (1, 3))
LR, MOMENTUM, DECAY, EPOCHS, SEED = 0.1, 0.5, 0.01, 2, 5


def features(net, x):
    return torch.tanh(net.norm(net.first(x)))


def put(net, params):
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(params[name])
    return net


def values(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def average(shares, models):
    return {name: sum(a * m[name] for a, m in zip(shares, models, strict=True)) for name in models[0]}


def layers(found):
    """fc1, ReLU, fc2 as modules."""
    made = []
    for j in (1, 2):
        weight, bias = found[f"fc{j}.weight"], found[f"fc{j}.bias"]
        layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
        layer.load_state_dict({"weight": weight, "bias": bias})
        made += [layer, nn.ReLU()]
    return nn.Sequential(*made[:-1])


class Hand:
    """FedAvg; the methods are made of it."""

    equal = False  # clients count equally

    def __init__(self, net, train, server, clip, settings):
        self.train_data, self.clip, self.s = train, clip, settings
        self.start = copy.deepcopy(net)
        self.w = values(net)
        self.nets = [copy.deepcopy(net) for _ in train]  # their parameters are replaced, their statistics stay
        self.trained = [None] * len(train)  # PM_post
        self.prepare(server)

    def prepare(self, server):
        pass

    def optimizer(self, *modules):
        return torch.optim.SGD([p for m in modules for p in m.parameters()], LR, MOMENTUM, weight_decay=DECAY)

    def step(self, optimizers):
        for optimizer in optimizers:
            if self.clip is not None:
                nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], self.clip)
            optimizer.step()

    def minimise(self, optimizers, loss):
        for _ in range(EPOCHS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss().backward()
            self.step(optimizers)

    def round(self, t, cohort):
        sent = [self.client(t, i) for i in cohort]
        sizes = [1 if self.equal else len(self.train_data[i][1]) for i in cohort]
        self.merge([n / sum(sizes) for n in sizes], sent)

    def merge(self, shares, sent):
        self.w = average(shares, sent)

    def global_logits(self, i, x):
        return put(self.nets[i].eval(), self.w)(x)


class HandRoD(Hand):
    def prepare(self, server):
        self.hyper = self.s.get("personal_head") == "hyper"
        self.nu = layers(server["nu"]) if self.hyper else None
        self.heads = [copy.deepcopy(self.start.head) for _ in self.train_data]

    def second(self, i, f, nu, head):
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
            return generic + F.cross_entropy(z.detach() + self.second(i, f.detach(), nu, self.heads[i]), y)

        self.minimise([self.optimizer(net), self.optimizer(nu if self.hyper else self.heads[i])], loss)
        self.trained[i] = copy.deepcopy((net, nu, self.heads[i]))
        return {**values(net), **({f"nu.{k}": v for k, v in values(nu).items()} if self.hyper else {})}

    def merge(self, shares, sent):
        found = average(shares, sent)
        self.w = {k: v for k, v in found.items() if not k.startswith("nu.")}
        if self.hyper:
            put(self.nu, {k.removeprefix("nu."): v for k, v in found.items() if k.startswith("nu.")})

    def both(self, i, x, net, nu, head):
        f = features(net.eval(), x)
        return net.head(f) + self.second(i, f, nu, head)

    def pre(self, i, x):
        return self.both(i, x, put(self.nets[i], self.w), self.nu, self.heads[i])

    def post(self, i, x):
        return self.both(i, x, *self.trained[i])

    def check(self, run):
        if self.hyper:
            for j, p in enumerate(self.nu.parameters()):
                found = run.server["nu"][f"fc{1 + j // 2}.{'bias' if j % 2 else 'weight'}"]
                torch.testing.assert_close(found, p.detach(), rtol=1e-9, atol=1e-11)
        else:
            compare(run.store.everyone()["own"]["hP"], self.heads, "head.")


class HandPHP(Hand):
    def prepare(self, server):
        self.q = [copy.deepcopy(self.start) for _ in self.train_data]
        self.times = [0] * len(self.train_data)

    def client(self, t, i):
        (x, y), net, q = self.train_data[i], put(self.nets[i].train(), self.w), self.q[i].eval()
        lam = self.s["lam"]

        def kernel(a, b):
            gaps = torch.stack([((p - r) ** 2).sum() for p in a for r in b])
            return sum(torch.exp(-gaps / (2 * s)) for s in (10, 15, 20, 50)).mean()

        def loss():
            f = features(net, x)
            z = net.head(f)
            fq = features(q, x).detach()
            if self.s.get("transfer") == "kd":
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
        kept = run.store.everyone()
        compare(kept["own"]["q"], self.q)
        compare(kept["stats"].get("q", {}), self.q)
        assert kept["own"]["c"].tolist() == self.times


class HandProto(Hand):
    def prepare(self, server):
        self.G = {}

    def client(self, t, i):
        (x, y), net, G = self.train_data[i], self.nets[i].train(), dict(self.G)

        def loss():
            f = features(net, x)
            gaps = [((f[j] - G[c]) ** 2).sum() for j, c in enumerate(y.tolist()) if c in G]
            return F.cross_entropy(net.head(f), y) + self.s["lam"] * sum(gaps) / (len(y) * 8)

        self.minimise([self.optimizer(net)], loss)
        self.trained[i] = copy.deepcopy(net), G
        with torch.no_grad():
            f = features(net.eval(), x)
        return {c: f[y == c].mean(0) for c in set(y.tolist())}

    def merge(self, shares, sent):
        for c in {c for one in sent for c in one}:
            mine = [one[c] for one in sent if c in one]
            self.G[c] = sum(mine) / len(mine)

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
        compare(run.store.everyone()["own"]["theta"], self.nets)
        assert run.server["known"].tolist() == [c in self.G for c in range(4)]
        for c, proto in self.G.items():
            torch.testing.assert_close(run.server["G"][c], proto, rtol=1e-9, atol=1e-11)


class HandALA(Hand):
    def prepare(self, server):
        last = ("head.weight", "head.bias") if self.s["p"] == 1 else tuple(self.w)
        self.A = [{k: torch.ones_like(self.w[k]) for k in last} for _ in self.train_data]
        self.theta, self.times = [None] * len(self.train_data), [0] * len(self.train_data)

    def download(self, t, i):
        """theta_hat and A after the download step of round t."""
        theta, A = self.theta[i], dict(self.A[i])
        if theta is None:
            return dict(self.w), A
        x, y = self.train_data[i]
        size = max(1, math.floor(self.s["s"] / 100 * len(y) + 1e-9))
        start = int(np.random.default_rng([SEED, zlib.crc32(b"ala"), i, t]).integers(0, len(y) - size + 1))
        x, y = x[start : start + size], y[start : start + size]
        losses = []
        while True:
            hat = {**self.w, **{k: theta[k] + (self.w[k] - theta[k]) * A[k] for k in A}}
            validated = len(losses) >= 10 and np.std(losses[-10:]) < 0.1
            if len(losses) == (1 if self.times[i] > 1 else 50) or validated:
                return hat, A
            net, loss = put(copy.deepcopy(self.nets[i]).train(), hat), torch.tensor(math.nan)
            if len(y) > 1 or isinstance(net.norm, nn.Identity):
                with torch.enable_grad():
                    loss = F.cross_entropy(net(x), y)
                    loss.backward()
                g = {name: p.grad for name, p in net.named_parameters()}
                A = {k: (A[k] - self.s["eta_A"] * g[k] * (self.w[k] - theta[k])).clamp(0, 1) for k in A}
            losses.append(loss.item())

    def client(self, t, i):
        hat, self.A[i] = self.download(t, i)
        (x, y), net = self.train_data[i], put(self.nets[i].train(), hat)
        self.minimise([self.optimizer(net)], lambda: F.cross_entropy(net(x), y))
        self.theta[i] = values(net)
        self.times[i] += 1
        self.trained[i] = copy.deepcopy(net)
        return values(net)

    def pre(self, i, x):
        return put(self.nets[i], self.download(len(COHORTS), i)[0]).eval()(x)

    def post(self, i, x):
        return self.trained[i].eval()(x)

    def check(self, run):
        own = run.store.everyone()["own"]
        for i, A in enumerate(self.A):
            for name, a in A.items():
                torch.testing.assert_close(own["A"][name][i], a, rtol=1e-9, atol=1e-11)
            for name, p in self.theta[i].items():
                torch.testing.assert_close(own["theta"][name][i], p, rtol=1e-9, atol=1e-11)


class HandFML(Hand):
    equal = True

    def prepare(self, server):
        self.theta = [copy.deepcopy(self.start) for _ in self.train_data]

    def client(self, t, i):
        (x, y), net, theta = self.train_data[i], put(self.nets[i].train(), self.w), self.theta[i].train()

        def towards(z, target):
            return F.kl_div(F.log_softmax(z, 1), F.softmax(target.detach(), 1), reduction="batchmean")

        def loss():
            z, zg = theta(x), net(x)
            a, b = self.s["a"], self.s["b"]
            mine = a * F.cross_entropy(z, y) + (1 - a) * towards(z, zg)
            return mine + b * F.cross_entropy(zg, y) + (1 - b) * towards(zg, z)

        self.minimise([self.optimizer(theta), self.optimizer(net)], loss)
        return values(net)

    def pre(self, i, x):
        return self.theta[i].eval()(x)

    post = pre

    def check(self, run):
        compare(run.store.everyone()["own"]["theta"], self.theta)


class HandMoon(Hand):
    def prepare(self, server):
        self.proj = layers(server["proj"]) if "proj" in server else nn.Identity()
        self.old = [(copy.deepcopy(self.start), copy.deepcopy(self.proj)) for _ in self.train_data]

    def client(self, t, i):
        (x, y), proj = self.train_data[i], copy.deepcopy(self.proj)
        net = put(self.nets[i], self.w)
        with torch.no_grad():  # w^t and OLD_i with the client's running statistics, which are those of OLD_i
            fg = self.proj(features(net.eval(), x))
            fo = self.old[i][1](features(self.old[i][0].eval(), x))
        net.train()

        def loss():
            f = features(net, x)
            p = proj(f)
            pair = torch.stack([F.cosine_similarity(p, fg, dim=1), F.cosine_similarity(p, fo, dim=1)], 1)
            term = F.cross_entropy(pair / self.s.get("tau", 0.5), torch.zeros(len(y), dtype=torch.int64))
            return F.cross_entropy(net.head(f), y) + self.s["mu"] * term

        self.minimise([self.optimizer(net, proj)], loss)
        self.old[i] = copy.deepcopy((net, proj))
        return {**values(net), **{f"proj.{k}": v for k, v in values(proj).items()}}

    def merge(self, shares, sent):
        found = average(shares, sent)
        self.w = {k: v for k, v in found.items() if not k.startswith("proj.")}
        put(self.proj, {k.removeprefix("proj."): v for k, v in found.items()})

    def pre(self, i, x):
        return self.global_logits(i, x)

    def post(self, i, x):
        return self.old[i][0].eval()(x)

    def check(self, run):
        compare(run.store.everyone()["own"]["old"]["w"], [net for net, _ in self.old])
        for j, p in enumerate(self.proj.parameters()):
            found = run.server["proj"][f"fc{1 + j // 2}.{'bias' if j % 2 else 'weight'}"]
            torch.testing.assert_close(found, p.detach(), rtol=1e-9, atol=1e-11)


def compare(rows, modules, prefix=""):
    """Stacked values by name against the modules of the clients."""
    for i, module in enumerate(modules):
        state = {f"{prefix}{name}": v for name, v in module.state_dict().items()}
        for name, value in rows.items():
            torch.testing.assert_close(value[i], state[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


HANDS = {
    "fedrod": HandRoD, "fedphp": HandPHP, "fedproto": HandProto, "fedala": HandALA, "fml": HandFML, "moon": HandMoon,
}  # fmt: skip
CASES = [
    ("fedrod", {}),
    ("fedrod", {"personal_head": "hyper"}),
    ("fedphp", {"lam": 0.4}),
    ("fedphp", {"lam": 0.4, "transfer": "kd"}),
    ("fedproto", {"lam": 3.0}),
    ("fedala", {"p": 1, "s": 80.0, "eta_A": 5.0}),
    ("fedala", {"p": 2, "s": 55.0, "eta_A": 2.0}),
    ("fml", {"a": 0.3, "b": 0.8}),
    ("moon", {"mu": 3.0}),
    ("moon", {"mu": 3.0, "tau": 0.2, "proj": 5}),
]


@pytest.mark.parametrize(
    ("norm", "clip"), [(False, None), (True, None), (False, 0.2)], ids=["plain", "batchnorm", "clipped"]
)
@pytest.mark.parametrize(("name", "settings"), CASES, ids=variant_id)
def test_a_second_implementation(name, settings, norm, clip):
    """Server, clients, and what all views score."""
    sizes = (3 if norm else 1, 17, 8, 11)
    task = make_task(
        sizes, norm=norm, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, clip=clip, epochs=EPOCHS, batch_size=max(sizes),
        rounds=len(COHORTS), participation=0.5,
    )  # fmt: skip
    run = SingleRun(method(name, **settings), task, SEED, plan=ALONE)
    net = put(SmallNet(norm=norm).double(), task.init(run.key))
    rows = {split: [task.data.splits[split][i] for i in range(4)] for split in ("train", "test")}
    data = {split: [(task.data.x[r], task.data.y[r]) for r in found] for split, found in rows.items()}
    hand = HANDS[name](net, data["train"], run.server, clip, settings)
    for t, cohort in enumerate(COHORTS):
        hand.round(t, cohort)
        scores = run.advance(cohort=np.array(cohort)).scores
    if "w" in run.server:
        for key, value in run.server["w"].items():
            torch.testing.assert_close(value, hand.w[key], rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")
    hand.check(run)
    views = {"pre": hand.pre, "post": hand.post, "global": hand.global_logits}
    assert set(scores) == {view for view, found in views.items() if found is not None}
    for view in scores:
        for i, (x, y) in enumerate(data["test"]):
            with torch.no_grad():
                logits = views[view](i, x)
            expected = [(logits.argmax(1) == y).sum(), F.cross_entropy(logits, y, reduction="sum"), len(y)]
            assert scores[view]["test"][i].tolist() == pytest.approx(list(map(float, expected)), rel=1e-9), (view, i)


def test_the_second_implementation_of_fedala_has_weights_inside_and_at_the_ends():
    """So that the comparison sees both the step and its limits."""
    task = make_task((1, 17, 8, 11), lr=LR, epochs=EPOCHS, batch_size=17, rounds=4)
    run, _ = advanced(FedALA(eta_A=5.0), task, cohorts=COHORTS)
    A = torch.cat([v.flatten() for v in leaves(run.store.everyone()["own"]["A"])])
    assert (A == 1).any()
    assert ((A > 0) & (A < 1)).any()


def test_momentum_starts_anew_for_the_second_model_too():
    """FML's and FedRoD's second model, and MOON's projection: a round of two steps is another than two of one."""
    for name, settings in (("fml", {}), ("fedrod", {}), ("moon", {"proj": 4})):
        task = make_task((9, 14), momentum=0.9, batch_size=14)
        once = advanced(method(name, **settings), replace(task, epochs=2), rounds=1)[0]
        twice = advanced(method(name, **settings), task, rounds=2)[0]
        assert not same(once.store.everyone()["own"], twice.store.everyone()["own"], 1e-6)
