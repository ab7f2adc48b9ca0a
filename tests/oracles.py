"""Second implementations in plain PyTorch, models with a prescribed gradient, and the assertions that tests of methods
share.

A second implementation takes from FedLoom the data, the settings and the seed of the initial model, and computes
everything else itself. Batches hold all samples of a client (`helpers.full_batch_task`), so an epoch is one step and
the order of samples does not matter; epochs, momentum, weight decay, unequal sizes, rounds and who keeps what do.
"""

import copy
import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import PER_CLIENT, SingleRun, SmallNet, full_batch_task, method
from torch import nn
from torch.func import functional_call

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.algorithm import Phase
from fedloom.core.keys import root
from fedloom.core.task import Task
from fedloom.core.tree import leaves, tree_map, uniform_mean
from fedloom.engine import batching

# -- assertions -------------------------------------------------------------------------------------------------------


def assert_near(found, expected, tolerance=1e-12):
    """Two trees have the same structure, and their tensors are equal up to a relative or absolute tolerance."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_equal(found, expected):
    """Two trees have the same structure and the same values to the bit."""
    assert_near(found, expected, 0)


def is_near(a, b, tolerance=1e-12):
    """Are the tensors of two trees equal up to a tolerance, one after another?"""
    flat_a, flat_b = leaves(a), leaves(b)
    return len(flat_a) == len(flat_b) and all(
        torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(flat_a, flat_b, strict=True)
    )


def is_equal(a, b):
    """Are the tensors of two trees equal to the bit?"""
    return is_near(a, b, 0)


def assert_finite(run):
    """Neither the server's state nor a client's has a value that is infinite or no number."""
    assert all(torch.isfinite(v).all() for v in leaves((run.server, run.store.everyone())))


def assert_same_scores(records, expected, views=("pre", "post", "global"), tolerance=1e-9):
    """Two runs score the same on the test samples: in every round, these views, every client."""
    for a, b in zip(records, expected, strict=True):
        for view in views:
            np.testing.assert_allclose(a.scores[view]["test"], b.scores[view]["test"], rtol=tolerance)


# -- one step, computed by hand ---------------------------------------------------------------------------------------


class FormulaTask(Task):
    """A model whose parameters are numbers, and whose gradient is a formula of them, the same for every batch."""

    def grad(self, slot, batch, only=None, loss=None):
        return self.formula(slot.params), slot


def formula_task(formula, lr, clients=1, **settings):
    data = SimpleNamespace(dtype=torch.float64, clients=clients)
    task = FormulaTask(data, SimpleNamespace(buffers={}), lr=lr, **settings)
    object.__setattr__(task, "formula", formula)
    return task


def numbers(**values):
    """Parameters that are numbers."""
    return {k: torch.tensor(float(v), dtype=torch.float64) for k, v in values.items()}


def constant_gradient(value):
    """The formula of a gradient that is the same everywhere, for a model with one parameter `p`."""
    return lambda params: numbers(p=value)


def stack(*uploads):
    """Uploads of several clients as the server receives them."""
    return tree_map(lambda *rows: torch.stack(rows), *uploads)


# -- state dictionaries -----------------------------------------------------------------------------------------------


def plus(a, b, factor=1.0):
    """a + factor * b; what b lacks stays as it is in a."""
    return {k: v + factor * b[k] if k in b else v for k, v in a.items()}


def part(state, prefix):
    """The entries whose names begin so."""
    return {k: v for k, v in state.items() if k.startswith(prefix)}


def flat(state):
    """All values as one vector."""
    return torch.cat([v.flatten() for v in state.values()])


def average(states, weights):
    """The weighted mean of state dictionaries."""
    return {k: sum(w * s[k] for w, s in zip(weights, states, strict=True)) / sum(weights) for k in states[0]}


def net_of(state, norm=False):
    """SmallNet with these values; what is missing (running statistics) has its initial value."""
    net = SmallNet(norm=norm).double()
    net.load_state_dict({**net.state_dict(), **state})
    return net


def gradient(state, samples):
    """The gradient of the mean cross-entropy on samples (x, y)."""
    x, y = samples
    net = net_of(state)
    found = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    return dict(zip([k for k, _ in net.named_parameters()], found, strict=True))


def score(state, samples):
    """Correct predictions, summed loss and number of samples, as a run records them."""
    x, y = samples
    logits = net_of(state)(x).detach()
    return [float((logits.argmax(1) == y).sum()), float(F.cross_entropy(logits, y, reduction="sum")), len(y)]


def measure(state, samples):
    """Accuracy and mean loss."""
    correct, loss, n = score(state, samples)
    return correct / n, loss / n


def assert_scores(found, states, samples):
    """Recorded scores, a row per client, are those of these models on these samples, one of each per client."""
    for i, state in enumerate(states):
        assert found[i].tolist() == pytest.approx(score(state, samples[i]), rel=1e-9), i


def client_samples(task, split):
    """(x, y) of every client."""
    rows = [task.data.splits[split][i] for i in range(task.clients)]
    return [(task.data.x[r], task.data.y[r]) for r in rows]


def proximal(strength, anchor):
    """The penalty strength / 2 * ||parameters - anchor||^2."""
    return lambda params: strength / 2 * sum(((p - anchor[k]) ** 2).sum() for k, p in params.items())


def linear(coefficients):
    """The penalty <coefficients, parameters>, whose gradient are the coefficients."""
    return lambda params: sum((p * coefficients[k]).sum() for k, p in params.items())


class PlainTraining:
    """Clients in plain PyTorch, for SmallNet without normalisation: samples, sizes, the initial model, and training
    with torch.optim.SGD and the task's settings."""

    def __init__(self, task, seed):
        self.task = task
        self.train, self.test = client_samples(task, "train"), client_samples(task, "test")
        self.sizes = [len(y) for _, y in self.train]
        self.clients = range(len(self.sizes))
        torch.manual_seed(root(seed, "init") & ((1 << 63) - 1))
        self.initial = SmallNet().double().state_dict()

    def fit(self, state, samples, *, epochs=None, lr=None, only="", clip=None, loss_at=None, penalty=None):
        """The state after so many steps on samples (x, y), of the parameters whose names begin with `only`.

        `loss_at` makes of the parameters those that the loss is taken at; `penalty`, a function of the parameters, is
        added to the loss.
        """
        (x, y), task = samples, self.task
        params = {k: v.clone().requires_grad_(k.startswith(only)) for k, v in state.items()}
        trained = [p for p in params.values() if p.requires_grad]
        optimizer = torch.optim.SGD(
            trained, lr=task.lr if lr is None else lr, momentum=task.momentum, weight_decay=task.weight_decay
        )
        for _ in range(task.epochs if epochs is None else epochs):
            optimizer.zero_grad()
            logits = functional_call(SmallNet().double(), params if loss_at is None else loss_at(params), (x,))
            loss = F.cross_entropy(logits, y)
            if penalty is not None:
                loss = loss + penalty(params)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(trained, clip)
            optimizer.step()
        return {k: v.detach() for k, v in params.items()}


def full_batch_run(alg, sizes=(3, 17, 8, 11), plan=PER_CLIENT, **settings):
    """A run with full batches before its first round, and plain training of the same clients from the same model."""
    defaults = {"lr": 0.3, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01, "rounds": 6}
    run = SingleRun(alg, full_batch_task(sizes, **{**defaults, **settings}), 5, plan=plan)
    return run, PlainTraining(run.task, run.seed)


def batches(task, i, t, epochs, seed=3):
    """The samples that client i sees in round t, batch by batch, in the order that the engine draws."""
    table = batching.build(task, Phase(lambda *a: None), seed, np.array([i]), t, np.array([epochs]))
    return [(batch.x, batch.y) for batch in table.batches(task, 0)]


# -- modules ----------------------------------------------------------------------------------------------------------


def features(net, x):
    """What SmallNet's head receives."""
    return torch.tanh(net.norm(net.first(x)))


def values(module):
    """Copies of a module's parameters by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def put(module, params):
    """The module with these parameters; its running statistics stay."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(params[name])
    return module


def dense_layers(params):
    """The layers fc1, fc2, ... of a small network as modules, with ReLU between them."""
    modules = []
    for j in range(1, 1 + sum(name.endswith("weight") for name in params)):
        weight, bias = params[f"fc{j}.weight"], params[f"fc{j}.bias"]
        layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
        layer.load_state_dict({"weight": weight, "bias": bias})
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def dense_values(network):
    """The parameters of `dense_layers` under the names that they have in FedLoom."""
    return {f"fc{1 + j // 2}.{'bias' if j % 2 else 'weight'}": p.detach() for j, p in enumerate(network.parameters())}


def assert_modules(stacked, modules, prefix=""):
    """Stacked values by name are those of the clients' modules."""
    for i, module in enumerate(modules):
        state = {f"{prefix}{name}": v for name, v in module.state_dict().items()}
        for name, value in stacked.items():
            torch.testing.assert_close(value[i], state[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


class PlainFedAvg:
    """FedAvg with a module and an optimiser per client, also with BatchNorm and clipping.

    Second implementations of other methods derive from it. `client` trains one client and returns what it uploads,
    `merge` is the server; `pre`, `post` and `global_logits` are the logits of the three models that are scored, and
    `check` compares the state that a run keeps.
    """

    COHORTS = ((0, 1, 3), (1, 2), (0, 1, 2, 3), (1, 3))  # client 2 comes later, and all but client 1 miss rounds
    LR, MOMENTUM, DECAY, EPOCHS, SEED = 0.1, 0.5, 0.01, 2, 5

    equal_weights = False  # clients count equally, whatever their sizes

    def __init__(self, net, train, server, clip, settings):
        self.train_data, self.clip, self.settings = train, clip, settings
        self.start = copy.deepcopy(net)
        self.w = values(net)
        self.nets = [copy.deepcopy(net) for _ in train]  # their parameters are replaced, their statistics stay
        self.trained = [None] * len(train)  # PM_post
        self.prepare(server)

    def prepare(self, server):
        pass

    def optimizer(self, *modules):
        params = [p for m in modules for p in m.parameters()]
        return torch.optim.SGD(params, self.LR, self.MOMENTUM, weight_decay=self.DECAY)

    def minimise(self, optimizers, loss):
        for _ in range(self.EPOCHS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss().backward()
            for optimizer in optimizers:
                if self.clip is not None:
                    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], self.clip)
                optimizer.step()

    def round(self, t, cohort):
        sent = [self.client(t, i) for i in cohort]
        sizes = [1 if self.equal_weights else len(self.train_data[i][1]) for i in cohort]
        self.merge([n / sum(sizes) for n in sizes], sent)

    def client(self, t, i):
        raise NotImplementedError

    def merge(self, weights, sent):
        self.w = average(sent, weights)

    def global_logits(self, i, x):
        return put(self.nets[i].eval(), self.w)(x)


def assert_like_plain(plain_class, name, settings, norm, clip):
    """Four rounds of a method against its second implementation: server, clients, and what all views score."""
    sizes = (3 if norm else 1, 17, 8, 11)
    cls = plain_class
    task = full_batch_task(
        sizes, norm=norm, lr=cls.LR, momentum=cls.MOMENTUM, weight_decay=cls.DECAY, clip=clip, epochs=cls.EPOCHS,
        rounds=len(cls.COHORTS), participation=0.5,
    )  # fmt: skip
    run = SingleRun(method(name, **settings), task, cls.SEED, plan=PER_CLIENT)
    net = put(SmallNet(norm=norm).double(), task.init(run.key))
    plain = cls(net, client_samples(task, "train"), run.server, clip, settings)
    for t, cohort in enumerate(cls.COHORTS):
        plain.round(t, cohort)
        scores = run.advance(cohort=np.array(cohort)).scores
    if "w" in run.server:
        for key, value in run.server["w"].items():
            torch.testing.assert_close(value, plain.w[key], rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")
    plain.check(run)
    views = {"pre": plain.pre, "post": plain.post, "global": plain.global_logits}
    assert set(scores) == {view for view, found in views.items() if found is not None}
    for view in scores:
        for i, (x, y) in enumerate(client_samples(task, "test")):
            with torch.no_grad():
                logits = views[view](i, x)
            expected = [(logits.argmax(1) == y).sum(), F.cross_entropy(logits, y, reduction="sum"), len(y)]
            assert scores[view]["test"][i].tolist() == pytest.approx(list(map(float, expected)), rel=1e-9), (view, i)


# the networks and settings that `assert_like_plain` is called with
with_networks = pytest.mark.parametrize(
    ("norm", "clip"), [(False, None), (True, None), (False, 0.2)], ids=["plain", "batchnorm", "clipped"]
)


# -- methods to compare with ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UniformFedAvg(FedAvg):
    """FedAvg with equal weights."""

    def aggregate(self, task, server, up, info, t, key):
        return {"w": uniform_mean(up["w"])}


def first_part(stream, share=0.8):
    """Selects the first part of a client's samples, permuted by a random stream of this name; one sample at least."""

    def select(n, draw):
        order = np.random.default_rng([draw.seed, zlib.crc32(stream.encode()), draw.i]).permutation(n)
        return order[: max(1, int(share * n + 1e-9))]

    return select


# settings of model and local training, none of them at its default
EVERY_SETTING = {"norm": True, "dropout": 0.3, "momentum": 0.9, "lr": 0.02, "clip": 1.0, "weight_decay": 0.01}
LEARNING_AGENTS = {"t_warm": 1, "replay_batch": 2, "ep_max": 4}  # agents that learn and act from the third round on
