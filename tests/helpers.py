"""What the tests share: small federations with clients of very different sizes, and the comparison of two runs."""

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from fedloom.core.algorithm import ALGORITHMS, Algorithm
from fedloom.core.federation import Federation, Ragged
from fedloom.core.task import Task
from fedloom.core.tree import tree_flatten
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.planning.plan import Plan
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network


def make_federation(sizes, classes=4, dim=6, seed=0, held_out=3, server=0, dtype=torch.float64) -> Federation:
    """Clients with the given numbers of training samples, and a few for validation and test each."""
    draw = np.random.default_rng(seed)
    lists = {"train": [], "val": [], "test": []}
    start = 0
    for i, n in enumerate(sizes):
        for split, count in (("train", n), ("val", i % held_out), ("test", 1 + i % held_out)):
            lists[split].append(np.arange(start, start + count))
            start += count
    total = start + server
    centres = draw.normal(size=(classes, dim))
    y = draw.integers(0, classes, total)
    x = centres[y] + 0.7 * draw.normal(size=(total, dim))
    return Federation(
        torch.tensor(x, dtype=dtype),
        torch.tensor(y),
        classes,
        {name: Ragged.of(rows) for name, rows in lists.items()},
        server=torch.arange(start, total) if server else None,
        dtype=dtype,
    )


class SmallNet(nn.Module):
    """BatchNorm and dropout on the way to a named head."""

    def __init__(self, dim=6, width=8, classes=4, norm=False, dropout=0.0) -> None:
        super().__init__()
        self.first = nn.Linear(dim, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.norm(self.first(x)))))


def make_task(
    sizes, *, norm=False, dropout=0.0, federation=None, device="cpu", dtype=torch.float64, **settings
) -> Task:
    data = (federation or make_federation(sizes, **settings.pop("data", {}))).to(torch.device(device), dtype)
    dim, classes = data.x.shape[1], data.classes
    network = Network(lambda: SmallNet(dim, 8, classes, norm, dropout), "head", data.x[:2], dtype)
    return Task(data, network, **{"lr": 0.1, "batch_size": 10, "rounds": 3, **settings})


class TokenNet(nn.Module):
    """Next-token logits at every position."""

    def __init__(self, words):
        super().__init__()
        self.words = nn.Embedding(words, 6)
        self.head = nn.Linear(6, words)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)))


def token_task(words=5, length=4, **settings) -> Task:
    """Three clients with sequences, each of its own length, and a label at every position."""
    draw = np.random.default_rng(2)
    sizes = (7, 1, 12)
    total = sum(sizes) + 3
    x, y = (torch.from_numpy(draw.integers(0, words, (total, length))) for _ in range(2))
    ends = torch.from_numpy(draw.integers(1, length + 1, total))
    y = torch.where(torch.arange(length) < ends[:, None], y, -1)
    starts = np.cumsum([0, *sizes])
    train = Ragged.of([np.arange(a, b) for a, b in pairwise(starts)])
    rest = Ragged.of([np.array([sum(sizes) + i]) for i in range(3)])
    data = Federation(x, y, words, {"train": train, "val": rest, "test": rest}, dtype=torch.float64)
    network = Network(lambda: TokenNet(words), "head", x[:2], torch.float64)
    return Task(data, network, **{"lr": 0.1, "batch_size": 5, **settings})


def model_task(
    name,
    shape,
    *,
    classes=3,
    vocab=None,
    sizes=(5, 1, 9, 12),
    options=None,
    device="cpu",
    dtype=torch.float64,
    half=False,
    signal=0.0,
    **settings,
) -> Task:
    """A task for a model of the zoo. Samples are random numbers, with so much of a pattern of their class, or tokens
    where there is a vocabulary; with `classes=None`, every token's label is a token, and some are padding."""
    draw = np.random.default_rng(3)
    x = draw.normal(size=(40, *shape)) if vocab is None else draw.integers(0, vocab, (40, *shape))
    y = draw.integers(0, classes, 40) if classes else draw.integers(-1, vocab, x.shape)
    x = x + signal * draw.normal(size=(classes, *shape))[y] if signal else x
    splits, start = {"train": [], "val": [], "test": []}, 0
    for n in sizes:
        splits["train"].append(np.arange(start, start + n))
        start += n
    for i in range(len(sizes)):
        splits["val"].append(np.arange(start, start + i % 2))
        splits["test"].append(np.arange(start + 1, start + 2 + i))
        start += 2 + i % 2
    lists = {split: Ragged.of([rows % 40 for rows in each]) for split, each in splits.items()}
    data = Federation(torch.tensor(x), torch.tensor(y), classes or vocab, lists, vocab=vocab)
    data = data.to(torch.device(device), dtype)
    model = MODELS[name](**(options or {}))
    network = Network(lambda: model.build(shape, data.classes, vocab), "head", data.x[:2], dtype, half)
    return Task(data, network, **{"lr": 0.05, "batch_size": 4, "rounds": 2, **settings})


RAGGED = (1, 60, 13, 2, 27, 10, 11, 41, 1, 20, 5, 33)  # one to sixty samples, around multiples of the batch size


def methods() -> list[str]:
    return [name for name in ALGORITHMS.names() if ALGORITHMS[name].__module__.startswith("fedloom.")]


def method(name: str, **settings) -> Algorithm:
    return ALGORITHMS[name](**settings)


class SingleRun:
    """A run with its execution plan, as tests use it: everything of its driver, clients and executor in one place."""

    def __init__(self, alg, task, seed, engine="vectorized", plan="auto", **options):
        self.simulation = Simulation(alg, task, seed, **options)
        self.group = RunGroup([self.simulation], REFERENCE if engine == "reference" else plan)
        self.alg, self.task, self.seed = alg, self.simulation.task, seed
        self.driver, self.clients = self.simulation.driver, self.simulation.clients

    def advance(self, evaluate=True, cohort=None):
        return self.group.advance(evaluate, cohort=cohort)[0]

    def evaluate(self):
        """Scores by view and split, and the global model's on the server's samples."""
        found = self.group.evaluate()[0]
        return found.scores, found.server

    def cohort(self, ids, t):
        """What the executor gets when these clients train in round t."""
        return self.clients.cohort(self.driver._request("train", ids, t, self.driver.server))

    def first_cohort(self):
        return self.simulation.first_cohort()

    def sample(self, t):
        return self.driver.sample(t)

    def state(self):
        return self.simulation.state()

    def restore(self, saved):
        self.simulation.restore(saved)

    @property
    def executor(self):
        return self.group.executors[0]

    plan = property(lambda self: self.group.plan())
    constants = property(lambda self: self.clients.initial.constants)
    store = property(lambda self: self.simulation.store)
    key = property(lambda self: self.driver.key)
    stats = property(lambda self: self.driver.stats)
    post = property(lambda self: self.driver.post)
    t = property(lambda self: self.driver.t, lambda self, t: setattr(self.driver, "t", t))
    server = property(lambda self: self.driver.server, lambda self, value: setattr(self.driver, "server", value))


ALONE = Plan("per-client")


def play(alg, task, plan, rounds=3, seed=7):
    run = SingleRun(alg, task, seed, plan=plan)
    records = [run.advance() for _ in range(rounds)]
    return run, records


def assert_same(alg, task, plan, tolerance, rounds=3, reference=None):
    """State of server and clients, and the scores of all views in all rounds. `reference` is what `play` gave one by
    one, for those who compare it with several plans."""
    expected, expected_records = reference or play(alg, task, ALONE, rounds)
    found, found_records = play(alg, task, plan, rounds)
    for name, a, b in (
        ("server", expected.server, found.server),
        ("clients", expected.store.everyone(), found.store.everyone()),
    ):
        flat_a, spec_a = tree_flatten(a)
        flat_b, spec_b = tree_flatten(b)
        assert spec_a == spec_b
        for x, y in zip(flat_a, flat_b, strict=True):
            assert torch.isfinite(x).all(), name
            assert torch.isfinite(y).all(), name
            torch.testing.assert_close(y, x, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for a, b in zip(expected_records, found_records, strict=True):
        assert a.scores.keys() == b.scores.keys()
        for view in a.scores:
            for split in a.scores[view]:
                close = max(tolerance, 1e-6)
                np.testing.assert_allclose(b.scores[view][split], a.scores[view][split], rtol=close, atol=close)
    return expected


def plan_id(plan):
    return f"{plan.replay}-{plan.chunk}"
