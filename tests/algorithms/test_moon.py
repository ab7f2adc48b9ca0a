"""MOON: a step with numbers by hand, identities, frozen models, and a second implementation."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EAGER,
    RAGGED,
    SingleRun,
    client_info,
    client_state,
    logreg_task,
    make_batch,
    make_federation,
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
    assert_modules,
    assert_near,
    assert_same_scores,
    average,
    client_samples,
    dense_layers,
    dense_values,
    features,
    is_near,
    put,
    values,
    with_networks,
)
from torch import nn

from fedloom.algorithms.moon import Moon
from fedloom.core.task import Task
from fedloom.nn.network import Network


@pytest.mark.parametrize("proj", [None, 5])
def test_moon_without_its_term_is_fedavg(proj):
    task = make_task(RAGGED, participation=0.5, epochs=2, momentum=0.5, clip=0.5, norm=True)
    run, records = run_rounds(Moon(mu=0.0, proj=proj), task, evaluate=True)
    fedavg, expected = run_rounds(method("fedavg"), task, evaluate=True)
    assert_near(run.server["w"], fedavg.server["w"])
    assert_same_scores(records, expected, tolerance=1e-12)


def test_moon_has_a_constant_term_in_the_first_round_and_one_that_matters_later():
    """OLD_i = w^0: the term is log 2 whatever the features are. A client that comes later has OLD_i = w^0 and w^t."""
    task = make_task(RAGGED)
    run, fedavg = (SingleRun(method(name), task, 3, plan=EAGER) for name in ("moon", "fedavg"))
    for agree in (True, False):
        run.advance(evaluate=False, cohort=np.arange(6))
        fedavg.advance(evaluate=False, cohort=np.arange(6))
        assert is_near(run.server["w"], fedavg.server["w"]) == agree
        assert_equal(client_state(run, "old", 7)["w"], task.init(run.key))


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

    down, old, info = model([[0, 1], [1, 0]]), model([[1, 0], [0, 0]]), client_info([1, 0])
    work = alg.begin(task, model([[1, 0], [0, 1]]), {"old": old}, info)
    work = alg.step(task, alg.freeze(task, work, down, info), make_batch([[3, 4], [8, 8]], [0, 0], [1, 0]), down, info)
    step = work["proj"].params["fc2.bias"]
    torch.testing.assert_close(step, tensor([-0.054478, 0.040859]), rtol=0, atol=1e-6)
    expected = tensor([[0.15, 0.2], [-0.15, -0.2]])  # the head: 0.1 * 1/2 * (3, 4), from the labels alone
    torch.testing.assert_close(work["w"].params["head.weight"], expected)


def test_moon_frozen_models_keep_the_statistics_of_the_start_of_the_round():
    task, alg = make_task((9, 14), norm=True), Moon()
    run, _ = run_rounds(alg, task, rounds=2)
    down, state, stats = run.server, client_state(run, i=1), running_statistics(run, "w", 1)
    begun = alg.begin(task, down, state, None)
    work = alg.freeze(task, {**begun, "w": begun["w"]._replace(buffers=stats)}, down, None)
    for _ in range(3):
        work = alg.step(task, work, make_batch(*client_samples(task, "train")[1]), down, None)
    assert_equal(work["statistics"], stats)
    assert not is_near(work["w"].buffers, stats, 1e-6)
    assert_equal(work["old"], state["old"])


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
    assert_finite(run_rounds(Moon(), task)[0])


class PlainMoon(PlainFedAvg):
    """Features are drawn to those of the global model and away from those of the client's last one."""

    def prepare(self, server):
        self.proj = dense_layers(server["proj"]) if "proj" in server else nn.Identity()
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
            term = F.cross_entropy(pair / self.settings.get("tau", 0.5), torch.zeros(len(y), dtype=torch.int64))
            return F.cross_entropy(net.head(f), y) + self.settings["mu"] * term

        self.minimise([self.optimizer(net, proj)], loss)
        self.old[i] = copy.deepcopy((net, proj))
        return {**values(net), **{f"proj.{k}": v for k, v in values(proj).items()}}

    def merge(self, weights, sent):
        found = average(sent, weights)
        self.w = {k: v for k, v in found.items() if not k.startswith("proj.")}
        put(self.proj, {k.removeprefix("proj."): v for k, v in found.items()})

    def pre(self, i, x):
        return self.global_logits(i, x)

    def post(self, i, x):
        return self.old[i][0].eval()(x)

    def check(self, run):
        assert_modules(client_state(run, "old")["w"], [net for net, _ in self.old])
        if "proj" in run.server:
            assert_near(run.server["proj"], dense_values(self.proj), 1e-10)


@with_networks
@pytest.mark.parametrize("settings", [{"mu": 3.0}, {"mu": 3.0, "tau": 0.2, "proj": 5}], ids=["features", "projection"])
def test_moon_against_plain_pytorch(settings, norm, clip):
    assert_like_plain(PlainMoon, "moon", settings, norm, clip)
