"""HypCluster, MAPPER, PartialFed, FedFomo and Dap-FL: the specification's oracles and invariants, second
implementations in plain PyTorch, and what happens at the edges."""

import dataclasses
import math
import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ALONE, RAGGED, SingleRun, SmallNet, assert_same, make_federation, make_task, method, play
from sentences import user_error

import fedloom
from fedloom.algorithms import partialfed as partialfed_
from fedloom.algorithms.dap_fl import gain
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.local import Local
from fedloom.algorithms.parts import adam
from fedloom.algorithms.parts.holdout import divided
from fedloom.algorithms.parts.measuring import smallest, tally, tally_each
from fedloom.algorithms.parts.picking import pick
from fedloom.config.resolve import configure
from fedloom.core.algorithm import Batch, Draw, Info, Phase
from fedloom.core.autodiff import vmap
from fedloom.core.federation import Federation, Ragged
from fedloom.core.keys import fold, root
from fedloom.core.task import Task
from fedloom.core.tree import leaves, size_bytes, take, tree_map, uniform_mean
from fedloom.engine.planning.plan import Plan
from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network
from fedloom.studies.build import check

SIZES = (3, 17, 8, 11)
CLIENTS = range(len(SIZES))
EAGER = Plan("stacked", "eager", chunk=len(RAGGED))
LR, MOMENTUM, DECAY, EPOCHS, SEED = 0.3, 0.5, 0.01, 2, 5


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def own(run, name, i=None):
    found = run.store.everyone()["own"][name]
    return found if i is None else take(found, i)


def assert_near(a, b, tolerance=1e-10):
    flat_a, flat_b = leaves(a), leaves(b)
    assert len(flat_a) == len(flat_b)
    for x, y in zip(flat_a, flat_b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def whole_batches(sizes=SIZES, **settings):
    """Batches as large as the largest client: an epoch is one step, and the order of samples does not matter."""
    settings = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "epochs": EPOCHS, "rounds": 6, **settings}
    return make_task(sizes, **{"batch_size": max(sizes), **settings})


def train_rows(task, i):
    return task.data.splits["train"][i]


class Hand:
    """What clients and server do, by hand, on state dictionaries."""

    def __init__(self, task):
        self.task, self.data = task, task.data
        torch.manual_seed(root(SEED, "init") & ((1 << 63) - 1))
        self.initial = SmallNet().double().state_dict()
        self.weights = np.array(SIZES) / sum(SIZES)

    def net(self, state):
        net = SmallNet().double()
        net.load_state_dict(state)
        return net

    def measure(self, state, rows):
        """Accuracy and mean loss."""
        logits, y = self.net(state)(self.data.x[rows]).detach(), self.data.y[rows]
        return float((logits.argmax(1) == y).double().mean()), float(F.cross_entropy(logits, y))

    def fit(self, state, rows, epochs=EPOCHS, lr=LR, clip=None, mix=None):
        """torch.optim.SGD; `mix` makes of the parameters those that the loss is taken at."""
        params = {k: v.clone().requires_grad_() for k, v in state.items()}
        opt = torch.optim.SGD(params.values(), lr=lr, momentum=MOMENTUM, weight_decay=DECAY)
        for _ in range(epochs):
            opt.zero_grad()
            at = params if mix is None else mix(params)
            logits = torch.func.functional_call(SmallNet().double(), at, (self.data.x[rows],))
            F.cross_entropy(logits, self.data.y[rows]).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(params.values(), clip)
            opt.step()
        return {k: v.detach() for k, v in params.items()}

    def average(self, states, weights):
        return {k: sum(w * s[k] for w, s in zip(weights, states, strict=True)) for k in states[0]}


def assert_scores(found, hand, states, rows):
    """(correct, summed loss, samples) of each client's model."""
    for i, state in enumerate(states):
        accuracy, loss = hand.measure(state, rows[i])
        n = len(rows[i])
        assert found[i].tolist() == pytest.approx([accuracy * n, loss * n, n], rel=1e-9), i


def batch_of(x, y, mask=None, k=0, key=0):
    mask = torch.ones(len(y), dtype=torch.float64) if mask is None else tensor(*mask)
    zero = torch.tensor(0)
    return Batch(x, y, mask, torch.tensor(k), zero, zero, torch.tensor(key))


INFO = Info(*(torch.tensor(v) for v in (0, 1, 1, 0, False, 0)))


class ScalarTask(Task):
    """One parameter `p`; every batch has the gradient `slope`."""

    slope = 0.0

    def grad(self, slot, batch, only=None, loss=None):
        return {"p": torch.tensor(self.slope)}, slot


def scalar_task(slope, lr):
    data = SimpleNamespace(dtype=torch.float32, clients=1)
    task = ScalarTask(data, SimpleNamespace(buffers={}), lr=lr)
    object.__setattr__(task, "slope", slope)
    return task


def one(value):
    return {"p": torch.tensor(float(value))}


def single_layer(data):
    return Task(
        data, Network(lambda: MODELS["logreg"]().build((6,), 4), "head", data.x[:2], data.dtype), lr=0.1, rounds=3
    )


# -- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((3, 1, 2), 1),
        ((2, 1, 1), 1),
        ((1, 1, 1), 0),
        ((math.nan, 5, 4), 2),
        ((math.inf, 5), 1),
        ((math.nan, math.inf), 0),
        ((math.nan, math.nan), 0),
    ],
)
def test_the_smallest_loss_is_the_first_of_equals_and_never_that_of_a_model_that_diverged(losses, expected):
    assert int(smallest(tensor(*losses))) == expected
    assert vmap(smallest)(tensor(*losses).expand(2, -1)).tolist() == [expected] * 2


def test_a_tally_counts_samples_and_not_padding():
    """Of three rows the last is padding. Two models at once give what each gives alone."""
    task = make_task(SIZES)
    w, x, y = task.init(1), task.data.x[:3], task.data.y[:3]
    net = SmallNet().double()
    net.load_state_dict(w)
    logits = net(x[:2]).detach()
    expected = [
        float((logits.argmax(1) == y[:2]).sum()), float(F.cross_entropy(logits, y[:2], reduction="sum")), 2.0,
    ]  # fmt: skip
    batch = batch_of(x, y, mask=(1, 1, 0))
    assert tally(task, task.slot(w), batch).tolist() == pytest.approx(expected)
    both = tree_map(lambda a, b: torch.stack([a, b]), task.init(2), w)
    assert tally_each(task, task.slot(task.init(3)), both, batch)[1].tolist() == pytest.approx(expected)


def test_a_tally_of_sequences_counts_positions():
    """Logits 0 for four classes: a loss of ln 4 for each of the three positions that are there."""
    logits = torch.zeros(3, 2, 4, dtype=torch.float64)
    task = SimpleNamespace(predict=lambda *_: SimpleNamespace(logits=logits), data=SimpleNamespace(unscored=()))
    task.score = lambda *args: Task.score(task, *args)
    task.losses = lambda *args: Task.losses(task, *args)
    batch = batch_of(None, torch.tensor([[0, -1], [2, 0], [0, 0]]), mask=(1, 1, 0))
    assert tally(task, None, batch).tolist() == pytest.approx([2, 3 * math.log(4), 3])


@pytest.mark.parametrize(
    ("share", "n", "train", "held_out"),
    [
        (0.2, 1, 1, 0),
        (0.2, 2, 1, 1),
        (0.2, 3, 2, 1),
        (0.2, 5, 4, 1),
        (0.2, 35, 28, 7),
        (0.9, 20, 2, 18),
        (0.9, 2, 1, 1),
    ],
)
def test_samples_are_held_out_by_the_stream_of_the_specification(share, n, train, held_out):
    """(1 - 0.9) * 20 is 2, whatever floating point makes of it; one sample is trained on."""
    for t in (0, 7):
        first, rest = (part(n, Draw(3, 11, t)) for part in divided(share, "fomo"))
        assert (len(first), len(rest)) == (train, held_out)
        expected = np.random.default_rng([3, zlib.crc32(b"fomo"), 11]).permutation(n)
        assert [*first, *rest] == expected.tolist()


def test_adam_is_that_of_pytorch():
    p = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    theirs = p.clone().requires_grad_()
    opt = torch.optim.Adam([theirs], lr=0.01)
    state = adam.start(p)
    for k in range(5):
        g = torch.sin(p * (k + 1))
        p, state = adam.step(p, g, state, torch.tensor(k + 1), 0.01)
        theirs.grad = torch.sin(theirs.detach() * (k + 1))
        opt.step()
        torch.testing.assert_close(p, theirs.detach(), rtol=1e-12, atol=0)


# -- HypCluster -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"norm": True, "dropout": 0.3, "momentum": 0.9, "lr": 0.02, "clip": 1.0}])
def test_hypcluster_with_one_model_is_fedavg(settings):
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    mine, records = play(method("hypcluster", Kc=1), task, EAGER)
    other, expected = play(method("fedavg"), task, EAGER)
    assert_near(take(mine.server["models"], 0), other.server["w"], 1e-12)
    for a, b in zip(records, expected, strict=True):
        for view in ("pre", "post"):
            np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"], rtol=1e-9)


def test_hypclusters_models_start_from_different_values_and_the_first_from_fedavgs():
    task = make_task(SIZES)
    models = method("hypcluster", Kc=3).init_server(task, 77)["models"]
    assert same(take(models, 0), task.init(77))
    assert not any(same(take(models, a), take(models, b)) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_hypcluster_in_plain_pytorch():
    """Two clients label otherwise than the other two, so that not all choose the same."""
    task = whole_batches()
    for i in (1, 2):
        task.data.y[train_rows(task, i)] = (task.data.y[train_rows(task, i)] + 1) % 4
    run, hand = SingleRun(method("hypcluster", Kc=3), task, SEED, "reference"), Hand(task)
    models = [{k: v.clone() for k, v in take(run.server["models"], j).items()} for j in range(3)]
    assert same(models[0], hand.initial)
    chosen = []

    def best(i):
        return int(np.argmin([hand.measure(m, train_rows(task, i))[1] for m in models]))

    for _ in range(4):
        picks = [best(i) for i in CLIENTS]
        states = [hand.fit(models[j], train_rows(task, i)) for i, j in enumerate(picks)]
        for j in range(3):
            members = [i for i in CLIENTS if picks[i] == j]
            total = sum(SIZES[i] for i in members)
            if members:
                models[j] = hand.average([states[i] for i in members], [SIZES[i] / total for i in members])
        done = run.advance()
        assert done.reports["cluster"].tolist() == picks
        assert_scores(done.scores["post"]["test"], hand, states, task.data.splits["test"])
        newest = [models[best(i)] for i in CLIENTS]
        assert_scores(done.scores["pre"]["test"], hand, newest, task.data.splits["test"])
        chosen += picks
        for j in range(3):
            assert_near(take(run.server["models"], j), models[j])
    assert len(set(chosen)) > 1


def test_hypclusters_average_is_over_those_who_chose_the_model():
    """(1 * 2 + 2 * 8) / 3 = 6 by clients 0 and 2; client 1 alone gives 5; nobody chose the third, which stays 7."""
    alg = method("hypcluster", Kc=3)
    up = {"w": {"p": tensor(2, 5, 8)}, "j": torch.tensor([0, 1, 0])}
    info = INFO._replace(n=torch.tensor([1, 3, 2]))
    server = alg.aggregate(None, {"models": {"p": tensor(9, 9, 7)}}, up, info, 0, 0)
    assert server["models"]["p"].tolist() == pytest.approx([6, 5, 7])


def test_a_client_of_hypcluster_that_diverges_takes_only_its_own_model_with_it():
    alg = method("hypcluster", Kc=2)
    up = {"w": {"p": tensor(math.nan, 5, 8)}, "j": torch.tensor([0, 1, 1])}
    info = INFO._replace(n=torch.tensor([1, 1, 1]))
    server = alg.aggregate(None, {"models": {"p": tensor(9, 9)}}, up, info, 0, 0)
    assert server["models"]["p"][1] == 6.5
    task = make_task(SIZES)
    run = SingleRun(alg, task, 0, plan=EAGER)
    run.server["models"]["head.bias"][0] = math.nan
    assert run.advance(evaluate=False).reports["cluster"].tolist() == [1] * len(SIZES)


def test_hypcluster_looks_at_all_samples_of_a_client():
    """150 samples are three batches of a pass that measures. The first and the last speak for one model (40 of 64, all
    of 22), all together for the other (88 of 150)."""
    data = make_federation((150, 20))
    task = make_task((), federation=data)
    alg = method("hypcluster")
    run = SingleRun(alg, task, 0, plan=EAGER)
    rows, net = train_rows(task, 0), SmallNet().double()
    for j, bias in ((0, 20.0), (1, -20.0)):  # models that say class 0, or anything else
        run.server["models"]["head.weight"][j] = 0
        run.server["models"]["head.bias"][j] = tensor(bias, 0, 0, 0)
    data.y[rows] = ((torch.arange(150) >= 40) & (torch.arange(150) < 128)).long()
    losses = []
    for j in range(2):
        net.load_state_dict(take(run.server["models"], j))
        losses.append(float(F.cross_entropy(net(data.x[rows]), data.y[rows]).detach()))
    assert losses[1] < losses[0]
    assert run.advance(evaluate=False).reports["cluster"][0] == 1


def test_hypcluster_tells_groups_apart_that_label_in_opposite_ways():
    """Clients 0 to 3 have label sign(x), clients 4 to 7 the opposite: no single model serves both."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(8 * 45, 6))
    y = (x[:, 0] > 0).astype(np.int64)
    y[4 * 45 :] = 1 - y[4 * 45 :]
    parts = {"train": (0, 30), "val": (30, 30), "test": (30, 45)}
    splits = {s: Ragged.of([np.arange(45 * i + a, 45 * i + b) for i in range(8)]) for s, (a, b) in parts.items()}
    data = Federation(torch.tensor(x), torch.tensor(y), 2, splits, dtype=torch.float64)
    task = make_task((), federation=data, lr=0.5, epochs=2, rounds=15)
    accuracy = {}
    for name in ("hypcluster", "fedavg"):
        _, records = play(method(name), task, EAGER, rounds=15)
        right = records[-1].scores["pre"]["test"]
        accuracy[name] = right[:, 0].sum() / right[:, 2].sum()
        if name == "hypcluster":
            cluster = records[-1].reports["cluster"]
    assert len(set(cluster[:4])) == len(set(cluster[4:])) == 1
    assert cluster[0] != cluster[4]
    assert accuracy["hypcluster"] > 0.9
    assert accuracy["fedavg"] < 0.65


def test_hypcluster_refuses_models_that_all_start_alike():
    task = single_layer(make_federation(SIZES))  # logistic regression starts at zero
    with user_error("hypcluster", "start from different values", "Kc=1"):
        check(method("hypcluster"), task)
    check(method("hypcluster", Kc=1), task)
    with user_error("hypcluster", "give it as a function"):
        given = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))  # everybody starts from its values
        fedloom.run("hypcluster", rounds=1, clients=4, model=given, head="1")
    with user_error("Kc must be at least 1"):
        configure("hypcluster", values={"Kc": 0})


# -- MAPPER ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"norm": True, "dropout": 0.3, "momentum": 0.9, "lr": 0.02, "clip": 1.0, "weight_decay": 0.01}],
)
def test_mapper_with_candidate_zero_is_fedavg(settings):
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    mine, records = play(method("mapper", lambdas=(0.0,)), task, EAGER)
    other, expected = play(method("fedavg"), task, EAGER)
    assert_near(mine.server["w"], other.server["w"], 1e-12)
    assert_near(mine.store.everyone()["stats"], other.store.everyone()["stats"], 1e-12)
    for a, b in zip(records, expected, strict=True):
        for view in ("pre", "post", "global"):
            np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"], rtol=1e-9)


def test_mapper_with_candidate_one_is_local_and_leaves_the_global_model():
    task = make_task(RAGGED, participation=0.5, epochs=2)
    mine, _ = play(method("mapper", lambdas=(1.0,)), task, EAGER)
    other, _ = play(method("local"), task, EAGER)
    assert_near(own(mine, "theta"), own(other, "theta"))
    assert_near(mine.server["w"], task.init(mine.key), 1e-12)


def test_mappers_steps_by_hand():
    """lambda = 0.25, a gradient of 2 at the mixture, eta = 0.1: theta = 0 - 0.1 * 0.25 * 2 = -0.05 and
    w = 1 - 0.1 * 0.75 * 2 = 0.85. The model is 0.25 * -0.05 + 0.75 * 0.85 = 0.625."""
    alg, task = method("mapper", lambdas=(0.25,)), scalar_task(slope=2.0, lr=0.1)
    down, begun = {"w": one(1)}, {"theta": one(0), "lam": torch.tensor(0.0)}
    work = alg.spread(task, alg.begin(task, down, begun, INFO), down, INFO)
    work = alg.keep_best(task, alg.personal_step(task, work, None, down, INFO), down, INFO)
    torch.testing.assert_close(work["theta"], one(-0.05))
    work = alg.global_step(task, work, None, down, INFO)
    torch.testing.assert_close(work["w"].params, one(0.85))
    torch.testing.assert_close(alg.model(task, work, down, INFO).params, one(0.625))


def test_mapper_keeps_the_first_of_equally_good_candidates():
    alg, task = method("mapper"), scalar_task(slope=0.0, lr=0.1)
    work = {"w": None, "tried": task.slot({"p": tensor(7, 8, 9)}), "lam": tensor(0.25, 0.5, 0.75)}
    for losses, lam, theta in (((2, 1, 1), 0.5, 8), ((3, 3, 3), 0.25, 7), ((math.nan, 5, 4), 0.75, 9)):
        seen = torch.stack([tensor(0, loss, 10) for loss in losses])
        kept = alg.keep_best(task, {**work, "seen": seen}, None, INFO)
        assert (float(kept["lam"]), float(kept["theta"]["p"])) == (lam, theta)


def test_mapper_measures_the_mixtures_with_the_statistics_of_each():
    """With BatchNorm in evaluation mode; a client's statistics are where its candidates' begin."""
    task, alg = make_task(SIZES, norm=True), method("mapper", lambdas=(0.2, 0.7))
    down, begun = {"w": task.init(1)}, {"theta": task.init(2), "lam": tensor(0.5)[0]}
    x, y = task.data.x[:6], task.data.y[:6]
    work = alg.begin(task, down, begun, INFO)
    kept = {k: v + 0.5 for k, v in work["w"].buffers.items()}
    work = alg.spread(task, {**work, "w": work["w"]._replace(buffers=kept)}, down, INFO)
    moved = work["tried"]._replace(
        params={k: v * tensor(1, 3).view(-1, *[1] * (v.dim() - 1)) for k, v in work["tried"].params.items()}
    )
    seen = alg.measure(task, {**work, "tried": moved}, batch_of(x, y), down, INFO)["seen"]
    for j, (lam, factor) in enumerate(((0.2, 1), (0.7, 3))):
        net = SmallNet(norm=True).double().eval()
        mixture = {k: lam * factor * v + (1 - lam) * down["w"][k] for k, v in begun["theta"].items()}
        net.load_state_dict({**net.state_dict(), **mixture, **kept})
        assert float(seen[j, 1]) == pytest.approx(float(F.cross_entropy(net(x), y, reduction="sum").detach()))


def mapper_by_hand(hand, task, i, w, theta, lambdas):
    """The best (theta, lambda) after training each candidate, then w under it, from the round's w and theta."""
    rows, found = train_rows(task, i), []

    def blend(lam, theta, w):
        return {k: lam * theta[k] + (1 - lam) * w[k] for k in w}

    for lam in lambdas:
        tried = hand.fit(theta, rows, mix=lambda theta, lam=lam: blend(lam, theta, w))
        found.append((hand.measure(blend(lam, tried, w), rows)[1], lam, tried))
    _, lam, theta = min(found, key=lambda candidate: candidate[0])
    w_i = hand.fit(w, rows, mix=lambda w: blend(lam, theta, w))
    return theta, lam, w_i, blend


@pytest.mark.parametrize("lambdas", [(0.25, 0.5, 0.75), (0.9, 0.1)])
def test_mapper_in_plain_pytorch(lambdas):
    task = whole_batches()
    run, hand = SingleRun(method("mapper", lambdas=lambdas), task, SEED, "reference"), Hand(task)
    w, thetas = hand.initial, [hand.initial] * len(SIZES)
    test, picked = task.data.splits["test"], set()
    for _ in range(3):
        found = [mapper_by_hand(hand, task, i, w, thetas[i], lambdas) for i in CLIENTS]
        thetas, lams, locals_ = ([f[part] for f in found] for part in range(3))
        blend = found[0][3]
        w = hand.average(locals_, hand.weights)
        done = run.advance()
        assert done.reports["lambda"].tolist() == pytest.approx(lams)
        assert_near(run.server["w"], w)
        for i in CLIENTS:
            assert_near(own(run, "theta", i), thetas[i])
        after = [blend(lams[i], thetas[i], locals_[i]) for i in CLIENTS]
        assert_scores(done.scores["post"]["test"], hand, after, test)
        assert_scores(done.scores["pre"]["test"], hand, [blend(lams[i], thetas[i], w) for i in CLIENTS], test)
        assert_scores(done.scores["global"]["test"], hand, [w] * len(SIZES), test)
        picked |= set(lams)
    assert picked <= set(lambdas)


def test_mappers_candidates_all_start_from_the_stored_model():
    """After spreading, three equal copies with momentum of their own; the round's end keeps one."""
    task = make_task(SIZES, momentum=0.9)
    alg = method("mapper")
    down, begun = {"w": task.init(1)}, {"theta": task.init(2), "lam": tensor(0.5)[0]}
    work = alg.spread(task, alg.begin(task, down, begun, INFO), down, INFO)
    assert work["lam"].tolist() == [0.25, 0.5, 0.75]
    for j in range(3):
        assert same(take(work["tried"].params, j), begun["theta"])
        assert all((v == 0).all() for v in take(work["tried"].momentum, j).values())
    assert set(alg.keep_best(task, work, down, INFO)) == {"w", "theta", "lam"}


def test_a_client_of_mapper_that_never_trained_is_served_by_the_global_model_and_starts_from_the_first():
    task = whole_batches()
    run, hand = SingleRun(method("mapper"), task, SEED, plan=EAGER), Hand(task)
    for _ in range(2):
        scores = run.advance(cohort=np.array([1, 3])).scores
    np.testing.assert_allclose(scores["pre"]["test"][[0, 2]], scores["global"]["test"][[0, 2]])
    assert not np.allclose(scores["pre"]["test"][[1, 3]], scores["global"]["test"][[1, 3]])
    assert own(run, "lam")[[0, 2]].tolist() == [0, 0]
    w = {k: v.clone() for k, v in run.server["w"].items()}
    run.advance(evaluate=False, cohort=np.array([2]))
    theta, lam, w_i, _ = mapper_by_hand(hand, task, 2, w, hand.initial, (0.25, 0.5, 0.75))
    assert_near(own(run, "theta", 2), theta)
    assert float(own(run, "lam")[2]) == lam
    assert_near(run.server["w"], w_i)


def test_mappers_candidates_are_checked():
    with user_error("lambdas must be at most 1", "1.5"):
        configure("mapper", values={"lambdas": "0.5/1.5"})
    with user_error("lambdas must be at least 0"):
        configure("mapper", values={"lambdas": (-0.1, 0.5)})
    with user_error("at least one candidate", "lambdas=0.5"):
        check(method("mapper", lambdas=()), make_task(SIZES))
    assert configure("mapper", values={"lambdas": "0.1/0.9"}).algorithm.lambdas == (0.1, 0.9)


# -- PartialFed -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own(type(method("partialfed"))):
    """PartialFed whose clients start with a policy for their own layers."""

    def init_client(self, task, key, key_i):
        started = super().init_client(task, key, key_i)
        return {**started, "pi": started["pi"] + tensor(1, 0)}


BN = {"norm": True, "dropout": 0.3, "momentum": 0.9, "lr": 0.02, "clip": 1.0, "weight_decay": 0.01}


@pytest.mark.parametrize("settings", [{}, BN])
@pytest.mark.parametrize("how", [{"policy_lr": 0.0, "policy_epochs": 3}, {"policy_epochs": 0}, {"warmup": 1.0}])
def test_partialfed_with_all_layers_global_is_fedavg(settings, how):
    """Also in its running statistics, which passes for the policy leave alone, and so during the whole warm-up."""
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    mine, records = play(method("partialfed", **{"warmup": 0.0, **how}), task, EAGER)
    other, expected = play(method("fedavg"), task, EAGER)
    assert_near(mine.server["w"], other.server["w"], 1e-12)
    assert_near(mine.store.everyone()["stats"], other.store.everyone()["stats"], 1e-12)
    for a, b in zip(records, expected, strict=True):
        for view in ("pre", "post", "global"):
            np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"], rtol=1e-9)


@pytest.mark.parametrize("settings", [{}, BN])
def test_partialfed_with_all_layers_local_is_local(settings):
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    mine, records = play(Own(policy_lr=0.0, warmup=0.0), task, EAGER)
    other, expected = play(method("local"), task, EAGER)
    assert_near(own(mine, "theta"), own(other, "theta"), 1e-12)
    for a, b in zip(records, expected, strict=True):
        for view in ("pre", "post"):
            np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"], rtol=1e-9)


def test_a_layer_is_global_unless_the_policy_prefers_the_local_one():
    """Layers of the small net: first, head. Equal logits mean global."""
    task, alg = make_task(SIZES), method("partialfed")
    theta, down = task.init(1), {"w": task.init(2)}
    for pi, first, head in (
        (((0, 0), (0, 0)), "w", "w"),
        (((0.1, 0), (0, 0.1)), "theta", "w"),
        (((-0.2, -0.1), (0.3, 0.2)), "w", "theta"),
    ):
        found = alg.loaded(task, {"theta": theta, "pi": tensor(*pi)}, down)
        expected = {"first": {"w": down["w"], "theta": theta}[first], "head": {"w": down["w"], "theta": theta}[head]}
        for name, v in found.items():
            assert torch.equal(v, expected[name.split(".")[0]][name]), (pi, name)


@pytest.mark.parametrize(("t", "heat"), [(0, 5.0), (10, 3.501411), (100, 0.5)])
def test_the_policys_step_in_plain_pytorch(t, heat, monkeypatch):
    """Three batches with given noise against a straight-through draw and torch.optim.Adam. Temperatures:
    5 * 0.965^10 = 5 * e^(10 ln 0.965) = 5 * e^-0.356272 = 3.501411; 5 * 0.965^100 = 0.142 is below the least, 0.5."""
    task = make_task(SIZES)
    alg, theta, w = method("partialfed"), task.init(1), task.init(2)
    draw = torch.Generator().manual_seed(t)
    noises = [torch.randn(2, 2, dtype=torch.float64, generator=draw) for _ in range(3)]
    monkeypatch.setattr(partialfed_, "gumbel", lambda key, shape, dtype: noises[int(key)])
    monkeypatch.setattr(partialfed_, "fold", lambda key, *ids: key)
    work = alg.begin(task, {"w": w}, {"theta": theta, "pi": torch.zeros(2, 2, dtype=torch.float64)}, INFO)
    pi = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    opt = torch.optim.Adam([pi], lr=0.01)
    for k in range(3):
        x, y = task.data.x[5 * k : 5 * k + 5], task.data.y[5 * k : 5 * k + 5]
        work = alg.policy_step(task, work, batch_of(x, y, k=k, key=k), {"w": w}, INFO._replace(t=torch.tensor(t)))
        opt.zero_grad()
        soft = F.softmax((pi + noises[k]) / heat, dim=1)
        hard = F.one_hot(soft.argmax(1), 2).double()
        u = hard - soft.detach() + soft
        params = {k: u[int("head" in k), 1] * w[k] + u[int("head" in k), 0] * theta[k] for k in w}
        F.cross_entropy(torch.func.functional_call(SmallNet().double(), params, (x,)), y).backward()
        opt.step()
        torch.testing.assert_close(work["pi"], pi.detach(), rtol=1e-6, atol=1e-12)
    assert (work["pi"] != 0).all()
    assert same(work["theta"], theta)
    torch.testing.assert_close(work["pi"][:, 0], -work["pi"][:, 1])  # what one gains the other loses


def test_gumbel_noise_draws_from_the_softmax():
    """Logits (0, ln 3): the second is larger in three of four draws. 20,000 draws have a standard deviation of
    sqrt(3/16 / 20000) = 0.0031. The mean of the noise is Euler's constant, 0.5772, its variance pi^2/6."""
    keys = fold(root(0, "test"), torch.arange(20000))
    noise = torch.stack([partialfed_.gumbel(k, (2,), torch.float64) for k in keys])
    share = (noise + tensor(0, math.log(3))).argmax(1).double().mean()
    assert float(share) == pytest.approx(0.75, abs=0.013)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.03)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gumbel_noise_is_finite_at_both_ends(dtype, monkeypatch):
    for u in (0.0, 1 - 2.0**-24):
        monkeypatch.setattr(partialfed_, "uniform", lambda key, shape, dtype, u=u: torch.full(shape, u, dtype=dtype))
        assert torch.isfinite(partialfed_.gumbel(None, (2, 2), dtype)).all()


@pytest.mark.parametrize("good", ["local", "global"])
def test_the_policy_turns_to_the_layers_that_fit(good):
    """One of two models is trained on the client's samples, the other is noise."""
    task = make_task((40, 40), lr=0.5, rounds=100)
    run, _ = play(method("local"), task, EAGER, rounds=20)
    trained = take(own(run, "theta"), 0)
    noise = tree_map(
        lambda v: 3 * torch.randn(v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(0)), trained
    )
    theta, w = (trained, noise) if good == "local" else (noise, trained)
    alg = method("partialfed", policy_epochs=5, warmup=0.0)
    learning = SingleRun(alg, task, 0, plan=EAGER)
    learning.advance(evaluate=False)  # from now on nobody is new
    kept = learning.store.everyone()
    fresh = {
        "theta": tree_map(lambda v: v.expand(2, *v.shape).clone(), theta),
        "pi": torch.zeros_like(kept["own"]["pi"]),
    }
    learning.store.write(np.arange(2), {**kept, "own": fresh})
    learning.server = {"w": w}
    found = learning.advance(evaluate=False).reports["global"][0]
    assert found.tolist() == ([0, 0] if good == "local" else [1, 1])


def test_partialfed_starts_a_new_client_from_the_global_model_whenever_it_comes():
    task = whole_batches()
    run, hand = SingleRun(method("partialfed", warmup=0.0, policy_lr=0.5), task, SEED, plan=EAGER), Hand(task)
    for _ in range(3):
        scores = run.advance(cohort=np.array([1, 3])).scores
    assert (own(run, "pi")[[1, 3]] != 0).all()
    assert (own(run, "pi")[[0, 2]] == 0).all()
    np.testing.assert_allclose(scores["pre"]["test"][[0, 2]], scores["global"]["test"][[0, 2]])
    w = {k: v.clone() for k, v in run.server["w"].items()}
    run.advance(evaluate=False, cohort=np.array([2]))
    assert_near(own(run, "theta", 2), hand.fit(w, train_rows(task, 2)))
    assert (own(run, "pi")[2] == 0).all()  # its first round is without a policy


def test_partialfeds_rounds_in_plain_pytorch_given_the_policies():
    """Whatever layers the policies chose: loading, training, averaging all layers, and the models that are scored."""
    task = whole_batches()
    run, hand = SingleRun(method("partialfed", warmup=0.0, policy_lr=0.3), task, SEED, "reference"), Hand(task)
    w, thetas, kinds = hand.initial, [hand.initial] * len(SIZES), set()
    test = task.data.splits["test"]

    def load(i, w, chosen):
        return {k: w[k] if chosen[i, int("head" in k)] else thetas[i][k] for k in w}

    for _ in range(6):
        done = run.advance()
        chosen = done.reports["global"].astype(bool)
        kinds |= {tuple(row) for row in chosen.tolist()}
        thetas = [hand.fit(load(i, w, chosen), train_rows(task, i)) for i in CLIENTS]
        w = hand.average(thetas, hand.weights)
        assert_near(run.server["w"], w)
        for i in CLIENTS:
            assert_near(own(run, "theta", i), thetas[i])
        assert_scores(done.scores["post"]["test"], hand, thetas, test)
        assert_scores(done.scores["pre"]["test"], hand, [load(i, w, chosen) for i in CLIENTS], test)
        assert_scores(done.scores["global"]["test"], hand, [w] * len(SIZES), test)
    assert {(True, True), (False, False)} <= kinds


def test_partialfed_fixed_is_fedper_without_normalisation():
    task = make_task(RAGGED, participation=0.5, epochs=2)
    mine, records = play(method("partialfed", mode="fix"), task, EAGER)
    other, expected = play(method("fedper"), task, EAGER)
    assert_near(task.body(mine.server["w"]), other.server["phi"], 1e-12)
    assert_near({k: own(mine, "theta")[k] for k in task.network.head}, own(other, "h"), 1e-12)
    for a, b in zip(records, expected, strict=True):
        for view in ("pre", "post"):
            np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"], rtol=1e-9)


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
    task = single_layer(make_federation(RAGGED))
    run, _ = play(method("partialfed", warmup=0.0), task, EAGER)
    assert own(run, "pi").shape == (len(RAGGED), 1, 2)
    with user_error("mode=fix", "mode=adaptive"):
        check(method("partialfed", mode="fix"), task)
    check(method("partialfed"), task)


def test_partialfeds_policy_may_learn_from_samples_of_its_own():
    """With a fifth held out, weights see the rest only: the rounds before a policy is learnt are FedAvg on 80 %."""

    @dataclass(frozen=True)
    class Most(FedAvg):
        def phases(self, task):
            def most(n, draw):
                order = np.random.default_rng([draw.seed, zlib.crc32(b"policy"), draw.i]).permutation(n)
                return order[: max(1, int(0.8 * n + 1e-9))]

            return [Phase(self.step, task.epochs, select=most)]

    task = make_task(RAGGED, epochs=2)
    mine, _ = play(method("partialfed", policy_share=0.2, warmup=1.0), task, EAGER)
    other, _ = play(Most(), task, EAGER)
    assert_near(mine.server["w"], other.server["w"], 1e-12)
    run, _ = play(method("partialfed", policy_share=0.2, warmup=0.0), task, EAGER)
    moved = (own(run, "pi") != 0).flatten(1).any(1)
    assert moved.tolist() == [n > 1 for n in RAGGED]  # one sample is trained on, and leaves none for the policy


def test_partialfeds_warm_up_is_a_share_of_the_rounds():
    task = make_task(SIZES, rounds=10)
    alg = method("partialfed", policy_epochs=2)
    passes = [
        int(alg.policy_passes(task, None, INFO._replace(t=torch.tensor(t), first=torch.tensor(first))))
        for t, first in ((0, False), (1, False), (2, False), (9, False), (9, True))
    ]
    assert passes == [0, 0, 2, 2, 0]


# -- FedFomo --------------------------------------------------------------------------------------------------------


def mix_by(losses, mine, theta, models, there=None, n=1):
    """`mix` with given mean losses over n held-out samples, for models of one parameter vector."""
    models = torch.stack(models)
    there = torch.ones(len(models), dtype=torch.bool) if there is None else torch.tensor(there)
    theirs = torch.stack([tensor(0, n * loss, n) for loss in losses])
    alg, task = method("fedfomo"), make_task(SIZES)
    work = {"theta": task.slot({"p": theta}), "mine": tensor(0, n * mine, n), "theirs": theirs, "w": theirs[:, 0]}
    done = alg.mix(task, work, {"models": {"p": models}, "there": there}, INFO)
    return done["w"], done["theta"].params["p"]


def test_fedfomos_weights():
    """Own loss 1, others 0.5 and 1.2 at distance 2: (0.5, -0.2) / (2 + 1e-5); only the first is positive, so the
    client moves to it entirely. Sums over 7 samples give the same as means."""
    for n in (1, 7):
        w, theta = mix_by((0.5, 1.2), 1.0, tensor(0, 0), [tensor(2, 0), tensor(0, 2)], n=n)
        assert w.tolist() == pytest.approx([0.25, -0.1], abs=1e-5)
        assert w.tolist() == pytest.approx([0.5 / 2.00001, -0.2 / 2.00001], rel=1e-12)
        assert theta.tolist() == pytest.approx([2, 0])


def test_fedfomo_mixes_by_positive_weights():
    """Distances 2 and 4, gains 0.6 and 0.4: weights 0.3 and 0.1 (up to 1e-5), shares 3/4 and 1/4:
    (1, 1) + 3/4 (2, 0) + 1/4 (0, -4) = (2.5, 0). The third is worse and has none."""
    others = [tensor(3, 1), tensor(1, -3), tensor(100, 100)]
    w, theta = mix_by((0.4, 0.6, 1.5), 1.0, tensor(1, 1), others)
    assert w[:2].tolist() == pytest.approx([0.3, 0.1], rel=1e-5)
    assert theta.tolist() == pytest.approx([2.5, 0], abs=1e-4)


def test_fedfomo_stays_where_it_is_if_nothing_is_better():
    w, theta = mix_by((1.0, 2.0), 1.0, tensor(1, 1), [tensor(3, 1), tensor(1, -3)])
    assert w[0] == 0
    assert theta.tolist() == [1, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fedfomo_is_safe_from_models_that_diverged_empty_slots_and_its_own_copy(bad):
    """Also from a copy whose loss comes out a little smaller by rounding."""
    others = [tensor(bad, bad), tensor(0, 0), tensor(1, 1), tensor(1, 3)]
    w, theta = mix_by((bad, 0.1, 1 - 1e-12, 0.5), 1.0, tensor(1, 1), others, there=(True, False, True, True))
    assert w[:3].tolist() == [0, 0, 0]
    assert w[3] == pytest.approx(0.25, rel=1e-5)
    assert theta.tolist() == pytest.approx([1, 3])


def test_a_client_without_held_out_samples_goes_alone():
    """One sample is trained on; nothing says whether others are better."""
    task = make_task((1, 20, 20))
    mine, _ = play(method("fedfomo"), task, EAGER)
    other, _ = play(method("local"), task, EAGER)
    assert_near(own(mine, "theta", 0), own(other, "theta", 0), 1e-12)
    assert mine.server["P"][0].tolist() == [1, 0, 0]


@dataclass(frozen=True)
class Most(Local):
    """Local on the first 80 % of a client's permuted samples."""

    def phases(self, task):
        def most(n, draw):
            order = np.random.default_rng([draw.seed, zlib.crc32(b"fomo"), draw.i]).permutation(n)
            return order[: max(1, int(0.8 * n + 1e-9))]

        return [Phase(self.step, task.epochs, select=most)]


@pytest.mark.parametrize("settings", [{}, BN])
def test_fedfomo_without_models_is_local_on_its_part(settings):
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    mine, records = play(method("fedfomo", M=0), task, EAGER)
    other, expected = play(Most(), task, EAGER)
    assert_near(own(mine, "theta"), own(other, "theta"), 1e-12)
    for a, b in zip(records, expected, strict=True):
        assert a.bytes_down == 0
        for view in ("pre", "post"):
            np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"], rtol=1e-9)


def test_fedfomo_in_plain_pytorch():
    """Four clients, so all others are sent: no choice, all of the rest."""
    task = whole_batches()
    run, hand = SingleRun(method("fedfomo"), task, SEED, "reference"), Hand(task)
    n = len(SIZES)
    thetas, P, moved = [hand.initial] * n, np.eye(n), 0
    rows = []
    for i in CLIENTS:
        order = np.random.default_rng([SEED, zlib.crc32(b"fomo"), i]).permutation(SIZES[i])
        cut = int(0.8 * SIZES[i] + 1e-9)
        rows.append((train_rows(task, i)[order[:cut]], train_rows(task, i)[order[cut:]]))

    def flat(state):
        return torch.cat([v.flatten() for v in state.values()])

    for t in range(4):
        new = []
        for i in CLIENTS:
            theta = thetas[i]
            if t > 0:
                mine = hand.measure(theta, rows[i][1])[1]
                w = {}
                for j in CLIENTS:
                    if j != i:
                        distance = float((flat(thetas[j]) - flat(theta)).norm())
                        w[j] = (mine - hand.measure(thetas[j], rows[i][1])[1]) / (distance + 1e-5)
                        P[i, j] += w[j]
                total = sum(max(v, 0) for v in w.values())
                if total > 0:
                    moved += 1
                    step = {k: sum(max(w[j], 0) / total * (thetas[j][k] - theta[k]) for j in w) for k in theta}
                    theta = {k: theta[k] + step[k] for k in theta}
            new.append(hand.fit(theta, rows[i][0]))
        thetas = new
        done = run.advance()
        for i in CLIENTS:
            assert_near(own(run, "theta", i), thetas[i], 1e-8)
            assert_near(take(run.server["models"], i), thetas[i], 1e-8)
        np.testing.assert_allclose(run.server["P"].numpy(), P, rtol=1e-6, atol=1e-9)
        for view in ("pre", "post"):
            assert_scores(done.scores[view]["test"], hand, thetas, task.data.splits["test"])
    assert 0 < moved < 3 * n


def test_nothing_is_sent_down_in_the_first_round_and_m_models_from_then_on():
    """Parameters of the small net, in float64; up go the model and a weight for each of five slots."""
    model = (6 * 8 + 8 + 8 * 4 + 4) * 8
    _, records = play(method("fedfomo"), make_task(RAGGED), EAGER, rounds=3)
    m = len(RAGGED)
    assert [done.bytes_down for done in records] == [0, m * 5 * model, m * 5 * model]
    assert [done.bytes_up for done in records] == [m * (model + 5 * 8)] * 3


def test_a_client_is_sent_the_last_models_of_those_that_have_uploaded():
    """Clients 1 and 3 have: a newcomer is sent two models, client 1 one, and both as they were uploaded last."""
    task, alg = make_task(SIZES), method("fedfomo")
    run = SingleRun(alg, task, 0, plan=EAGER)
    for cohort in ([1, 3], [3]):
        run.advance(evaluate=False, cohort=np.array(cohort))
    assert run.server["known"].tolist() == [False, True, False, True]
    ids = torch.tensor([0, 1])
    _, parts = alg.download(task, run.server, ids, 2, run.key)
    who, there = alg.choose(task, run.server, ids, 2, run.key)
    assert there.sum(1).tolist() == [2, 1]
    assert set(who[0][there[0]].tolist()) == {1, 3}
    assert who[1][there[1]].tolist() == [3]
    for row in range(2):
        for slot in range(3):
            if there[row, slot]:
                assert same(take(parts["models"], (row, slot)), own(run, "theta", int(who[row, slot])))
    done = run.advance(evaluate=False, cohort=np.array([0]))
    assert done.bytes_down == 2 * size_bytes(task.init(0))
    assert (run.server["P"][0] != 0).tolist() == [True, True, False, True]
    assert run.server["P"][2].tolist() == [0, 0, 1, 0]


def test_affinities_add_up_over_rounds():
    task = make_task(RAGGED)
    run = SingleRun(method("fedfomo", M=3), task, 0, plan=EAGER)
    P = np.eye(len(RAGGED))
    for t in range(4):
        who, there = run.alg.choose(task, run.server, torch.arange(len(RAGGED)), t, run.key)
        w = run.advance(evaluate=False).reports["w"]
        for i in range(len(RAGGED)):
            for slot in range(3):
                P[i, int(who[i, slot])] += w[i, slot]
        assert (w[~there.numpy()] == 0).all()
        np.testing.assert_allclose(run.server["P"].numpy(), P, rtol=1e-12)
    assert P.sum() != len(RAGGED)


def test_a_federation_of_one_has_nobody_to_learn_from():
    mine, records = play(method("fedfomo"), make_task((20,)), EAGER)
    other, _ = play(Most(), make_task((20,)), EAGER)
    assert_near(own(mine, "theta"), own(other, "theta"), 1e-12)
    assert {done.bytes_down for done in records} == {0}


def test_fedfomos_settings_are_checked():
    with user_error("val_share must be greater than 0"):
        configure("fedfomo", values={"val_share": 0})
    with user_error("eps must be at most 1"):
        configure("fedfomo", values={"eps": 2})
    with user_error("M must be at least 0"):
        configure("fedfomo", values={"M": -1})


# -- whose models are sent ------------------------------------------------------------------------------------------

KNOWN = torch.tensor([True, True, True, False, True, True])
AFFINITY = tensor(9, 0.1, 0.5, 7.0, -0.2, 0.3).expand(6, -1).clone()


def picked(ids, count, eps=0.0, key=3, affinity=AFFINITY, known=KNOWN):
    who, there = pick(affinity, known, torch.tensor(ids), count, eps, key)
    return [[int(j) if t else None for j, t in zip(*row, strict=True)] for row in zip(who, there, strict=True)]


def test_the_best_that_are_known_are_sent_but_never_the_own():
    """Client 3 has the highest affinity after 0 but has never uploaded."""
    assert picked([1, 0, 3], 2) == [[0, 2], [2, 5], [0, 2]]
    assert picked([0], 5) == [[2, 5, 1, 4, None]]
    assert picked([0, 2], 2, known=torch.zeros(6, dtype=torch.bool)) == [[None, None]] * 2


def test_of_equal_affinities_any_may_be_sent():
    """Four equals, one slot: each about 500 times in 2000, with a standard deviation of 19."""
    flat = torch.zeros(6, 6, dtype=torch.float64)
    counts = np.bincount([picked([0], 1, key=k, affinity=flat)[0][0] for k in range(2000)], minlength=6)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert (abs(counts[[1, 2, 4, 5]] - 500) < 100).all()


def test_a_slot_is_replaced_with_the_given_chance_by_another_that_was_not_to_be_sent():
    """Best for client 0: 2 and 5; others that are known: 1 and 4. With eps = 0.3 a slot is replaced in 3 of 10 cases:
    4000 slots have a standard deviation of sqrt(0.21 / 4000) = 0.007."""
    rows = [picked([0], 2, eps=0.3, key=k)[0] for k in range(2000)]
    assert all(len(set(row)) == 2 and set(row) <= {1, 2, 4, 5} for row in rows)
    replaced = np.array([[row[0] != 2, row[1] != 5] for row in rows])
    assert replaced.mean() == pytest.approx(0.3, abs=0.03)
    assert np.mean([1 in row for row in rows]) == pytest.approx(np.mean([4 in row for row in rows]), abs=0.05)
    assert all(set(picked([0], 2, eps=1.0, key=k)[0]) == {1, 4} for k in range(20))
    assert picked([0], 4, eps=1.0) == [[2, 5, 1, 4]]  # there is nobody else
    mixed = [picked([0], 3, eps=1.0, key=k)[0] for k in range(50)]
    assert all(4 in row and len(set(row)) == 3 for row in mixed)  # one to replace with, for one of the slots


def test_what_is_sent_to_a_client_does_not_depend_on_who_else_is_there():
    alone = [picked([i], 3, eps=0.5)[0] for i in range(6)]
    assert picked(list(range(6)), 3, eps=0.5) == alone
    assert picked([4, 1], 3, eps=0.5) == [alone[4], alone[1]]


@pytest.mark.parametrize(("t", "eps"), [(0, 0.3), (3, 0.15), (6, 0.0), (50, 0.0)])
def test_the_chance_of_a_random_model_falls(t, eps, monkeypatch):
    """max(0, 0.3 - 0.05 t)"""
    seen = []
    monkeypatch.setattr("fedloom.algorithms.fedfomo.pick", lambda *args: seen.append(args))
    alg, task = method("fedfomo"), make_task(SIZES)
    alg.choose(task, alg.init_server(task, 0), torch.arange(4), t, 0)
    (_, _, _, count, found, _) = seen[0]
    assert (count, found) == (3, pytest.approx(eps))


# -- Dap-FL ---------------------------------------------------------------------------------------------------------

EAGER_AGENTS = {"t_warm": 1, "replay_batch": 2, "ep_max": 4}  # that learn and act from the third round on


def test_dap_fls_reward_is_the_gain_of_accuracy_plus_the_fall_of_loss():
    """(0.7 - 0.5) + (1.2 - 0.9) = 0.5; the other way round -0.5."""
    assert float(gain(tensor(0.5, 1.2), tensor(0.7, 0.9))) == pytest.approx(0.5)
    assert float(gain(tensor(0.7, 0.9), tensor(0.5, 1.2))) == pytest.approx(-0.5)


def test_dap_fls_agents_are_those_of_the_specification():
    agent = method("dap-fl").client_agent(make_task(SIZES, rounds=7))
    assert (agent.states, agent.actions, agent.capacity) == (2, 2, 7)
    assert (agent.critic_lr, agent.actor_lr, agent.tau) == (0.001, 0.0001, 0.001)
    assert (agent.t_warm, agent.batch, agent.gamma) == (35, 32, 0.99)
    assert (agent.noise, agent.fade) == (1.0, None)  # exploration stays


@pytest.mark.parametrize(
    ("a", "eta", "alpha"), [((-1, -1), 0.01, 1), ((0, 0), 0.105, 11), ((1, 1), 0.2, 20), ((0.5, -0.5), 0.1525, 6)]
)
def test_dap_fl_decodes_actions_as_page_does(a, eta, alpha):
    found = method("dap-fl", lr_min=0.01, lr_max=0.2).decoded(tensor(*a))
    assert (float(found[0]), int(found[1])) == (pytest.approx(eta), alpha)


@dataclass(frozen=True)
class Uniform(FedAvg):
    def aggregate(self, task, server, up, info, t, key):
        return {"w": uniform_mean(up["w"])}


@pytest.mark.parametrize("compat", [False, True])
def test_dap_fl_without_a_choice_is_fedavg(compat):
    """One learning rate, one epoch; compat weighs clients equally."""
    task = make_task(RAGGED, lr=0.07, participation=0.5, momentum=0.5)
    mine, records = play(
        method("dap-fl", lr_min=0.07, lr_max=0.07, ep_max=1, local_clip=None, compat=compat), task, EAGER
    )
    other, expected = play(Uniform() if compat else method("fedavg"), task, EAGER)
    assert_near(mine.server["w"], other.server["w"], 1e-12)
    for a, b in zip(records, expected, strict=True):
        for view in ("pre", "post", "global"):
            np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"], rtol=1e-9)


@pytest.mark.parametrize("compat", [False, True])
def test_dap_fl_in_plain_pytorch_given_the_actions(compat):
    """State, training, reward and average, in rounds in which agents learn (from the third on); the transitions that
    they remember are (s(t-1), a(t-1), r(t-1), s(t))."""
    alg, task = method("dap-fl", local_clip=0.3, compat=compat, **EAGER_AGENTS), whole_batches()
    run, hand = SingleRun(alg, task, SEED, "reference"), Hand(task)
    w, states, rewards, test = hand.initial, [], [], task.data.splits["test"]
    measured = []
    for t in range(6):
        done = run.advance()
        found = done.reports
        states.append([hand.measure(w, train_rows(task, i)) for i in CLIENTS])
        assert found["acc"] == pytest.approx([s[0] for s in states[t]])
        assert found["loss"] == pytest.approx([s[1] for s in states[t]])
        trained = [
            hand.fit(w, train_rows(task, i), int(found["alpha"][i]), float(found["eta"][i]), clip=0.3) for i in CLIENTS
        ]
        if compat:  # accuracy before, test loss after training; against the round before
            measured.append([(states[t][i][0], hand.measure(trained[i], test[i])[1]) for i in CLIENTS])
        else:
            measured.append(states[t])
        gained = [
            measured[t][i][0] - measured[t - 1][i][0] + measured[t - 1][i][1] - measured[t][i][1] if t else 0
            for i in CLIENTS
        ]
        assert found["reward"] == pytest.approx(gained, abs=1e-9)
        rewards.append(gained)
        w = hand.average(trained, [0.25] * 4 if compat else hand.weights)
        assert_near(run.server["w"], w, 1e-9)
        assert_scores(done.scores["post"]["test"], hand, trained, test)
        assert_scores(done.scores["pre"]["test"], hand, [w] * len(SIZES), test)
    agents = own(run, "agent")
    assert agents["stored"].tolist() == [5] * len(SIZES)
    assert agents["updates"].tolist() == [4] * len(SIZES)
    for i in CLIENTS:
        replay = take(agents["replay"], i)
        for t in range(5):
            assert replay["s"][t].tolist() == pytest.approx(states[t][i])
            assert replay["next"][t].tolist() == pytest.approx(states[t + 1][i])
            # what round t was good for is known in round t + 1, or with compat at its own end
            assert float(replay["r"][t]) == pytest.approx(rewards[t if compat else t + 1][i], abs=1e-9)


def test_dap_fl_counts_from_one_participation_to_the_next():
    """Client 2 takes part in rounds 0 and 3: its one transition spans them, and its reward compares their models."""
    task = whole_batches()
    run, hand = SingleRun(method("dap-fl", ep_max=2), task, SEED, plan=EAGER), Hand(task)
    before = hand.measure(hand.initial, train_rows(task, 2))
    for cohort in ([0, 2], [0, 1], [1, 3]):
        run.advance(evaluate=False, cohort=np.array(cohort))
    after = hand.measure({k: v.clone() for k, v in run.server["w"].items()}, train_rows(task, 2))
    done = run.advance(evaluate=False, cohort=np.array([2]))
    assert own(run, "agent")["stored"].tolist() == [1, 1, 1, 0]
    gained = after[0] - before[0] + before[1] - after[1]
    assert done.reports["reward"].tolist() == pytest.approx([gained])
    assert float(own(run, "agent")["replay"]["r"][2, 0]) == pytest.approx(gained)


def test_dap_fls_agents_are_sent_nowhere_and_are_each_ones_own():
    run, records = play(method("dap-fl"), make_task(SIZES), EAGER, rounds=1)
    model = size_bytes(run.server["w"])
    assert (records[0].bytes_down, records[0].bytes_up) == (4 * model, 4 * model)
    first = own(run, "agent")["nets"]["actor"]
    assert len({tuple(v.flatten().tolist()) for v in first}) == len(SIZES)


def test_dap_fl_refuses_what_does_not_fit():
    with user_error("lr_min=0.2", "lr_max=0.1"):
        check(method("dap-fl", lr_min=0.2), make_task(SIZES))
    data = make_federation((5, 5))
    splits = {**data.splits, "test": Ragged.of([np.arange(0), np.arange(3)])}
    task = make_task((), federation=dataclasses.replace(data, splits=splits))
    with user_error("dap-fl", "compat=true", "test samples"):
        check(method("dap-fl", compat=True), task)
    check(method("dap-fl"), task)


# -- all of them ----------------------------------------------------------------------------------------------------

VARIANTS = [
    ("hypcluster", {"Kc": 3}),
    ("mapper", {"lambdas": (0.0, 0.9, 1.0)}),
    ("partialfed", {"warmup": 0.0, "policy_epochs": 2, "policy_lr": 0.3}),
    ("partialfed", {"warmup": 0.0, "policy_share": 0.3}),
    ("partialfed", {"mode": "fix"}),
    ("fedfomo", {"M": 2, "eps": 1.0, "eps_decay": 0.0}),
    ("fedfomo", {"M": 0}),
    ("dap-fl", {**EAGER_AGENTS, "replay": 4}),
    ("dap-fl", {**EAGER_AGENTS, "compat": True, "decode": "clip", "lr_max": 0.6, "local_clip": None}),
]


@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=lambda v: v if isinstance(v, str) else ",".join(v))
def test_variants_do_the_same_stacked_and_one_by_one(name, variant):
    """Clients of one to sixty samples, with BatchNorm, some of them absent in some rounds, over five rounds."""
    task = make_task(RAGGED, participation=0.7, norm=True, lr=0.02, momentum=0.5, epochs=2, rounds=5)
    alg = method(name, **variant)
    reference = play(alg, task, ALONE, rounds=5)
    for plan in (Plan("stacked", "eager", chunk=5), Plan("stacked", "traced", chunk=12, shrink=0)):
        assert_same(alg, task, plan, 1e-9, rounds=5, reference=reference)


@pytest.mark.parametrize("name", ["hypcluster", "mapper", "partialfed", "fedfomo", "dap-fl"])
def test_a_class_that_only_one_client_has_or_nobody(name):
    """Clients without a class learn nothing about it and still have all outputs; everything stays finite."""
    data = make_federation(RAGGED)
    data.y.clamp_(max=2)  # nobody has class 3
    data.y[data.y == 2] = 1
    data.y[train_rows(SimpleNamespace(data=data), 1)[:5]] = 2  # only client 1 has class 2
    run, records = play(method(name), make_task((), federation=data, rounds=5), EAGER, rounds=5)
    assert all(torch.isfinite(v).all() for v in leaves((run.server, run.store.everyone())))
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()


@pytest.mark.parametrize("name", ["mapper", "partialfed", "fedfomo", "dap-fl"])
def test_a_model_of_a_single_layer_runs(name):
    task = single_layer(make_federation(RAGGED))
    check(method(name), task)
    _, records = play(method(name), task, EAGER)
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()
