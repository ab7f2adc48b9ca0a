"""Tests a method as FedLoom's own methods are tested, on small clients of very different sizes."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.local import Local
from fedloom.core.algorithm import Algorithm
from fedloom.core.authors import describe_failure
from fedloom.core.errors import UserError, plural
from fedloom.core.federation import Federation, Ragged
from fedloom.core.task import Task
from fedloom.core.tree import Tree, leaves, take, tree_flatten, tree_map
from fedloom.engine.contract_check import check_contract
from fedloom.engine.driver import Round
from fedloom.engine.plan import Plan
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.nn.network import Network
from fedloom.studies.build import check

SIZES = (1, 23, 9, 2, 14, 5)  # training samples of the clients
LARGE = 10  # of the smallest client, for a method that needs more: two batches
CLASSES, DIM, SERVER = 3, 5, 12
ROUNDS = 3
TOLERANCE = 1e-8  # relative and absolute, in float64
LEARNING_ROUNDS = 8


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool | None  # None: not carried out, because an earlier check failed
    sentence: str


@dataclass(frozen=True)
class Verdict:
    """What all checks of a method found."""

    method: str
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """True if the method passes all checks."""
        return all(finding.ok for finding in self.findings)

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        count = len(self.findings)
        if self.ok:
            return f"{self.method} passes all {count} checks."
        failed, left = (sum(finding.ok is ok for finding in self.findings) for ok in (False, None))
        return f"{failed} of {plural(count, 'check')} failed" + (f", {left} were not carried out." if left else ".")

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {"ok": self.ok, "verdict": self.sentence, **dataclasses.asdict(self)}


class Failed(Exception):
    """A check failed; the message is one sentence."""


def check_method(alg: Algorithm) -> Verdict:
    """Carry out all checks of a method."""
    checks = MethodCheck(alg)
    findings: list[Finding] = []
    with _random_state():
        for name, function in CHECKS.items():
            if findings and not findings[0].ok:
                findings.append(Finding(name, None, "Not carried out."))
                continue
            try:
                findings.append(Finding(name, True, function(checks)))
            except (Failed, UserError) as failure:
                findings.append(Finding(name, False, str(failure)))
            except Exception as error:  # a function of the method may do anything
                where = describe_failure(error, type(alg)) or f"{type(error).__name__}: {error}".splitlines()[0]
                findings.append(Finding(name, False, f"{where}."))
    return Verdict(alg.name, findings)


@contextmanager
def _random_state() -> Iterator[None]:
    """Give back the global random state that a method might change."""
    numpy, python = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield
    np.random.set_state(numpy)  # noqa: NPY002
    random.setstate(python)


class SmallNet(nn.Module):
    """One hidden layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


def small_task(alg: Algorithm, **settings: Any) -> Task:
    """A task with clients of very different sizes, each as large as the method needs at least."""
    settings["participation"] = settings.get("participation", 1.0) if alg.partial else 1.0
    task = _task(SIZES, settings)
    least = alg.min_samples(task)
    task = task if least <= 1 else _task([max(n, least) for n in SIZES], settings)
    try:
        check(alg, task)
    except UserError:  # perhaps clients are too small, in a way that only the method knows
        task = _task([max(n, LARGE) for n in SIZES], settings)
        check(alg, task)
    return task


def _task(sizes: Sequence[int], settings: Mapping[str, Any]) -> Task:
    draw = np.random.default_rng(0)
    lists: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
    start = 0
    for n in sizes:
        for split, count in (("train", n), ("val", 2), ("test", 3)):
            lists[split].append(np.arange(start, start + count))
            start += count
    y = draw.integers(0, CLASSES, start + SERVER)
    x = 2 * draw.normal(size=(CLASSES, DIM))[y] + 0.5 * draw.normal(size=(len(y), DIM))
    data = Federation(
        torch.tensor(x), torch.tensor(y), CLASSES, {name: Ragged.of(rows) for name, rows in lists.items()},
        server=torch.arange(start, len(y)), dtype=torch.float64,
    )  # fmt: skip
    network = Network(SmallNet, "head", data.x[:2], torch.float64)
    return Task(data, network, **{"lr": 0.05, "batch_size": 5, "rounds": ROUNDS, **settings})


class Run:
    """A run of a method on a task."""

    def __init__(self, alg: Algorithm, task: Task, plan: Plan = REFERENCE) -> None:
        self.simulation = Simulation(dataclasses.replace(alg), task, 3, screening=False)
        self.group = RunGroup([self.simulation], plan)
        self.rounds: list[Round] = []

    def advance(self, rounds: int = ROUNDS, evaluate: bool = True) -> Run:
        self.rounds += [self.group.advance(evaluate)[0] for _ in range(rounds)]
        return self

    @property
    def state(self) -> Tree:
        """Server and clients."""
        return {"server": self.simulation.server, "clients": self.simulation.store.everyone()["own"]}

    def scores(self) -> dict[str, np.ndarray]:
        """Scores of the last round by view, with all splits one below the other."""
        return {view: np.concatenate(list(of.values())) for view, of in self.rounds[-1].scores.items()}


def difference(a: Tree, b: Tree) -> float:
    """The largest difference between the values of two trees, relative to those above 1; NaN equals NaN."""
    most = 0.0
    for x, y in zip(leaves(a), leaves(b), strict=True):
        x, y = x.double(), y.double()
        if x.numel():
            gap = (x - y).abs() / torch.maximum(x.abs(), torch.ones_like(x))
            gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, gap).nan_to_num(nan=torch.inf)
            most = max(most, float(gap.max()))
    return most


def same_bits(a: Tree, b: Tree) -> bool:
    """True if two trees have the same structure and the same bits."""
    if tree_flatten(a)[1] != tree_flatten(b)[1]:
        return False
    return all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in zip(leaves(a), leaves(b), strict=True))


class MethodCheck:
    """The checks of a method. Each returns a sentence, or raises `Failed` with one."""

    def __init__(self, alg: Algorithm) -> None:
        self.alg = alg

    @cached_property
    def task(self) -> Task:
        return small_task(self.alg)

    @cached_property
    def some_clients(self) -> Task:
        """With two of three clients in a round, if the method allows it."""
        return small_task(self.alg, participation=0.67, epochs=2)

    @cached_property
    def reference(self) -> Run:
        """One client after another, three rounds."""
        _seed_globally(1)
        return Run(self.alg, self.task).advance()

    def structure(self) -> str:
        check_contract(self.alg, self.task)
        return "The functions return what the contract asks for."

    def stacked(self) -> str:
        plan = Plan("stacked", "eager", chunk=len(SIZES))
        self._equals_reference(plan, self.task, self.reference, "stacked")
        return "Clients of very different sizes give the same results stacked and one by one."

    def chunks(self) -> str:
        task = self.some_clients
        self._equals_reference(Plan("stacked", "eager", chunk=2), task, Run(self.alg, task).advance(), "two by two")
        return "Clients give the same results two by two and one by one."

    def _equals_reference(self, plan: Plan, task: Task, expected: Run, how: str) -> None:
        found = Run(self.alg, task, plan).advance()
        for what in ("server", "clients"):
            gap = difference(found.state[what], expected.state[what])
            if not gap <= TOLERANCE:
                name = "server's state" if what == "server" else "clients' private state"
                raise Failed(
                    f"The {name} of clients trained {how} differs by {gap:.1g} from clients trained one by one."
                )
        mine, theirs = found.scores(), expected.scores()
        for view, scores in theirs.items():
            if not np.allclose(mine[view], scores, rtol=1e-6, atol=1e-6, equal_nan=True):
                raise Failed(f"Models ({view}) of clients trained {how} have other scores than one by one.")

    def order(self) -> str:
        if self.alg.turns:
            return "Not applicable, because the server aggregates after each client in turn."
        request, replies, driver, _ = self._uploads
        last_first = torch.arange(len(request.ids) - 1, -1, -1)
        args = driver.t, driver.key
        ahead = self.alg.aggregate(self.task, driver.server, replies.up, replies.info, *args)
        up, info = take((replies.up, replies.info), last_first)
        back = self.alg.aggregate(self.task, driver.server, up, info, *args)
        if not difference(ahead, back) <= TOLERANCE:
            raise Failed("aggregate gives another server state when the clients come in another order.")
        ids = torch.from_numpy(request.ids)
        shared, parts = self.alg.download(self.task, driver.server, ids[last_first], *args)
        if not difference((request.shared, take(request.parts, last_first)), (shared, parts)) <= TOLERANCE:
            raise Failed("download sends clients something else when they come in another order.")
        return "The order of clients does not matter."

    @cached_property
    def _uploads(self) -> Any:
        """Request and replies of a third round, before it is aggregated; driver; private state of all clients."""
        run = Run(self.alg, self.task).advance(2, evaluate=False)
        driver = run.simulation.driver
        with torch.no_grad():
            request = next(driver.train_round(evaluate=False))
            replies = run.simulation.clients.ask(request, run.group.executors[0])
        return request, replies, driver, run.state["clients"]

    def repeatable(self) -> str:
        first = self.reference
        _seed_globally(2)
        if not same_bits(Run(self.alg, self.task).advance().state, first.state):
            raise Failed(
                "Two runs with one seed differ, so something is random without a key, or is kept outside of the state."
            )
        return "Two runs with one seed are the same to the bit."

    def randomness(self) -> str:
        _seed_globally(3)  # another state than a method that sets it has left behind
        before = _generators()
        Run(self.alg, self.task).advance(1)
        changed = [name for name, state in _generators().items() if state != before[name]]
        if changed:
            raise Failed(
                f"The method uses the global random numbers of {' and '.join(changed)}; use normal or uniform of "
                "fedloom.core.keys with info.key or batch.key."
            )
        return "All random numbers have a key."

    def traffic(self) -> str:
        alg, (request, replies, _, everyone) = self.alg, self._uploads
        kept = take(everyone, torch.from_numpy(request.ids))
        declared = alg.shared not in ("", "nothing", "none")
        up, down = replies.up, {**request.shared, **request.parts}
        if leaves((up, down)) and not declared:
            names = ", ".join(dict.fromkeys(map(str, [*down, *up])))
            raise Failed(f"The method sends {names}, but its class says shared = '{alg.shared}'; say what is sent.")
        for name in up:
            declares = re.search(rf"\b{re.escape(str(name))}(?![A-Za-z0-9])", alg.shared)
            if name in kept and not declares and same_bits(up[name], kept[name]):
                raise Failed(
                    f"finish sends '{name}' of the private state, but the class says shared = '{alg.shared}'; keep it, "
                    "or say that it is sent."
                )
        for name in up:
            if self._unused(name):
                raise Failed(f"finish sends '{name}', but aggregate does not use it, so it need not be sent.")
        size = sum(v.numel() * v.element_size() for v in leaves(up))
        run = Run(alg, self.task).advance(1, evaluate=False)
        one = run.rounds[0]
        if not alg.turns and one.bytes_up != size:
            raise Failed(f"Clients send {one.bytes_up} bytes in the first round and {size} in the third.")
        each = len(one.cohort)
        return f"A client receives {one.bytes_down // each} bytes a round and sends {one.bytes_up // each}."

    def _unused(self, name: str) -> bool:
        """True if the server's new state does not depend on an upload, however it is changed."""
        _, replies, driver, _ = self._uploads
        args = replies.info, driver.t, driver.key
        before = self.alg.aggregate(self.task, driver.server, replies.up, *args)
        draw = torch.Generator().manual_seed(5)

        def other(v: Tensor) -> Tensor:
            if v.is_floating_point():
                return v + torch.randn(v.shape, generator=draw, dtype=v.dtype)
            return ~v if v.dtype == torch.bool else v + 1

        try:
            changed = {**replies.up, name: tree_map(other, replies.up[name])}
            after = self.alg.aggregate(self.task, driver.server, changed, *args)
        except Exception:  # it is used, and may not have any value
            return False
        return same_bits(tree_map(torch.clone, before), tree_map(torch.clone, after))

    def private(self) -> str:
        state = self.reference.state["clients"]
        if not leaves(state):
            return "Clients keep nothing."
        start = Run(self.alg, self.task).state["clients"]
        same = [name for name in state if leaves(state[name]) and same_bits(state[name], start[name])]
        if same:
            raise Failed(f"'{same[0]}' in the private state never changes; finish must return its new value.")
        return f"Clients keep {', '.join(state)}."

    def resume(self) -> str:
        first = Run(self.alg, self.some_clients).advance(2)
        second = Run(self.alg, self.some_clients)
        second.simulation.restore(first.simulation.state())
        straight = Run(self.alg, self.some_clients).advance()
        if not same_bits(second.advance(1).state, straight.state):
            raise Failed("A resumed run gives other results, so something is kept outside of the state.")
        return "A resumed run gives the same bits."

    def distinct(self) -> str:
        mine = self.reference.scores()
        for cls in (FedAvg, Local):
            if type(self.alg) is cls:
                return f"It is {cls.name} itself."
            theirs = Run(cls(), self.task).advance().scores()
            if all(np.allclose(mine[view], theirs[view], rtol=1e-9, atol=1e-9) for view in ("pre", "post")):
                raise Failed(f"After {ROUNDS} rounds, all clients have the models of {cls.name}.")
        return "Its models are neither those of fedavg nor those of local."

    def learns(self) -> str:
        run = Run(self.alg, small_task(self.alg, rounds=LEARNING_ROUNDS, epochs=3))
        start = run.group.evaluate()[0].scores
        end = run.advance(LEARNING_ROUNDS - 1, evaluate=False).advance(1).rounds[-1].scores
        views = [view for view in end if view != "post"]
        losses = [(_test_loss(start[view]), _test_loss(end[view])) for view in views]
        if not any(after < 0.9 * before for before, after in losses):
            before, after = losses[0]
            raise Failed(f"The loss does not fall on an easy problem: {before:.3g} at first, then {after:.3g}.")
        before, after = min(losses, key=lambda pair: pair[1] / pair[0])
        return f"The loss falls on an easy problem, from {before:.2g} to {after:.2g}."

    def finite(self) -> str:
        for what, state in self.reference.state.items():
            for name, values in state.items():
                if not all(torch.isfinite(v).all() for v in leaves(values) if v.is_floating_point()):
                    raise Failed(f"'{name}' of the {what} has NaN or infinite values after {ROUNDS} rounds.")
        return "All values are finite."


def _test_loss(scores: Mapping[str, np.ndarray]) -> float:
    """The mean loss over all test samples."""
    _, loss, samples = scores["test"].T
    return float(loss.sum() / samples.sum())


def _seed_globally(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def _generators() -> dict[str, Any]:
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (numpy[1].tobytes(), *numpy[2:]),
        "Python": random.getstate(),
    }


CHECKS: dict[str, Callable[[MethodCheck], str]] = {
    "structure": MethodCheck.structure,
    "stacked": MethodCheck.stacked,
    "chunks": MethodCheck.chunks,
    "order of clients": MethodCheck.order,
    "repeatable": MethodCheck.repeatable,
    "random numbers": MethodCheck.randomness,
    "traffic": MethodCheck.traffic,
    "private state": MethodCheck.private,
    "resume": MethodCheck.resume,
    "not a baseline": MethodCheck.distinct,
    "learning": MethodCheck.learns,
    "finite values": MethodCheck.finite,
}
