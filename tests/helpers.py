"""What the tests share: small federations with clients of very different sizes, runs, comparisons of two runs, and
calls of the command line."""

import os
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom.cli import console
from fedloom.cli import main as cli
from fedloom.core.algorithm import ALGORITHMS, Algorithm, Batch, Info
from fedloom.core.federation import Federation, Ragged
from fedloom.core.kinds import Kind
from fedloom.core.targets import Labels, Number
from fedloom.core.task import Task
from fedloom.core.tree import leaves, take, tree_flatten
from fedloom.engine.plan import Plan
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network
from fedloom.storage.manifest import Manifest


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


def relabelled_federation(sizes, labels, classes=4, **rest) -> Federation:
    """A federation whose client i has the training labels labels[i]."""
    data = make_federation(sizes, classes=classes, **rest)
    y = data.y % classes
    for i, values in enumerate(labels):
        y[data.splits["train"][i]] = torch.as_tensor(values)
    return Federation(data.x, y, classes, data.splits, dtype=data.dtype)


def with_targets(data: Federation, kind: Kind) -> Federation:
    """The federation with other targets: two labels, or a number with mean 3 and standard deviation 2."""
    if kind == "classes":
        return data
    draw = torch.Generator().manual_seed(5)
    value = data.x[:, 0] + 0.5 * data.x[:, 1] + 0.1 * torch.randn(len(data.x), generator=draw, dtype=data.dtype)
    if kind == "labels":
        y = torch.stack([value > 0.3, data.x[:, 2] > 0], 1).to(data.dtype)
        return replace(data, y=y, classes=2, targets=Labels())
    return replace(data, y=(value - value.mean()) / value.std(), classes=1, targets=Number(3.0, 2.0))


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
    """SmallNet on the given federation, or on one with clients of these sizes (`data` are its further settings)."""
    data = (federation or make_federation(sizes, **settings.pop("data", {}))).to(torch.device(device), dtype)
    dim, classes = data.x.shape[1], data.classes
    network = Network(lambda: SmallNet(dim, 8, classes, norm, dropout), "head", data.x[:2], dtype)
    return Task(data, network, **{"lr": 0.1, "batch_size": 10, "rounds": 3, **settings})


def full_batch_task(sizes, **settings) -> Task:
    """A task whose batches are as large as the largest client: an epoch is one step, and the order of samples does not
    matter."""
    return make_task(sizes, **{"batch_size": max(sizes), **settings})


def logreg_task(sizes=(4, 4), dim=2, classes=2, **settings) -> Task:
    """Logistic regression: nothing but a head, which starts at zero, and the features are the inputs."""
    data = make_federation(sizes, classes=classes, dim=dim)
    network = Network(lambda: MODELS["logreg"]().build((dim,), classes), "head", data.x[:2], data.dtype)
    return Task(data, network, **{"lr": 0.1, "rounds": 3, **settings})


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
    """A task for a model of the zoo. Samples are random numbers plus `signal` times a pattern of their class, or tokens
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


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_batch(x, y, mask=None, k=0, key=0) -> Batch:
    """A batch as a step receives it; mask is 1 for a sample and 0 for padding."""
    x = x if x is None or isinstance(x, torch.Tensor) else tensor(x)
    y = torch.as_tensor(y)
    mask = torch.ones(len(y), dtype=torch.float64) if mask is None else tensor(mask)
    return Batch(x, y, mask, torch.tensor(k), torch.tensor(0), torch.tensor(True), torch.tensor(key))


def client_info(counts=(1,), first=True) -> Info:
    """What client 0 knows in round 0; `counts` are its training samples of each class."""
    counts = torch.tensor(counts)
    return Info(torch.tensor(0), counts.sum(), counts, torch.tensor(0), torch.tensor(first), torch.tensor(0))


def methods() -> list[str]:
    """Names of all methods that come with FedLoom."""
    return [name for name in ALGORITHMS.names() if ALGORITHMS[name].__module__.startswith("fedloom.")]


QUICK = {"pfedkt": {"hn_steps": 3}}  # settings with which a method computes less, and does the same


def method(name: str, **settings) -> Algorithm:
    return ALGORITHMS[name](**{**QUICK.get(name, {}), **settings})


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
    stores = property(lambda self: self.simulation.stores)
    key = property(lambda self: self.driver.key)
    stats = property(lambda self: self.driver.stats)
    post = property(lambda self: self.driver.post)
    t = property(lambda self: self.driver.t, lambda self, t: setattr(self.driver, "t", t))
    server = property(lambda self: self.driver.server, lambda self, value: setattr(self.driver, "server", value))


def client_state(run, name=None, i=None):
    """The private state of all clients, stacked: all of it or one entry of it, and of one client if `i` is given."""
    state = run.store.everyone()["own"]
    state = state if name is None else state[name]
    return state if i is None else take(state, i)


def running_statistics(run, slot=None, i=None):
    """The running statistics that clients keep, stacked: of all slots or of one, and of one client if `i` is given."""
    stats = run.store.everyone()["stats"]
    stats = stats if slot is None else stats.get(slot, {})
    return stats if i is None else take(stats, i)


PER_CLIENT = Plan("per-client")
EAGER = Plan("stacked", "eager", chunk=len(RAGGED))  # all clients of RAGGED at once, nothing traced


def run_rounds(alg, task, rounds=3, *, seed=3, plan=EAGER, evaluate=False, cohorts=None, after_round=None):
    """A run after some rounds, and their records. `cohorts` are the ids of the clients that take part in each round;
    `after_round(run)` is called after each."""
    run, records = SingleRun(alg, task, seed, plan=plan), []
    for cohort in [None] * rounds if cohorts is None else cohorts:
        records.append(run.advance(evaluate, None if cohort is None else np.array(cohort)))
        if after_round is not None:
            after_round(run)
    return run, records


def run_and_evaluate(alg, task, plan, rounds=3, seed=7):
    """A run that is evaluated in every round, and its records."""
    return run_rounds(alg, task, rounds, seed=seed, plan=plan, evaluate=True)


def assert_same(alg, task, plan, tolerance, rounds=3, reference=None):
    """A run with this plan has the state of server and clients, and in all rounds the scores of all views, of a run
    client by client, which is returned. `reference` is that run and its records, if they exist already."""
    expected, expected_records = reference or run_and_evaluate(alg, task, PER_CLIENT, rounds)
    found, found_records = run_and_evaluate(alg, task, plan, rounds)
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


def state_bytes(run) -> list[bytes]:
    """The state of server and clients, to compare two runs to the bit."""
    return [v.numpy().tobytes() for v in leaves((run.server, run.store.everyone()))]


class Crash(Exception):
    """Ends a run as an error in the middle of it would."""


def crash_after(rounds):
    """A callback `on_round` that raises `Crash` after some rounds."""

    def on_round(done, total, row):
        if done == rounds:
            raise Crash

    return on_round


class Seen(fedloom.Callback):
    """Remembers what it is called for: name of the event, of the run, its seed, its round."""

    def __init__(self):
        self.events = []
        for event in ("on_setup", "on_start", "on_round", "on_evaluation", "on_end"):
            setattr(self, event, lambda run, *_, e=event: self.events.append((e, run.name, run.seed, run.round)))

    def of(self, event):
        return [rest for name, *rest in self.events if name == event]


class CrashAt(fedloom.Callback):
    """Raises an error after so many rounds of the runs of a method."""

    def __init__(self, name, rounds, error=Crash):
        self.name, self.rounds, self.error = name, rounds, error

    def on_round(self, run):
        if (run.name, run.round) == (self.name, self.rounds):
            raise self.error


def make_unfinished(folder):
    """Take the summary out of a run directory, as if the run had stopped before it was written."""
    manifest = Manifest(folder)
    manifest.load()
    del manifest.files["summary.json"]
    (folder / "summary.json").unlink()
    manifest.save()


def as_format_4(store):
    """Turns the folder of a store on disk into one of format 4: rows in the order of ids, checksums in a file."""
    known = np.load(store / "clients.npy")
    at = np.flatnonzero(known[:, 0])
    ids = known[at, 0] - 1
    (store / "clients.npy").unlink()
    for path in store.glob("*.npy"):
        rows = np.load(path)
        old = np.zeros_like(rows)
        old[ids] = rows[at]
        np.save(path, old)
    checksums = np.zeros(len(known), np.int64)
    checksums[ids] = known[at, 2]
    np.save(store / "checksums.npy", checksums)
    trained = np.zeros(len(known), np.int64)
    trained[ids] = known[at, 1]
    return trained


def run_cli(monkeypatch, capsys, *args):
    """Runs `fedloom ARGS` in this process, with a terminal of COLUMNS characters, or of 80: exit code, standard output,
    standard error."""
    monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, args)])
    for one in (console.out, console.err):
        monkeypatch.setattr(one, "_width", int(os.environ.get("COLUMNS", "80")))
        monkeypatch.setattr(one, "_height", 25)  # with both, whatever terminal there is does not matter
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    return stop.value.code, printed.out, printed.err
