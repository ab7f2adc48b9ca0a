"""FedALA: steps of the aggregation weights, when and on which samples they are learnt, and second implementations."""

import copy
import math
import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EAGER,
    PER_CLIENT,
    RAGGED,
    SingleRun,
    SmallNet,
    client_info,
    client_state,
    full_batch_task,
    logreg_task,
    make_batch,
    make_task,
    method,
    run_rounds,
    running_statistics,
    tensor,
)
from oracles import (
    PlainFedAvg,
    assert_equal,
    assert_finite,
    assert_like_plain,
    assert_near,
    assert_same_scores,
    flat,
    put,
    values,
    with_networks,
)
from torch import nn

from fedloom.algorithms.fedala import FedALA
from fedloom.core.algorithm import Draw
from fedloom.core.task import Task
from fedloom.core.tree import take, tree_map
from fedloom.engine.plan import Plan
from fedloom.studies.build import check


class SlopeTask(Task):
    """Parameters `first` and `p`; the loss is slope * p."""

    layers = (("first",), ("p",))

    def forward(self, slot, batch):
        return slot.params

    def loss(self, out, batch):
        return self.lr * out["p"]  # the setting serves as slope


def learn_once(theta, w, A, slope, alg):
    """A client that starts a round with theta, w and A, before and after one step on A."""
    task = SlopeTask(SimpleNamespace(dtype=torch.float64), SimpleNamespace(buffers={}), lr=slope)
    down = {"w": {"first": tensor(7.0), "p": tensor(w)}}
    state = {"theta": {"first": tensor(-5.0), "p": tensor(theta)}, "A": {"p": tensor(A)}, "learnt": torch.tensor(True)}
    info = client_info(first=False)
    begun = alg.begin(task, down, state, info)
    return begun, alg.learn(task, begun, make_batch([[0]], [0]), down, info)


def test_fedala_step_of_the_weights():
    """theta = 0, w = 1, A = 1, gradient 2, eta_A = 1: A = clip(1 - 2 * (1 - 0), 0, 1) = 0, so theta_hat = 0."""
    begun, work = learn_once(0.0, 1.0, 1.0, 2.0, FedALA())
    assert begun["theta"].params["p"] == 1
    assert begun["theta"].params["first"] == 7  # all but the last layer come from w
    assert work["A"]["p"] == 0
    assert work["theta"].params == {"first": tensor(7.0), "p": tensor(0.0)}


def test_fedala_step_of_the_weights_inside_the_interval():
    """theta = 1, w = 3, A = 0.5: theta_hat = 2; gradient -0.1, eta_A = 0.5: A = 0.5 + 0.5 * 0.1 * 2 = 0.6, so
    theta_hat = 2.2. A gradient of -9 would give 9.5, which is clipped to 1."""
    begun, work = learn_once(1.0, 3.0, 0.5, -0.1, FedALA(eta_A=0.5))
    assert begun["theta"].params["p"] == 2
    assert work["A"]["p"].item() == pytest.approx(0.6)
    assert work["theta"].params["p"].item() == pytest.approx(2.2)
    assert learn_once(1.0, 3.0, 0.5, -9.0, FedALA(eta_A=0.5))[1]["A"]["p"] == 1


def test_fedala_without_steps_of_the_weights_is_fedavg():
    """A stays 1: everything comes from w."""
    task = make_task(RAGGED, participation=0.5, epochs=2, momentum=0.5, norm=True)
    run, records = run_rounds(FedALA(eta_A=0.0, p=9), task, evaluate=True)
    fedavg, expected = run_rounds(method("fedavg"), task, evaluate=True)
    assert_near(run.server, fedavg.server)
    assert_near(running_statistics(run, "theta"), running_statistics(fedavg, "w"))
    assert_same_scores(records, expected)


def test_fedala_first_participation_starts_from_the_global_model_whenever_it_is():
    task = make_task(RAGGED)
    run, _ = run_rounds(FedALA(), task, cohorts=[(1, 4), (1, 4), (1, 7)])
    assert client_state(run, "learnt").nonzero().flatten().tolist() == [1, 4]
    assert all((v == 1).all() for v in client_state(run, "A", 7).values())
    assert all((v < 1).any() for v in client_state(run, "A", 1).values())
    work = run.executor.begin(run.cohort(np.array([0]), run.t))
    assert_equal(take(work["theta"].params, 0), run.server["w"])


def settled_after(losses):
    """Are the weights learnt after epochs with these losses?"""
    window = [math.nan] * 10 + losses
    return bool(FedALA().settled({"losses": tensor(window[-10:])}))


def test_fedala_weights_are_learnt_when_ten_losses_hardly_differ():
    """The standard deviation of five 0 and five 0.2 is 0.1, which is not below 0.1."""
    assert not settled_after([1.0] * 9)
    assert settled_after([1.0] * 10)
    assert not settled_after([0.0, 0.2] * 5)
    assert settled_after([0.0, 0.199] * 5)
    assert settled_after([9.0] * 30 + [1.0] * 10)
    assert not settled_after([9.0] * 30 + [1.0] * 9)


@pytest.mark.parametrize(
    "plan", [PER_CLIENT, EAGER, Plan("stacked", "traced", chunk=5, shrink=0)], ids=lambda p: p.replay or p.mode
)
def test_fedala_epochs_on_the_weights(plan):
    """None at first, 10 to 50 at the second participation, one later."""

    @dataclass(frozen=True)
    class Watched(FedALA):
        def begin(self, task, down, state, info):
            return {**super().begin(task, down, state, info), "epochs": torch.zeros_like(info.n)}

        def learn(self, task, work, batch, down, info):
            found = super().learn(task, work, batch, down, info)
            return {**found, "epochs": work["epochs"] + batch.last}

        def report(self, task, work, down, info):
            return {"epochs": work["epochs"]}

    task = make_task(RAGGED, lr=0.6)
    counts = [r.reports["epochs"].tolist() for r in run_rounds(Watched(eta_A=5.0), task, rounds=4, plan=plan)[1]]
    assert set(counts[0]) == {0}
    assert min(counts[1]) == 10
    assert 10 < max(counts[1]) <= 50
    assert set(counts[2]) == set(counts[3]) == {1}
    capped = [r.reports["epochs"].tolist() for r in run_rounds(Watched(start_epochs=3), task, rounds=2, plan=plan)[1]]
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
    with_, without = (run_rounds(FedALA(), task, rounds=4, evaluate=e)[0] for e in (True, False))
    assert_equal(with_.store.everyone(), without.store.everyone())
    assert_equal(with_.server, without.server)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("p", [1, 2, 7])
def test_fedala_weights_against_plain_pytorch(p, norm):
    """Several batches and many epochs, from the state after a round: what PM_pre uses, and the A_i that the next round
    keeps. Running statistics do not move while A_i is learnt."""
    sizes, seed, eta = (3, 42, 23), 3, 4.0
    task = make_task(sizes, norm=norm, batch_size=10, lr=0.3)
    run = SingleRun(FedALA(p=p, eta_A=eta), task, seed, plan=EAGER)
    scores = run.advance().scores
    thetas, statistics = tree_map(torch.clone, (client_state(run, "theta"), running_statistics(run, "theta")))
    w = run.server["w"]
    run.advance(evaluate=False)
    for i, n in enumerate(sizes):
        net = SmallNet(norm=norm).double()
        stats, theta = take(statistics, i), take(thetas, i)
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
            assert_near(client_state(run, "A", i)[name], a.detach(), 1e-9)
        net.load_state_dict({**net.state_dict(), **stats})
        test = task.data.splits["test"][i]
        with torch.no_grad():
            out = torch.func.functional_call(net.eval(), mixed(), task.data.x[test])
        expected = F.cross_entropy(out, task.data.y[test], reduction="sum").item()
        assert scores["pre"]["test"][i, 1] == pytest.approx(expected, rel=1e-9)


def test_fedala_with_a_single_layer_mixes_the_whole_model():
    task = logreg_task(RAGGED, dim=6, classes=4)
    check(FedALA(), task)
    run, _ = run_rounds(FedALA(), task, evaluate=True)
    assert set(client_state(run, "A")) == set(run.server["w"])
    assert_finite(run)


def test_fedala_reports_how_much_comes_from_the_global_model():
    _, records = run_rounds(FedALA(), make_task(RAGGED))
    assert (records[0].reports["A"] == 1).all()
    assert ((records[-1].reports["A"] >= 0) & (records[-1].reports["A"] < 1)).any()


class PlainFedALA(PlainFedAvg):
    """Weights A with which a client mixes its own model and the global one when it downloads."""

    def prepare(self, server):
        last = ("head.weight", "head.bias") if self.settings["p"] == 1 else tuple(self.w)
        self.A = [{k: torch.ones_like(self.w[k]) for k in last} for _ in self.train_data]
        self.theta, self.times = [None] * len(self.train_data), [0] * len(self.train_data)

    def download(self, t, i):
        """theta_hat and A after the download step of round t."""
        theta, A = self.theta[i], dict(self.A[i])
        if theta is None:
            return dict(self.w), A
        x, y = self.train_data[i]
        size = max(1, math.floor(self.settings["s"] / 100 * len(y) + 1e-9))
        start = int(np.random.default_rng([self.SEED, zlib.crc32(b"ala"), i, t]).integers(0, len(y) - size + 1))
        x, y = x[start : start + size], y[start : start + size]
        losses = []
        while True:
            hat = {**self.w, **{k: theta[k] + (self.w[k] - theta[k]) * A[k] for k in A}}
            settled = len(losses) >= 10 and np.std(losses[-10:]) < 0.1
            if len(losses) == (1 if self.times[i] > 1 else 50) or settled:
                return hat, A
            net, loss = put(copy.deepcopy(self.nets[i]).train(), hat), torch.tensor(math.nan)
            if len(y) > 1 or isinstance(net.norm, nn.Identity):
                with torch.enable_grad():
                    loss = F.cross_entropy(net(x), y)
                    loss.backward()
                g = {name: p.grad for name, p in net.named_parameters()}
                A = {k: (A[k] - self.settings["eta_A"] * g[k] * (self.w[k] - theta[k])).clamp(0, 1) for k in A}
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
        return put(self.nets[i], self.download(len(self.COHORTS), i)[0]).eval()(x)

    def post(self, i, x):
        return self.trained[i].eval()(x)

    def check(self, run):
        for i, A in enumerate(self.A):
            assert_near(client_state(run, "A", i), A, 1e-10)
            assert_near(client_state(run, "theta", i), self.theta[i], 1e-10)


@with_networks
@pytest.mark.parametrize(
    "settings", [{"p": 1, "s": 80.0, "eta_A": 5.0}, {"p": 2, "s": 55.0, "eta_A": 2.0}], ids=["head", "all"]
)
def test_fedala_against_plain_pytorch(settings, norm, clip):
    assert_like_plain(PlainFedALA, "fedala", settings, norm, clip)


def test_the_second_implementation_of_fedala_has_weights_inside_and_at_the_ends():
    """So that the comparison sees both the step and its limits."""
    task = full_batch_task((1, 17, 8, 11), lr=PlainFedALA.LR, epochs=PlainFedALA.EPOCHS, rounds=4)
    run, _ = run_rounds(FedALA(eta_A=5.0), task, cohorts=PlainFedALA.COHORTS)
    A = flat(client_state(run, "A"))
    assert (A == 1).any()
    assert ((A > 0) & (A < 1)).any()
