"""PartialFed: which layers a client loads, the policy's step, the fixed policy, and second implementations."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EAGER,
    RAGGED,
    SingleRun,
    SmallNet,
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
    EVERY_SETTING,
    assert_equal,
    assert_near,
    assert_same_scores,
    assert_scores,
    average,
    first_part,
    full_batch_run,
    stack,
)
from sentences import user_error

from fedloom.algorithms import partialfed
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.algorithm import Phase
from fedloom.core.keys import fold, root
from fedloom.core.task import Task
from fedloom.core.tree import tree_map
from fedloom.nn.network import Network
from fedloom.studies.build import check

SIZES = (3, 17, 8, 11)
INFO = client_info(first=False)


@dataclass(frozen=True)
class LocalLayers(partialfed.PartialFed):
    """PartialFed whose clients start with a policy for their local layers."""

    def init_client(self, task, key, key_i):
        started = super().init_client(task, key, key_i)
        return {**started, "pi": started["pi"] + tensor([1, 0])}


@pytest.mark.parametrize("settings", [{}, EVERY_SETTING], ids=["defaults", "every setting"])
@pytest.mark.parametrize("how", [{"policy_lr": 0.0, "policy_epochs": 3}, {"policy_epochs": 0}, {"warmup": 1.0}])
def test_partialfed_with_all_layers_global_is_fedavg(settings, how):
    """Also in its running statistics, which passes for the policy leave alone, and so during the whole warm-up."""
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    run, records = run_rounds(method("partialfed", **{"warmup": 0.0, **how}), task, evaluate=True)
    fedavg, expected = run_rounds(method("fedavg"), task, evaluate=True)
    assert_near(run.server["w"], fedavg.server["w"])
    assert_near(running_statistics(run), running_statistics(fedavg))
    assert_same_scores(records, expected)


@pytest.mark.parametrize("settings", [{}, EVERY_SETTING], ids=["defaults", "every setting"])
def test_partialfed_with_all_layers_local_is_local(settings):
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    run, records = run_rounds(LocalLayers(policy_lr=0.0, warmup=0.0), task, evaluate=True)
    local, expected = run_rounds(method("local"), task, evaluate=True)
    assert_near(client_state(run, "theta"), client_state(local, "theta"))
    assert_same_scores(records, expected, ["pre", "post"])


def test_a_layer_is_global_unless_the_policy_prefers_the_local_one():
    """Layers of the small net: first, head. Equal logits mean global."""
    task, alg = make_task(SIZES), method("partialfed")
    theta, down = task.init(1), {"w": task.init(2)}
    for pi, first, head in (
        (((0, 0), (0, 0)), "w", "w"),
        (((0.1, 0), (0, 0.1)), "theta", "w"),
        (((-0.2, -0.1), (0.3, 0.2)), "w", "theta"),
    ):
        found = alg.loaded(task, {"theta": theta, "pi": tensor(pi)}, down)
        expected = {"first": {"w": down["w"], "theta": theta}[first], "head": {"w": down["w"], "theta": theta}[head]}
        for name, v in found.items():
            assert torch.equal(v, expected[name.split(".")[0]][name]), (pi, name)


@pytest.mark.parametrize(("t", "heat"), [(0, 5.0), (10, 3.501411), (100, 0.5)])
def test_the_policys_step_against_plain_pytorch(t, heat, monkeypatch):
    """Three batches with given noise against a straight-through draw and torch.optim.Adam. Temperatures:
    5 * 0.965^10 = 5 * e^(10 ln 0.965) = 5 * e^-0.356272 = 3.501411; 5 * 0.965^100 = 0.142 is below the least, 0.5."""
    task = make_task(SIZES)
    alg, theta, w = method("partialfed"), task.init(1), task.init(2)
    draw = torch.Generator().manual_seed(t)
    noises = [torch.randn(2, 2, dtype=torch.float64, generator=draw) for _ in range(3)]
    monkeypatch.setattr(partialfed, "gumbel", lambda key, shape, dtype: noises[int(key)])
    monkeypatch.setattr(partialfed, "fold", lambda key, *ids: key)
    work = alg.begin(task, {"w": w}, {"theta": theta, "pi": tensor([[0, 0], [0, 0]])}, INFO)
    pi = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    opt = torch.optim.Adam([pi], lr=0.01)
    for k in range(3):
        x, y = task.data.x[5 * k : 5 * k + 5], task.data.y[5 * k : 5 * k + 5]
        work = alg.policy_step(task, work, make_batch(x, y, k=k, key=k), {"w": w}, INFO._replace(t=torch.tensor(t)))
        opt.zero_grad()
        soft = F.softmax((pi + noises[k]) / heat, dim=1)
        hard = F.one_hot(soft.argmax(1), 2).double()
        u = hard - soft.detach() + soft
        params = {k: u[int("head" in k), 1] * w[k] + u[int("head" in k), 0] * theta[k] for k in w}
        F.cross_entropy(torch.func.functional_call(SmallNet().double(), params, (x,)), y).backward()
        opt.step()
        torch.testing.assert_close(work["pi"], pi.detach(), rtol=1e-6, atol=1e-12)
    assert (work["pi"] != 0).all()
    assert_equal(work["theta"], theta)
    torch.testing.assert_close(work["pi"][:, 0], -work["pi"][:, 1])  # what one gains the other loses


def test_gumbel_noise_draws_from_the_softmax():
    """Logits (0, ln 3): the second is larger in three of four draws. 20,000 draws have a standard deviation of
    sqrt(3/16 / 20000) = 0.0031. The mean of the noise is Euler's constant, 0.5772, its variance pi^2/6."""
    keys = fold(root(0, "test"), torch.arange(20000))
    noise = torch.stack([partialfed.gumbel(k, (2,), torch.float64) for k in keys])
    share = (noise + tensor([0, math.log(3)])).argmax(1).double().mean()
    assert float(share) == pytest.approx(0.75, abs=0.013)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.03)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gumbel_noise_is_finite_at_both_ends(dtype, monkeypatch):
    for u in (0.0, 1 - 2.0**-24):
        monkeypatch.setattr(partialfed, "uniform", lambda key, shape, dtype, u=u: torch.full(shape, u, dtype=dtype))
        assert torch.isfinite(partialfed.gumbel(None, (2, 2), dtype)).all()


@pytest.mark.parametrize("good", ["local", "global"])
def test_the_policy_turns_to_the_layers_that_fit(good):
    """One of two models is trained on the client's samples, the other is noise."""
    task = make_task((40, 40), lr=0.5, rounds=100)
    run, _ = run_rounds(method("local"), task, rounds=20, seed=7)
    trained = client_state(run, "theta", 0)
    noise = tree_map(
        lambda v: 3 * torch.randn(v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(0)), trained
    )
    theta, w = (trained, noise) if good == "local" else (noise, trained)
    alg = method("partialfed", policy_epochs=5, warmup=0.0)
    learning = SingleRun(alg, task, 0, plan=EAGER)
    learning.advance(evaluate=False)  # from now on nobody is new
    state = {"theta": stack(theta, theta), "pi": torch.zeros_like(client_state(learning, "pi"))}
    learning.store.write(np.arange(2), {**learning.store.everyone(), "own": state})
    learning.server = {"w": w}
    found = learning.advance(evaluate=False).reports["global"][0]
    assert found.tolist() == ([0, 0] if good == "local" else [1, 1])


def test_partialfed_starts_a_new_client_from_the_global_model_whenever_it_joins():
    run, plain = full_batch_run(method("partialfed", warmup=0.0, policy_lr=0.5), plan=EAGER)
    for _ in range(3):
        scores = run.advance(cohort=np.array([1, 3])).scores
    assert (client_state(run, "pi")[[1, 3]] != 0).all()
    assert (client_state(run, "pi")[[0, 2]] == 0).all()
    np.testing.assert_allclose(scores["pre"]["test"][[0, 2]], scores["global"]["test"][[0, 2]])
    w = {k: v.clone() for k, v in run.server["w"].items()}
    run.advance(evaluate=False, cohort=np.array([2]))
    assert_near(client_state(run, "theta", 2), plain.fit(w, plain.train[2]))
    assert (client_state(run, "pi")[2] == 0).all()  # its first round is without a policy


def test_partialfeds_rounds_against_plain_pytorch_given_the_policies():
    """Whatever layers the policies chose: loading, training, averaging all layers, and the models that are scored."""
    run, plain = full_batch_run(method("partialfed", warmup=0.0, policy_lr=0.3))
    w, thetas, kinds = plain.initial, [plain.initial] * len(SIZES), set()

    def load(i, w, chosen):
        return {k: w[k] if chosen[i, int("head" in k)] else thetas[i][k] for k in w}

    for _ in range(6):
        done = run.advance()
        chosen = done.reports["global"].astype(bool)
        kinds |= {tuple(row) for row in chosen.tolist()}
        thetas = [plain.fit(load(i, w, chosen), plain.train[i]) for i in plain.clients]
        w = average(thetas, plain.sizes)
        assert_near(run.server["w"], w)
        for i in plain.clients:
            assert_near(client_state(run, "theta", i), thetas[i])
        assert_scores(done.scores["post"]["test"], thetas, plain.test)
        assert_scores(done.scores["pre"]["test"], [load(i, w, chosen) for i in plain.clients], plain.test)
        assert_scores(done.scores["global"]["test"], [w] * len(SIZES), plain.test)
    assert {(True, True), (False, False)} <= kinds


def test_partialfed_fixed_is_fedper_without_normalisation():
    task = make_task(RAGGED, participation=0.5, epochs=2)
    run, records = run_rounds(method("partialfed", mode="fix"), task, evaluate=True)
    fedper, expected = run_rounds(method("fedper"), task, evaluate=True)
    assert_near(task.body(run.server["w"]), fedper.server["phi"])
    assert_near({k: client_state(run, "theta")[k] for k in task.network.head}, client_state(fedper, "h"))
    assert_same_scores(records, expected, ["pre", "post"])


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, torch.nn.LayerNorm, None])
def test_partialfed_fixed_keeps_head_and_normalisation(kind):
    data = make_federation(SIZES)

    def net():
        norm = torch.nn.GroupNorm(2, 8) if kind is None else kind(8)
        layers = {"first": torch.nn.Linear(6, 8), "norm": norm, "act": torch.nn.Tanh(), "head": torch.nn.Linear(8, 4)}
        made = torch.nn.Sequential()
        for name, layer in layers.items():
            made.add_module(name, layer)
        return made

    task = Task(data, Network(net, "head", data.x[:2], data.dtype), lr=0.1)
    theta, w = task.init(1), task.init(2)
    assert task.network.norms == ("norm.weight", "norm.bias")
    theta = {k: v + 1 for k, v in theta.items()}
    found = method("partialfed", mode="fix").loaded(task, {"theta": theta}, {"w": w})
    for name, v in found.items():
        assert torch.equal(v, w[name] if name.startswith("first") else theta[name]), name


def test_partialfed_with_a_single_layer():
    task = logreg_task(RAGGED, dim=6, classes=4)
    run, _ = run_rounds(method("partialfed", warmup=0.0), task, evaluate=True)
    assert client_state(run, "pi").shape == (len(RAGGED), 1, 2)
    with user_error("mode=fix", "mode=adaptive"):
        check(method("partialfed", mode="fix"), task)
    check(method("partialfed"), task)


def test_partialfeds_policy_may_learn_from_samples_of_its_own():
    """With a fifth held out, weights see the rest only: the rounds before a policy is learnt are FedAvg on 80 %."""

    @dataclass(frozen=True)
    class FedAvgOnPart(FedAvg):
        def phases(self, task):
            return [Phase(self.step, task.epochs, select=first_part("policy"))]

    task = make_task(RAGGED, epochs=2)
    run, _ = run_rounds(method("partialfed", policy_share=0.2, warmup=1.0), task)
    fedavg, _ = run_rounds(FedAvgOnPart(), task)
    assert_near(run.server["w"], fedavg.server["w"])
    run, _ = run_rounds(method("partialfed", policy_share=0.2, warmup=0.0), task)
    moved = (client_state(run, "pi") != 0).flatten(1).any(1)
    assert moved.tolist() == [n > 1 for n in RAGGED]  # one sample is trained on, and leaves none for the policy


def test_partialfeds_warm_up_is_a_share_of_the_rounds():
    task = make_task(SIZES, rounds=10)
    alg = method("partialfed", policy_epochs=2)
    passes = [
        int(alg.policy_passes(task, None, client_info(first=first)._replace(t=torch.tensor(t))))
        for t, first in ((0, False), (1, False), (2, False), (9, False), (9, True))
    ]
    assert passes == [0, 0, 2, 2, 0]
