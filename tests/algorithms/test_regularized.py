"""FedSAM, FedDyn, FedRECON, Per-FedAvg, pFedMe and LG-FedAvg: oracles and invariants of the specification, second
implementations in plain PyTorch, and the mistakes that other libraries make in them."""

import logging
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import RAGGED, SingleRun, SmallNet, assert_same, make_federation, make_task, method, plan_id
from sentences import user_error

from fedloom.algorithms.fedavg import FedAvg
from fedloom.config.resolve import configure
from fedloom.core.algorithm import Batch, Draw, Info, Phase
from fedloom.core.task import Task
from fedloom.core.tree import leaves, tree_map, uniform_mean
from fedloom.engine import batching as schedule
from fedloom.engine.planning.plan import Plan
from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network
from fedloom.studies.build import check

METHODS = ("fedsam", "feddyn", "fedrecon", "per-fedavg", "pfedme", "lg-fedavg")
SIZES = (3, 17, 8, 1)
ROUNDS, EPOCHS, LR, DECAY, SEED = 3, 2, 0.3, 0.01, 5
EAGER = Plan("stacked", "eager", chunk=len(RAGGED))


def play(alg, task, rounds=ROUNDS, cohorts=None, evaluate=False):
    run = SingleRun(alg, task, SEED, plan=EAGER)
    records = [run.advance(evaluate, None if cohorts is None else np.array(cohorts[t])) for t in range(rounds)]
    return run, records


def own(run, name, i):
    return {k: v[i] for k, v in run.store.everyone()["own"][name].items()}


def assert_near(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for k in expected:
        torch.testing.assert_close(found[k], expected[k], rtol=tolerance, atol=tolerance)


def moved(a, b):
    return any(not torch.allclose(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


# -- steps by hand: parameters are numbers and the gradient is a formula of them --------------------------------------


class FormulaTask(Task):
    def grad(self, slot, batch, only=None, loss=None):
        return self.formula(slot.params), slot


def formula_task(formula, lr, clients=1):
    data = SimpleNamespace(dtype=torch.float64, clients=clients)
    task = FormulaTask(data, SimpleNamespace(buffers={}), lr=lr)
    object.__setattr__(task, "formula", formula)
    return task


def numbers(**values):
    return {k: torch.tensor(float(v), dtype=torch.float64) for k, v in values.items()}


def stacked(*uploads):
    return tree_map(lambda *rows: torch.stack(rows), *uploads)


INFO = Info(*(torch.tensor(v) for v in (0, 1, 1, 0, True, 0)))


def test_fedsam_step():
    """F = p^2/2 + q^2 has gradient (p, 2q), at (3, 2) it is (3, 4) with norm 5. With rho = 1 eps = (0.6, 0.8), the
    gradient at (3.6, 2.8) is (3.6, 5.6), and a step of 0.1 from (3, 2) leads to (2.64, 1.44)."""
    task = formula_task(lambda w: {"p": w["p"], "q": 2 * w["q"]}, lr=0.1)
    work = method("fedsam", rho=1.0).step(task, {"w": task.slot(numbers(p=3, q=2))}, None, {}, INFO)
    assert_near(work["w"].params, numbers(p=2.64, q=1.44))


def test_feddyn_round():
    """theta = 1 - 0.1 (2 - 0.2) = 0.82; lam = 0.2 - 0.1 (0.82 - 1) = 0.218; h = 0 - 0.1 (0.82 - 1) = 0.018;
    w = 0.82 - 0.018 / 0.1 = 0.64"""
    alg, task = method("feddyn", alpha=0.1), formula_task(lambda w: numbers(p=2), lr=0.1)
    server, kept = {"w": numbers(p=1), "h": numbers(p=0)}, {"lam": numbers(p=0.2)}
    down, _ = alg.download(task, server, None, 0, 0)
    assert down.keys() == {"w"}  # h stays at the server
    work = alg.step(task, alg.begin(task, down, kept, INFO), None, down, INFO)
    assert_near(work["w"].params, numbers(p=0.82))
    kept, up = alg.finish(task, work, down, kept, INFO)
    assert_near(kept["lam"], numbers(p=0.218))
    server = alg.aggregate(task, server, stacked(up), INFO, 0, 0)
    assert_near(server["h"], numbers(p=0.018))
    assert_near(server["w"], numbers(p=0.64))


def test_feddyns_penalty_is_a_squared_norm():
    """From theta = 0.82 (above) on: 2 - 0.2 + 0.1 (0.82 - 1) = 1.782, theta = 0.82 - 0.1782 = 0.6418, and lam =
    0.2 - 0.1 (0.6418 - 1) = 0.23582. The gradient of a norm that is not squared would have -0.1 for -0.018."""
    alg, task = method("feddyn", alpha=0.1), formula_task(lambda w: numbers(p=2), lr=0.1)
    down, kept = {"w": numbers(p=1)}, {"lam": numbers(p=0.2)}
    work = alg.begin(task, down, kept, INFO)
    for _ in range(2):
        work = alg.step(task, work, None, down, INFO)
    assert_near(work["w"].params, numbers(p=0.6418))
    assert_near(alg.finish(task, work, down, kept, INFO)[0]["lam"], numbers(p=0.23582))


def test_feddyn_finds_the_minimum_of_all_clients_where_fedavg_does_not():
    """F_1 = p^2 / 2 and F_2 = 4 (p - 1)^2 / 2: the mean is least at 4/5, where the gradients are 0.8 and -0.8, which
    the dual vectors end at. Clients that train to the end alone reach 0 and 1, and FedAvg their mean 0.5."""
    curves, ends = ((1.0, 0.0), (4.0, 1.0)), {}
    for name in ("feddyn", "fedavg"):
        alg = method(name, **({"alpha": 1.0} if name == "feddyn" else {}))
        server, kept = {"w": numbers(p=0), "h": numbers(p=0)}, [{"lam": numbers(p=0)} for _ in curves]
        for _ in range(60):
            ups = []
            for i, (k, c) in enumerate(curves):
                task = formula_task(lambda w, k=k, c=c: {"p": k * (w["p"] - c)}, lr=0.1, clients=2)
                down = {"w": server["w"]}
                work = alg.begin(task, down, kept[i], INFO)
                for _ in range(150):
                    work = alg.step(task, work, None, down, INFO)
                kept[i], up = alg.finish(task, work, down, kept[i], INFO)
                ups.append(up)
            server = alg.aggregate(task, server, stacked(*ups), INFO._replace(n=torch.ones(2)), 0, 0)
        ends[name] = server["w"]
        if name == "feddyn":
            assert_near(kept[0]["lam"], numbers(p=0.8), 1e-6)
            assert_near(kept[1]["lam"], numbers(p=-0.8), 1e-6)
    assert_near(ends["feddyn"], numbers(p=0.8), 1e-6)
    assert_near(ends["fedavg"], numbers(p=0.5), 1e-6)


def test_per_fedavg_step():
    """F = (w - 1)^2 / 2 at 0 with a = b = 0.1: w' = 0.1, its gradient is -0.9, so w = 0.09. With a = 0.5: w' = 0.5 and
    w = 0.05."""
    task = formula_task(lambda w: {"p": w["p"] - 1}, lr=0.1)
    pair = SimpleNamespace(part=lambda j: None)
    for a, expected in ((None, 0.09), (0.5, 0.05)):
        work = method("per-fedavg", inner_lr=a).step(task, {"w": task.slot(numbers(p=0))}, pair, {}, INFO)
        assert_near(work["w"].params, numbers(p=expected))


@pytest.mark.parametrize(
    ("steps", "inner", "theta", "w"),
    [
        (1, 1, 0.1, 0.05),  # theta = 0 - 0.1 (-1 + 0), w = 0 - 0.5 (0 - 0.1)
        (1, 2, 0.18, 0.09),  # theta = 0.1 - 0.1 (-0.9 + 0.1)
        (2, 1, 0.185, 0.1175),  # theta goes on: 0.1 - 0.1 (-0.9 + 0.1 - 0.05); w = 0.05 + 0.5 (0.185 - 0.05)
    ],
)
def test_pfedme_steps(steps, inner, theta, w):
    """F = (theta - 1)^2 / 2, lambda = 1, eta_p = 0.1, eta = 0.5."""
    alg = method("pfedme", lam=1.0, inner_steps=inner, personal_lr=0.1, mu=0.0)
    task = formula_task(lambda p: {"p": p["p"] - 1}, lr=0.5)
    down = {"w": numbers(p=0)}
    work = alg.enter(task, alg.begin(task, down, {"theta": numbers(p=7)}, INFO), down, INFO)
    for _ in range(steps):
        work = alg.step(task, work, None, down, INFO)
    assert_near(work["theta"].params, numbers(p=theta))
    assert_near(work["w"], numbers(p=w))


# -- second implementations, in which FedLoom computes nothing --------------------------------------------------------
# A batch is as large as the largest client, so an epoch is one step and the order of samples does not matter.


class Hand:
    def __init__(self, task, run):
        rows = [task.data.splits["train"][i] for i in range(task.clients)]
        self.x, self.y = [task.data.x[r] for r in rows], [task.data.y[r] for r in rows]
        self.n = [len(r) for r in rows]
        self.w = {k: v.clone() for k, v in task.init(run.key).items()}
        tests = [task.data.splits["test"][i] for i in range(task.clients)]
        self.tests = [(task.data.x[r], task.data.y[r]) for r in tests]


def net_of(w):
    net = SmallNet().double()
    net.load_state_dict(w)
    return net


def gradient(w, x, y):
    net = net_of(w)
    found = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    return dict(zip([k for k, _ in net.named_parameters()], found, strict=True))


def plus(a, b, factor=1.0):
    return {k: v + factor * b[k] if k in b else v for k, v in a.items()}


def part(w, prefix):
    return {k: v for k, v in w.items() if k.startswith(prefix)}


def descend(w, x, y, lr=LR, only=""):
    """One step on the parameters whose name begins so, with weight decay."""
    g = part(gradient(w, x, y), only)
    return plus(w, plus(g, part(w, only), DECAY), -lr)


def average(models, weights):
    return {k: sum(c * m[k] for c, m in zip(weights, models, strict=True)) / sum(weights) for k in models[0]}


def losses(w, x, y):
    logits = net_of(w)(x).detach()
    return [float((logits.argmax(1) == y).sum()), float(F.cross_entropy(logits, y, reduction="sum")), len(y)]


def task_by_hand(sizes=SIZES, **settings):
    most = {"lr": LR, "batch_size": max(sizes), "epochs": EPOCHS, "weight_decay": DECAY}
    return make_task(sizes, **{**most, **settings})


def test_fedsam_against_plain_pytorch():
    """Weight decay counts in the step and not in the perturbation; clients count equally."""
    task = task_by_hand()
    run, _ = play(method("fedsam", rho=0.4), task)
    hand = Hand(task, run)
    w = hand.w
    for _ in range(ROUNDS):
        ends = []
        for x, y in zip(hand.x, hand.y, strict=True):
            v = w
            for _ in range(EPOCHS):
                g = gradient(v, x, y)
                length = torch.cat([d.flatten() for d in g.values()]).norm()
                tilde = gradient(plus(v, g, 0.4 / length), x, y)
                v = plus(v, plus(tilde, v, DECAY), -LR)
            ends.append(v)
        w = average(ends, [1] * len(SIZES))
    assert_near(run.server["w"], w)


@pytest.mark.parametrize("adaptive", [False, True])
def test_feddyn_against_plain_pytorch(adaptive):
    """The loss as printed, by autograd; some clients do not take part, the last one is sampled late."""
    task, alpha, cohorts = task_by_hand(), 0.3, [(0, 1), (0, 2), (1, 2, 3)]
    run, _ = play(method("feddyn", alpha=alpha, adaptive=adaptive), task, cohorts=cohorts)
    hand = Hand(task, run)
    w = hand.w
    h = {k: torch.zeros_like(v) for k, v in w.items()}
    lam = [h] * len(SIZES)
    for cohort in cohorts:
        ends = []
        for i in cohort:
            a = alpha * np.mean(SIZES) / SIZES[i] if adaptive else alpha
            net = net_of(w)
            opt = torch.optim.SGD(net.parameters(), lr=LR, weight_decay=DECAY)
            for _ in range(EPOCHS):
                opt.zero_grad()
                loss = F.cross_entropy(net(hand.x[i]), hand.y[i])
                for k, p in net.named_parameters():
                    loss = loss - (lam[i][k] * p).sum() + a / 2 * ((p - w[k]) ** 2).sum()
                loss.backward()
                opt.step()
            end = {k: v.detach().clone() for k, v in net.state_dict().items()}
            lam[i] = plus(lam[i], plus(end, w, -1), -a)
            ends.append(end)
        for end in ends:
            h = plus(h, plus(end, w, -1), -alpha / len(SIZES))
        w = plus(average(ends, [1] * len(ends)), h, -1 / alpha)
    assert_near(run.server["w"], w)
    assert_near(run.server["h"], h)
    for i in range(len(SIZES)):
        assert_near(own(run, "lam", i), lam[i])


def divided(i, share):
    n = SIZES[i]
    order = np.random.default_rng([SEED, zlib.crc32(b"recon"), i]).permutation(n)  # spec 0.10
    few = max(1, int(share * n))
    return order[:few], order[few:]


@pytest.mark.parametrize("stateful", [False, True])
def test_fedrecon_against_plain_pytorch(stateful):
    """Learning rates of their own, the client with one sample has nothing to train the body with; PM_post is the pair
    that was trained, PM_pre a head rebuilt on the newest body."""
    task, share, eta_g = task_by_hand(), 0.3, 0.4
    settings = {"support": share, "recon_epochs": 3, "query_epochs": 2, "recon_lr": 0.5, "query_lr": 0.2}
    run, records = play(method("fedrecon", stateful=stateful, eta_g=eta_g, **settings), task, evaluate=True)
    hand = Hand(task, run)
    w, heads = hand.w, [part(hand.w, "head.")] * len(SIZES)

    def rebuilt(w, i):
        support, _ = divided(i, share)
        v = plus(w, {}) | heads[i]
        for _ in range(3):
            v = descend(v, hand.x[i][support], hand.y[i][support], 0.5, "head.")
        return v

    for _ in range(ROUNDS):
        ends = []
        for i in range(len(SIZES)):
            v, (_, query) = rebuilt(w, i), divided(i, share)
            for _ in range(2 if len(query) else 0):
                v = descend(v, hand.x[i][query], hand.y[i][query], 0.2, "first.")
            ends.append(v)
            if stateful:
                heads[i] = part(v, "head.")
        w = w | part(plus(w, plus(average(ends, SIZES), w, -1), eta_g), "first.")
    assert_near(run.server["phi"], part(w, "first."))
    for i in range(len(SIZES)):
        assert records[-1].scores["post"]["test"][i] == pytest.approx(losses(ends[i], *hand.tests[i]))
        assert records[-1].scores["pre"]["test"][i] == pytest.approx(losses(rebuilt(w, i), *hand.tests[i]))
        if stateful:
            assert_near(own(run, "h", i), heads[i])
    if not stateful:
        assert leaves(run.store.everyone()["own"]) == []


def pairs(task, i, t, epochs=1):
    """The samples of client i, pair by pair, from the engine's schedule."""
    phase = Phase(lambda *a: None, group=2, halve=True)
    table = schedule.build(task, phase, SEED, np.array([i]), t, np.array([epochs]))
    for batch in table.batches(task, 0):
        yield [(batch.x[j][batch.mask[j] > 0], batch.y[j][batch.mask[j] > 0]) for j in (0, 1)]


def test_per_fedavg_against_plain_pytorch():
    """45 samples in batches of 10 are two pairs and 5 that wait for another epoch; 7 are halves of 4 and 3; one alone
    is none."""
    sizes = (45, 7, 1, 20)
    task = task_by_hand(sizes, batch_size=10)
    run, _ = play(method("per-fedavg", inner_lr=0.2, allow_small=True), task)
    hand = Hand(task, run)
    w = hand.w
    seen = []
    for t in range(ROUNDS):
        ends = []
        for i in range(len(sizes)):
            v = w
            for (x1, y1), (x2, y2) in pairs(task, i, t, EPOCHS):
                seen.append((i, len(y1), len(y2)))
                ahead = plus(v, gradient(v, x1, y1), -0.2)
                v = plus(v, plus(gradient(ahead, x2, y2), v, DECAY), -LR)
            ends.append(v)
        w = average(ends, sizes)
    assert seen[:7] == [(0, 10, 10)] * 4 + [(1, 4, 3)] * 2 + [(3, 10, 10)]
    assert_near(run.server["w"], w)


def test_per_fedavg_is_scored_after_one_plain_step():
    """On one batch, here of all samples, without weight decay and momentum; the copy is thrown away."""
    task = task_by_hand((5, 9, 4, 7), momentum=0.5)
    run, records = play(method("per-fedavg", inner_lr=0.4, allow_small=True), task, evaluate=True)
    hand, w = Hand(task, run), {k: v.clone() for k, v in run.server["w"].items()}
    for i in range(4):
        adapted = plus(w, gradient(w, hand.x[i], hand.y[i]), -0.4)
        assert records[-1].scores["pre"]["test"][i] == pytest.approx(losses(adapted, *hand.tests[i]))
        assert records[-1].scores["global"]["test"][i] == pytest.approx(losses(w, *hand.tests[i]))
    run.evaluate()
    assert_near(run.server["w"], w, 0)


def test_pfedme_against_plain_pytorch():
    """theta starts from w^t in every round and is kept for its owner alone; the client that is sampled last late."""
    task, cohorts = task_by_hand(), [(0, 1), (0, 2), (1, 2, 3)]
    lam, eta_p, mu, eta_g = 1.5, 0.2, 0.05, 0.6
    alg = method("pfedme", lam=lam, inner_steps=3, personal_lr=eta_p, mu=mu, eta_g=eta_g)
    run, records = play(alg, task, cohorts=cohorts, evaluate=True)
    hand = Hand(task, run)
    w, thetas = hand.w, [hand.w] * len(SIZES)
    for t, cohort in enumerate(cohorts):
        ends = []
        for i in cohort:
            theta = v = w
            for _ in range(EPOCHS):
                for _ in range(3):
                    g = plus(gradient(theta, hand.x[i], hand.y[i]), plus(theta, v, -1), lam)
                    theta = plus(theta, plus(g, theta, mu + DECAY), -eta_p)
                v = plus(v, plus(v, theta, -1), -LR * lam)
            thetas[i] = theta
            ends.append(v)
        mean = average(ends, [SIZES[i] for i in cohort])
        w = {k: (1 - eta_g) * w[k] + eta_g * mean[k] for k in w}
        scores = records[t].scores
        for i in range(len(SIZES)):
            trained = any(i in c for c in cohorts[: t + 1])
            mine = losses(thetas[i] if trained else w, *hand.tests[i])
            assert scores["pre"]["test"][i] == pytest.approx(mine)
            assert scores["post"]["test"][i] == pytest.approx(mine)
            assert scores["global"]["test"][i] == pytest.approx(losses(w, *hand.tests[i]))
    assert_near(run.server["w"], w)
    for i in range(len(SIZES)):
        assert_near(own(run, "theta", i), thetas[i])


@pytest.mark.parametrize("pretrain", [0, 2])
def test_lg_fedavg_against_plain_pytorch(pretrain):
    """With two rounds of FedAvg at first, everybody starts with the body they led to, also who was never there."""
    task, cohorts = task_by_hand(), [(0, 1), (0, 2), (1, 2), (0, 2, 3)]
    run, records = play(method("lg-fedavg", pretrain_rounds=pretrain), task, 4, cohorts, evaluate=True)
    hand = Hand(task, run)
    w, bodies = hand.w, [part(hand.w, "first.")] * len(SIZES)
    for t, cohort in enumerate(cohorts):
        ends = []
        for i in cohort:
            v = w if t < pretrain else w | bodies[i]
            for _ in range(EPOCHS):
                v = descend(v, hand.x[i], hand.y[i])
            ends.append(v)
            bodies[i] = part(v, "first.")
        mean = average(ends, [SIZES[i] for i in cohort])
        if t < pretrain:
            w = mean
            bodies = [part(mean, "first.")] * len(SIZES)
        w = w | part(mean, "head.")
        for i in range(len(SIZES)):
            assert records[t].scores["pre"]["test"][i] == pytest.approx(losses(w | bodies[i], *hand.tests[i]))
        for i, end in zip(cohort, ends, strict=True):
            assert records[t].scores["post"]["test"][i] == pytest.approx(losses(end, *hand.tests[i]))
    assert_near(run.server["h"], part(w, "head."))
    for i in range(len(SIZES)):
        assert_near(own(run, "phi", i), bodies[i])


# -- FedSAM -----------------------------------------------------------------------------------------------------------


def test_fedsam_without_radius_is_fedavg_with_equal_weights():
    class Uniform(FedAvg):
        def aggregate(self, task, server, up, info, t, key):
            return {"w": uniform_mean(up["w"])}

    task = make_task(RAGGED, participation=0.5, epochs=2, momentum=0.5, weight_decay=0.01)
    plain = play(Uniform(), task)[0].server
    assert_near(play(method("fedsam", rho=0.0), task)[0].server["w"], plain["w"])
    assert moved(play(method("fedsam"), task)[0].server, plain)
    equal = make_task([20] * 6)
    assert_near(play(method("fedsam", rho=0.0), equal)[0].server["w"], play(method("fedavg"), equal)[0].server["w"])


def test_fedsams_running_statistics_are_those_of_the_first_pass():
    """With a vanishing learning rate the batch mean m at w stays, and 3 rounds of 2 epochs with one batch are 6 steps:
    the running mean is (1 - 0.9^6) m. Had the perturbed pass counted too, there would be 12 and another mean."""
    task = make_task((8, 9), norm=True, lr=1e-14, epochs=2)
    run, _ = play(method("fedsam", rho=0.5), task)
    w = task.init(run.key)
    for i in range(2):
        m = (task.data.x[task.data.splits["train"][i]] @ w["first.weight"].T + w["first.bias"]).mean(0)
        torch.testing.assert_close(run.store.everyone()["stats"]["w"]["norm.running_mean"][i], (1 - 0.9**6) * m)


# -- FedDyn -----------------------------------------------------------------------------------------------------------


def test_feddyn_keeps_a_dual_vector_where_batchnorm_allows_no_step():
    run, _ = play(method("feddyn"), make_task((1, 20, 20), norm=True))
    assert all((v[0] == 0).all() for v in run.store.everyone()["own"]["lam"].values())
    assert any((v[1] != 0).any() for v in run.store.everyone()["own"]["lam"].values())


def test_feddyns_server_remembers_what_the_dual_vectors_do():
    """h = mean over all clients of lam_i, as long as a_i = a."""
    run, _ = play(method("feddyn"), make_task(RAGGED, participation=0.5))
    duals = run.store.everyone()["own"]["lam"]
    assert_near(run.server["h"], {k: v.mean(0) for k, v in duals.items()})


# -- FedRECON ---------------------------------------------------------------------------------------------------------


def test_fedrecon_divides_a_clients_samples_once():
    alg = method("fedrecon")
    for n, few in ((1, 1), (2, 1), (9, 1), (19, 1), (20, 2), (30, 3), (70, 7), (290, 29)):
        support, query = alg.divided(n, Draw(seed=3, i=4, t=0))
        assert len(support) == few
        assert sorted([*support, *query]) == list(range(n))
        again = alg.divided(n, Draw(seed=3, i=4, t=9))
        assert np.array_equal(support, again[0])
        assert np.array_equal(query, again[1])
    assert not np.array_equal(alg.divided(70, Draw(3, 5, 0))[0], alg.divided(70, Draw(3, 4, 0))[0])
    assert len(method("fedrecon", support=0.29).divided(100, Draw(3, 4, 0))[0]) == 29  # although 0.29 * 100 < 29


def test_fedrecon_without_query_epochs_leaves_the_body():
    task = make_task(RAGGED)
    run, _ = play(method("fedrecon", query_epochs=0), task)
    assert_near(run.server["phi"], task.body(task.init(run.key)), 0)


def test_a_client_with_one_sample_adds_nothing_to_fedrecons_body():
    task = make_task((1, 1, 1))
    run, records = play(method("fedrecon"), task, evaluate=True)
    assert_near(run.server["phi"], task.body(task.init(run.key)), 0)
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()


def test_fedrecon_is_refused_for_a_single_layer():
    with user_error("fedrecon", "single layer", "use another model"):
        check(method("fedrecon"), linear_task())


@pytest.mark.parametrize(("server", "count", "size"), [(50, 5, 10), (53, 5, 10), (7, 3, 2), (3, 1, 3)])
def test_fedrecon_is_tested_by_pseudo_clients_that_rebuild_a_head(server, count, size):
    """`count` equal parts of D_CS, drawn once; floor(0.7 * 0.5 * size) samples, one at least, are the support."""
    task = task_by_hand(data={"server": server})
    alg = method("fedrecon", support=0.5, recon_epochs=3, recon_lr=0.5, pseudo_clients=5 if count == 5 else 25)
    run, records = play(alg, task, rounds=2, evaluate=True)
    order = np.random.default_rng([0, zlib.crc32(b"partition"), zlib.crc32(b"pseudo-clients")]).permutation(server)
    rows = task.data.server[order]
    w, few, total = task.init(run.key) | run.server["phi"], max(1, int(0.35 * size)), np.zeros(3)
    shares = []
    for j in range(count):
        mine = rows[j * size : (j + 1) * size]
        v = w
        for _ in range(3):
            v = descend(v, task.data.x[mine[:few]], task.data.y[mine[:few]], 0.5, "head.")
        found = losses(v, task.data.x[mine[few:]], task.data.y[mine[few:]])
        shares.append(found[0] / found[2])
        total += found
    assert records[-1].server == pytest.approx(total)
    assert records[-1].server[0] / records[-1].server[2] == pytest.approx(np.mean(shares))
    assert "global" not in records[-1].scores  # a body alone predicts nothing


@pytest.mark.parametrize("server", [0, 1])
def test_without_enough_samples_at_the_server_fedrecon_is_not_tested_there(server):
    _, records = play(method("fedrecon"), make_task(SIZES, data={"server": server}), rounds=1, evaluate=True)
    assert records[-1].server is None


def test_pseudo_clients_start_from_the_servers_running_statistics():
    task = make_task((8, 20), norm=True, data={"server": 12})
    run, records = play(method("fedrecon", recon_epochs=0, pseudo_clients=2), task, evaluate=True)
    net = SmallNet(norm=True).double().eval()
    net.load_state_dict({**task.init(run.key), **run.server["phi"], **run.stats["w"]}, strict=False)
    rows = task.data.server
    order = np.random.default_rng([0, zlib.crc32(b"partition"), zlib.crc32(b"pseudo-clients")]).permutation(12)
    tested = rows[np.concatenate([order[1:6], order[7:12]])]  # of six each, the first is the support
    logits = net(task.data.x[tested]).detach()
    loss = F.cross_entropy(logits, task.data.y[tested], reduction="sum")
    assert records[-1].server[1:] == pytest.approx([float(loss), 10])


def test_pseudo_clients_skip_a_batch_of_one_sample_under_batchnorm():
    task = make_task((8, 9), norm=True, data={"server": 12})
    scores = [
        play(method("fedrecon", recon_epochs=e, query_epochs=0, pseudo_clients=2), task, 1, evaluate=True)[1][0].server
        for e in (0, 4)
    ]
    assert np.isfinite(scores[1]).all()
    np.testing.assert_allclose(scores[0], scores[1])  # everybody's support is one sample


# -- Per-FedAvg -------------------------------------------------------------------------------------------------------


def test_per_fedavg_trains_once_per_round_on_whole_pairs():
    """floor(n / 20) pairs of batches of 10 in each of 3 epochs."""
    task = make_task((20, 39, 40, 65, 19), epochs=3)
    (phase,) = method("per-fedavg").phases(task)
    table = schedule.build(task, phase, 0, np.arange(5), 0, np.full(5, phase.epochs))
    assert table.steps.tolist() == [3, 3, 6, 9, 0]


def test_per_fedavg_without_an_inner_step_is_sgd_on_the_second_batches():
    task = make_task((40, 25, 60))
    run, records = play(method("per-fedavg", inner_lr=0.0), task, rounds=1, evaluate=True)

    class Second(FedAvg):
        def phases(self, task):
            return [Phase(self.second, task.epochs, group=2)]

        def second(self, task, work, batch, down, info):
            return super().step(task, work, batch.part(1), down, info)

    assert_near(run.server["w"], play(Second(), task, rounds=1)[0].server["w"])
    np.testing.assert_allclose(records[0].scores["pre"]["test"], records[0].scores["global"]["test"])


def test_per_fedavgs_adaptation_takes_another_batch_at_every_evaluation():
    run, _ = play(method("per-fedavg"), make_task((40, 25, 60)), rounds=1)
    first, again = run.evaluate()[0]["pre"]["test"], run.evaluate()[0]["pre"]["test"]
    run.t += 1
    later = run.evaluate()[0]["pre"]["test"]
    assert np.array_equal(first, again)
    assert not np.allclose(first[:, 1], later[:, 1])


def test_a_pair_has_noise_of_its_own_for_each_batch():
    key = torch.tensor(5)
    batch = Batch(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), key, key, key, key)
    assert len({int(batch.key), int(batch.part(0).key), int(batch.part(1).key)}) == 3


def test_per_fedavg_refuses_clients_with_less_than_two_batches_unless_they_may_be_halved():
    task = make_task((30, 19))
    with user_error("per-fedavg", "20 training samples", "one client has 19", "allow_small=true"):
        check(method("per-fedavg"), task)
    check(method("per-fedavg", allow_small=True), task)
    check(method("per-fedavg"), make_task((30, 20)))


@pytest.mark.parametrize("norm", [False, True])
def test_the_smallest_clients_take_part_in_per_fedavg_as_far_as_they_can(norm):
    """Two halves of one sample each are enough, but BatchNorm needs two in each."""
    task = make_task((1, 2, 3, 4, 20), norm=norm)
    alg = method("per-fedavg", allow_small=True)
    (phase,) = alg.phases(task)
    table = schedule.build(task, phase, 0, np.arange(5), 0, np.ones(5, int))
    assert table.steps.tolist() == ([0, 0, 0, 1, 1] if norm else [0, 1, 1, 1, 1])
    run, records = play(alg, task, evaluate=True)
    assert all(torch.isfinite(v).all() for v in leaves((run.server, run.store.everyone())))
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()


def test_no_group_is_cut_into_pieces_without_samples():
    """4 samples over 3 batches would be 2, 2 and 0; batches of one sample are none under BatchNorm."""
    phase = Phase(lambda *a: None, group=3, halve=True)
    assert schedule.batches_per_epoch(make_task((9,)), phase, np.array([3, 4, 5, 6])).tolist() == [1, 0, 1, 1]
    for halve in (False, True):
        phase = Phase(lambda *a: None, group=2, halve=halve)
        n = np.array([1, 3, 4])
        assert schedule.batches_per_epoch(make_task((9,), batch_size=1), phase, n).tolist() == [0, 1, 2]
        assert schedule.batches_per_epoch(make_task((9,), batch_size=1, norm=True), phase, n).tolist() == [0, 0, 0]


def test_both_batches_of_a_pair_count_for_the_running_statistics():
    """With a vanishing learning rate: after batches with means m1 and m2 it is 0.9 * 0.1 m1 + 0.1 m2."""
    task = make_task((20, 23), norm=True, lr=1e-14)
    run, _ = play(method("per-fedavg"), task, rounds=1)
    w = task.init(run.key)
    for i in range(2):
        (pair,) = pairs(task, i, 0)
        m1, m2 = ((x @ w["first.weight"].T + w["first.bias"]).mean(0) for x, _ in pair)
        found = run.store.everyone()["stats"]["w"]["norm.running_mean"][i]
        torch.testing.assert_close(found, 0.09 * m1 + 0.1 * m2)


# -- pFedMe -----------------------------------------------------------------------------------------------------------


def test_pfedmes_personal_model_is_neither_the_global_one_nor_the_initial_one():
    """Elsewhere it is an alias that is overwritten before evaluation, or weights that never change."""
    task = make_task(RAGGED)
    run, records = play(method("pfedme"), task, evaluate=True)
    scores = records[-1].scores
    np.testing.assert_allclose(scores["pre"]["test"], scores["post"]["test"])
    assert not np.isclose(scores["pre"]["test"][:, 1], scores["global"]["test"][:, 1], rtol=1e-4).any()
    initial = task.init(run.key)
    for i in range(len(RAGGED)):
        assert moved(own(run, "theta", i), initial)
        assert moved(own(run, "theta", i), run.server["w"])


def test_where_lr_times_lambda_is_one_pfedme_sends_the_personal_model():
    task = make_task((12, 30, 5), lr=0.1)
    run = SingleRun(method("pfedme", lam=10.0), task, SEED, plan=EAGER)
    done = run.executor.train(run.cohort(np.arange(3), 0), ())
    assert_near(done.up["w"], done.client_state["theta"], 1e-12)


def test_pfedmes_global_model_uses_the_running_statistics_of_the_personal_one():
    task = make_task((8, 20), norm=True)
    run, records = play(method("pfedme"), task, evaluate=True)
    stats = run.store.everyone()["stats"]
    assert stats.keys() == {"theta"}
    for i in range(2):
        net = SmallNet(norm=True).double().eval()
        net.load_state_dict({**run.server["w"], **{k: v[i] for k, v in stats["theta"].items()}}, strict=False)
        rows = task.data.splits["test"][i]
        loss = F.cross_entropy(net(task.data.x[rows]), task.data.y[rows], reduction="sum").detach()
        assert records[-1].scores["global"]["test"][i, 1] == pytest.approx(float(loss))


@pytest.mark.parametrize(
    ("lr", "personal_lr", "words"),
    [(0.2, 0.01, ("lr times lam", "0.2 * 15 = 3", "set lr below 0.13")), (0.01, 0.2, ("set personal_lr below 0.13",))],
)
def test_pfedme_refuses_rates_that_diverge(lr, personal_lr, words):
    with user_error("pfedme", *words):
        check(method("pfedme", personal_lr=personal_lr), make_task(RAGGED, lr=lr))


def test_pfedme_warns_of_a_rate_that_oversteps(caplog):
    with caplog.at_level(logging.WARNING, "fedloom"):
        check(method("pfedme"), make_task(RAGGED, lr=0.05))
        assert not caplog.records
        check(method("pfedme"), make_task(RAGGED, lr=0.1))
    assert [r.getMessage() for r in caplog.records] == [
        "pfedme oversteps with lr * lam = 1.5; values below 1 are usual."
    ]


# -- LG-FedAvg --------------------------------------------------------------------------------------------------------


def linear_task():
    data = make_federation(RAGGED)
    network = Network(lambda: MODELS["logreg"]().build((6,), 4), "head", data.x[:2], data.dtype)
    return Task(data, network, lr=0.1)


def test_lg_fedavg_shares_all_of_a_single_layer():
    task = linear_task()
    check(method("lg-fedavg"), task)
    for pretrain in (0, 1):
        found = play(method("lg-fedavg", pretrain_rounds=pretrain), task)[0].server["h"]
        assert_near(found, play(method("fedavg"), task)[0].server["w"])


def test_lg_fedavg_that_only_pretrains_is_fedavg():
    task = make_task(RAGGED, participation=0.5)
    run, records = play(method("lg-fedavg", pretrain_rounds=ROUNDS), task, evaluate=True)
    fedavg, expected = play(method("fedavg"), task, evaluate=True)
    assert_near({**run.server["phi"], **run.server["h"]}, fedavg.server["w"])
    for view in ("post", "pre"):
        for a, b in zip(records, expected, strict=True):
            np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"])


def test_bodies_of_lg_fedavg_stay_at_home():
    task = make_task(RAGGED)
    run, _ = play(method("lg-fedavg"), task)
    assert run.server.keys() == {"h"}
    assert moved(own(run, "phi", 1), own(run, "phi", 2))


@pytest.mark.parametrize("plan", [Plan("stacked", "traced", chunk=5, shrink=0), EAGER], ids=plan_id)
def test_lg_fedavg_goes_from_pretraining_to_private_bodies_when_stacked(plan):
    task = make_task(RAGGED, participation=0.5)
    assert_same(method("lg-fedavg", pretrain_rounds=2), task, plan, 1e-9, rounds=5)


# -- all of them ------------------------------------------------------------------------------------------------------


def test_traffic_is_what_the_specification_lists():
    body, head, m = 56 * 8, 36 * 8, len(RAGGED)  # 6*8 + 8 and 8*4 + 4 parameters in float64
    whole = body + head
    expected = dict.fromkeys(METHODS, (whole, whole)) | {"fedrecon": (body, body), "lg-fedavg": (head, head)}
    for name, (down, up) in expected.items():
        done = play(method(name), make_task(RAGGED), rounds=1)[1][0]
        assert (done.bytes_down, done.bytes_up) == (m * down, m * up), name
    _, records = play(method("lg-fedavg", pretrain_rounds=1), make_task(RAGGED), rounds=2)
    assert [(r.bytes_down, r.bytes_up) for r in records] == [(m * whole, m * whole), (m * whole, m * head)]


@pytest.mark.parametrize("name", METHODS)
def test_classes_that_are_missing_and_the_smallest_clients_do_no_harm(name):
    """Nobody has class 4, and only one client class 3."""
    data = make_federation((1, 2, 5, 30))
    y = torch.where(data.y == 3, 0, data.y)
    y[data.splits["train"][3][:10]] = 3
    task = make_task((), federation=replace(data, y=y, classes=5))
    settings = {"allow_small": True} if name == "per-fedavg" else {}
    run, records = play(method(name, **settings), task, evaluate=True)
    assert all(torch.isfinite(v).all() for v in leaves((run.server, run.store.everyone())))
    for splits in records[-1].scores.values():
        assert np.isfinite(splits["test"]).all()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fedsam", {"rho": -1}),
        ("feddyn", {"alpha": 0}),
        ("fedrecon", {"support": 0}),
        ("fedrecon", {"support": 1}),
        ("fedrecon", {"recon_lr": 0}),
        ("fedrecon", {"pseudo_clients": 0}),
        ("per-fedavg", {"inner_lr": -0.1}),
        ("pfedme", {"lam": 0}),
        ("pfedme", {"inner_steps": 0}),
        ("pfedme", {"eta_g": 0}),
        ("lg-fedavg", {"pretrain_rounds": -1}),
    ],
)
def test_values_out_of_range_are_refused(name, values):
    (key,) = values
    with user_error(key, "must be"):
        configure(name, values=values)
