"""Every method against a second implementation in plain PyTorch that uses nothing of FedLoom.

Batches are as large as the largest client, so an epoch is one step of gradient descent and the order of samples does
not matter; everything else (epochs, momentum, weight decay, unequal sizes, two rounds, who keeps what) does.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import SingleRun, SmallNet, make_task, method

from fedloom.core.keys import root

SIZES = (3, 17, 8, 11)
ROUNDS, EPOCHS, LR, MOMENTUM, DECAY, SEED = 3, 2, 0.3, 0.5, 0.01, 5


class Hand:
    """Clients and server as one would write them by hand, on copies of one initial model."""

    def __init__(self, task, momentum=MOMENTUM):
        self.x = [task.data.x[rows] for rows in map(task.data.splits["train"].__getitem__, range(len(SIZES)))]
        self.y = [task.data.y[rows] for rows in map(task.data.splits["train"].__getitem__, range(len(SIZES)))]
        torch.manual_seed(root(SEED, "init") & ((1 << 63) - 1))
        self.initial = SmallNet().double().state_dict()
        self.weights = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
        self.momentum = momentum

    def model(self, state):
        net = SmallNet().double()
        net.load_state_dict(state)
        return net

    def fit(self, state, i, epochs=EPOCHS, names=None, penalty=None, shift=None):
        """Gradient descent with torch.optim.SGD on the named parameters; returns the state dict."""
        net = self.model(state)
        chosen = [p for n, p in net.named_parameters() if names is None or n.startswith(names)]
        opt = torch.optim.SGD(chosen, lr=LR, momentum=self.momentum, weight_decay=DECAY)
        for _ in range(epochs):
            opt.zero_grad()
            loss = F.cross_entropy(net(self.x[i]), self.y[i])
            if penalty is not None:
                strength, anchor = penalty
                loss = loss + strength / 2 * sum(((p - anchor[n]) ** 2).sum() for n, p in net.named_parameters())
            if shift is not None:
                loss = loss + sum((p * shift[n]).sum() for n, p in net.named_parameters())
            loss.backward()
            opt.step()
        return {k: v.detach().clone() for k, v in net.state_dict().items()}

    def average(self, states, weights=None):
        weights = self.weights if weights is None else weights
        return {k: sum(w * s[k] for w, s in zip(weights, states, strict=True)) for k in states[0]}


def played(name, **settings):
    momentum = 0.0 if name == "scaffold" else MOMENTUM
    task = make_task(SIZES, lr=LR, batch_size=max(SIZES), epochs=EPOCHS, momentum=momentum, weight_decay=DECAY)
    run = SingleRun(method(name, **settings), task, SEED, "reference")
    for _ in range(ROUNDS):
        run.advance(evaluate=False)
    return run, Hand(task, momentum)


def assert_params(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)


def client(run, name, i):
    return {k: v[i] for k, v in run.store.everyone()["own"][name].items()}


def test_local():
    run, hand = played("local")
    for i in range(len(SIZES)):
        state = hand.initial
        for _ in range(ROUNDS):
            state = hand.fit(state, i)
        assert_params(client(run, "theta", i), state)


def test_fedavg():
    run, hand = played("fedavg")
    w = hand.initial
    for _ in range(ROUNDS):
        w = hand.average([hand.fit(w, i) for i in range(len(SIZES))])
    assert_params(run.server["w"], w)


def test_fedprox():
    run, hand = played("fedprox", mu=0.7)
    w = hand.initial
    for _ in range(ROUNDS):
        w = hand.average([hand.fit(w, i, penalty=(0.7, w)) for i in range(len(SIZES))])
    assert_params(run.server["w"], w)


def test_ditto():
    run, hand = played("ditto", lam=0.4, personal_epochs=3)
    w, v = hand.initial, [hand.initial] * len(SIZES)
    for _ in range(ROUNDS):
        v = [hand.fit(v[i], i, epochs=3, penalty=(0.4, w)) for i in range(len(SIZES))]
        w = hand.average([hand.fit(w, i) for i in range(len(SIZES))])
    assert_params(run.server["w"], w)
    for i in range(len(SIZES)):
        assert_params(client(run, "v", i), v[i])


def test_fedper():
    run, hand = played("fedper")
    states = [hand.initial] * len(SIZES)
    for _ in range(ROUNDS):
        trained = [hand.fit(s, i) for i, s in enumerate(states)]
        body = hand.average(trained)
        states = [{k: s[k] if k.startswith("head.") else body[k] for k in s} for s in trained]
    assert_params(run.server["phi"], {k: v for k, v in body.items() if not k.startswith("head.")})
    for i, state in enumerate(states):
        assert_params(client(run, "h", i), {k: v for k, v in state.items() if k.startswith("head.")})


@pytest.mark.parametrize("average", ["samples", "clients"])
def test_fedrep(average):
    run, hand = played("fedrep", head_epochs=3, body_epochs=2, average=average)
    weights = hand.weights if average == "samples" else torch.full((len(SIZES),), 1 / len(SIZES), dtype=torch.float64)
    states = [hand.initial] * len(SIZES)
    for _ in range(ROUNDS):
        trained = []
        for i, state in enumerate(states):
            state = hand.fit(state, i, epochs=3, names="head.")
            trained.append(hand.fit(state, i, epochs=2, names="first."))
        body = hand.average(trained, weights)
        states = [{k: s[k] if k.startswith("head.") else body[k] for k in s} for s in trained]
    assert_params(run.server["phi"], {k: v for k, v in body.items() if not k.startswith("head.")})
    for i, state in enumerate(states):
        assert_params(client(run, "h", i), {k: v for k, v in state.items() if k.startswith("head.")})


def test_scaffold():
    run, hand = played("scaffold", eta_g=0.8)
    n = len(SIZES)
    w = hand.initial
    zero = {k: torch.zeros_like(v) for k, v in w.items()}
    c, own = copy.deepcopy(zero), [copy.deepcopy(zero) for _ in range(n)]
    for _ in range(ROUNDS):
        delta, change = copy.deepcopy(zero), copy.deepcopy(zero)
        for i in range(n):
            y = hand.fit(w, i, shift={k: c[k] - own[i][k] for k in w})
            new = {k: own[i][k] - c[k] + (w[k] - y[k]) / (EPOCHS * LR) for k in w}
            for k in w:
                delta[k] += (y[k] - w[k]) / n
                change[k] += (new[k] - own[i][k]) / n
            own[i] = new
        w = {k: w[k] + 0.8 * delta[k] for k in w}
        c = {k: c[k] + change[k] for k in c}
    assert_params(run.server["w"], w)
    assert_params(run.server["c"], c)
    for i in range(n):
        assert_params(client(run, "c", i), own[i])


def test_fedavg_ft_is_scored_after_fine_tuning_a_copy():
    run, hand = played("fedavg-ft", ft_epochs=4)
    before = {k: v.clone() for k, v in run.server["w"].items()}
    scores, _ = run.evaluate()
    data = run.task.data
    for i in range(len(SIZES)):
        tuned = hand.model(hand.fit(run.server["w"], i, epochs=4))
        rows = data.splits["test"][i]
        logits = tuned(data.x[rows]).detach()
        loss = F.cross_entropy(logits, data.y[rows], reduction="sum")
        right = (logits.argmax(1) == data.y[rows]).sum()
        assert scores["pre"]["test"][i].tolist() == pytest.approx([float(right), float(loss), len(rows)])
    assert_params(run.server["w"], before)
