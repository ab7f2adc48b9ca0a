"""Features of the contract between algorithms and the engine, tested by sketches of the methods that need them. Each
sketch must give the same stacked as client by client."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import RAGGED, assert_same, make_task, plan_id, run_and_evaluate

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.algorithm import Phase, Slot
from fedloom.core.autodiff import grad, vmap
from fedloom.core.keys import fold, normal
from fedloom.core.tree import axpy, mean, scale, sub, take, tree_map, where, zeros_like
from fedloom.engine.plan import Plan

PLANS = [Plan("stacked", "eager", chunk=5), Plan("stacked", "traced", chunk=len(RAGGED))]
if torch.cuda.is_available():
    PLANS.append(Plan("stacked", "captured", chunk=5))


@dataclass(frozen=True)
class Plain(FedAvg):
    """FedAvg that keeps the other entries of `work` and of the server state, as the base of the sketches."""

    pre_is_global = False

    def step(self, task, work, batch, down, info):
        return {**work, **super().step(task, work, batch, down, info)}

    def aggregate(self, task, server, up, info, t, key):
        return {**server, **super().aggregate(task, server, up, info, t, key)}


@dataclass(frozen=True)
class Cluster(Plain):
    """HypCluster: all models are sent, a pass without training measures them, `enter` takes the best."""

    def init_server(self, task, key):
        models = [task.init(fold(key, j)) for j in range(3)]
        return {"models": tree_map(lambda *rows: torch.stack(rows), *models)}

    def begin(self, task, down, state, info):
        empty = zeros_like(take(down["models"], 0))
        return {
            "w": task.slot(empty),
            "losses": torch.zeros(3, dtype=task.dtype, device=info.n.device),
            "j": torch.zeros_like(info.n),
        }

    def phases(self, task):
        return [
            Phase(self.measure, train=False, shuffle=False, batch=16),
            Phase(self.step, task.epochs, enter=self.choose),
        ]

    def adapt(self, task):
        return [Phase(self.measure, train=False, shuffle=False), Phase(self.keep, 0, enter=self.choose)]

    def keep(self, task, work, batch, down, info):
        return work

    def measure(self, task, work, batch, down, info):
        def loss(params):
            out = task.predict(task.slot(params), batch.x)
            return (task.losses(out.logits, batch.y) * batch.mask).sum()

        return {**work, "losses": work["losses"] + vmap(loss)(down["models"])}

    def choose(self, task, work, down, info):
        j = torch.argmin(work["losses"])
        return {**work, "w": task.slot(take(down["models"], j)), "j": j}

    def finish(self, task, work, down, state, info):
        return state, {"w": work["w"].params, "j": work["j"]}

    def aggregate(self, task, server, up, info, t, key):
        chosen = torch.nn.functional.one_hot(up["j"], 3).to(task.dtype) * info.n[:, None]  # m x 3
        total = chosen.sum(0)

        def update(old, new):
            sums = torch.einsum("mk,m...->k...", chosen, new)
            shape = (-1, *[1] * (old.dim() - 1))
            return torch.where((total > 0).view(shape), sums / total.clamp(min=1).view(shape), old)

        return {"models": tree_map(update, server["models"], up["w"])}

    def global_model(self, task, server):
        return None


@dataclass(frozen=True)
class Candidates(Plain):
    """MAPPER: several candidate trainings at once by a nested vmap; the best is kept between phases."""

    def init_client(self, task, key, key_i):
        return {"theta": task.init(key)}

    def begin(self, task, down, state, info):
        lam = torch.tensor([0.25, 0.5, 0.75], dtype=task.dtype, device=info.n.device)
        copies = tree_map(lambda p: p.expand(3, *p.shape), state["theta"])
        return {"w": task.slot(down["w"]), "theta": copies, "lam": lam, "losses": zeros_like(lam), "best": lam[0]}

    def phases(self, task):
        return [
            Phase(self.candidate_step, task.epochs),
            Phase(self.measure, train=False),
            Phase(self.global_step, task.epochs, enter=self.keep_best),
        ]

    def mixed(self, task, theta, w, lam):
        return task.slot(tree_map(lambda a, b: lam * a + (1 - lam) * b, theta, w))

    def candidate_step(self, task, work, batch, down, info):
        def one(theta, lam):
            def loss(theta):
                return task.loss(task.forward(self.mixed(task, theta, down["w"], lam), batch), batch), {}

            return axpy(-task.lr, grad(loss, theta)[0], theta)

        return {**work, "theta": vmap(one)(work["theta"], work["lam"])}

    def measure(self, task, work, batch, down, info):
        def one(theta, lam):
            out = task.predict(self.mixed(task, theta, down["w"], lam), batch.x)
            return (task.losses(out.logits, batch.y) * batch.mask).sum()

        return {**work, "losses": work["losses"] + vmap(one)(work["theta"], work["lam"])}

    def keep_best(self, task, work, down, info):
        best = torch.argmin(work["losses"])
        kept = tree_map(lambda v: v[best].expand_as(v), work["theta"])
        return {**work, "theta": kept, "best": work["lam"][best]}

    def global_step(self, task, work, batch, down, info):
        theta = take(work["theta"], 0)

        def loss(w):
            return task.loss(task.forward(self.mixed(task, theta, w, work["best"]), batch), batch), {}

        g, _ = grad(loss, work["w"].params)
        return {**work, "w": task.step(work["w"], g)}

    def finish(self, task, work, down, state, info):
        return {"theta": take(work["theta"], 0)}, {"w": work["w"].params}


@dataclass(frozen=True)
class Stopping(Plain):
    """FedALA: weights learnt on a window of the data until the losses converge, for a limited number of epochs."""

    def begin(self, task, down, state, info):
        loss = torch.zeros((), dtype=task.dtype, device=info.n.device)
        return {"w": task.slot(down["w"]), "before": loss, "now": loss + 9, "epochs": torch.zeros_like(info.n)}

    def phases(self, task):
        return [
            Phase(self.learn, self.most, select=self.window, until=self.converged, batch=4),
            Phase(self.step, task.epochs),
        ]

    def most(self, task, work, info):
        return torch.where(info.first, 6, 1)

    def window(self, n, draw):
        size = max(1, int(0.8 * n))
        start = int(draw.rng("ala", draw.i, draw.t).integers(0, n - size + 1))
        return np.arange(start, start + size)

    def converged(self, work):
        return (work["before"] - work["now"]).abs() < 0.05

    def learn(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        loss = task.loss(task.predict(w, batch.x), batch)
        before = torch.where(batch.last, work["now"], work["before"])
        now = torch.where(batch.last, loss, work["now"])
        return {"w": task.step(w, g), "before": before, "now": now, "epochs": work["epochs"] + batch.last}


@dataclass(frozen=True)
class Prototypes(Plain):
    """FedProto: prediction by the nearest prototype, prototypes accumulated after training, nothing else shared."""

    def init_server(self, task, key):
        size = (task.classes, task.network.feature_dim)
        return {
            "protos": torch.zeros(size, dtype=task.dtype, device=task.data.device),
            "known": torch.zeros(task.classes, dtype=torch.bool, device=task.data.device),
        }

    def init_client(self, task, key, key_i):
        return {"theta": task.init(key)}

    def begin(self, task, down, state, info):
        sums = torch.zeros_like(down["protos"])
        return {"w": task.slot(state["theta"]), "sums": sums, "counts": sums[:, 0]}

    def phases(self, task):
        return [Phase(self.step, task.epochs), Phase(self.collect, train=False, shuffle=False)]

    def collect(self, task, work, batch, down, info):
        features = task.predict(work["w"], batch.x).features * batch.mask[:, None]
        one_hot = torch.nn.functional.one_hot(batch.y, task.classes).to(features.dtype) * batch.mask[:, None]
        return {**work, "sums": work["sums"] + one_hot.T @ features, "counts": work["counts"] + one_hot.sum(0)}

    def finish(self, task, work, down, state, info):
        protos = work["sums"] / work["counts"].clamp(min=1)[:, None]
        return {"theta": work["w"].params}, {"protos": protos, "there": work["counts"] > 0}

    def aggregate(self, task, server, up, info, t, key):
        weight = up["there"].to(task.dtype)
        found = torch.einsum("mc,mcf->cf", weight, up["protos"]) / weight.sum(0).clamp(min=1)[:, None]
        there = up["there"].any(0)
        return {"protos": torch.where(there[:, None], found, server["protos"]), "known": server["known"] | there}

    def model(self, task, work, down, info):
        return {"slot": work["w"], "protos": down["protos"], "known": down["known"]}

    def logits(self, task, model, x):
        features = task.predict(model["slot"], x).features
        distance = ((features[:, None] - model["protos"]) ** 2).sum(-1)
        return torch.where(model["known"], -distance, -torch.inf)

    def global_model(self, task, server):
        return None


@dataclass(frozen=True)
class Pairs(Plain):
    """Per-FedAvg: pairs of batches in training, one adaptation step on one batch for evaluation."""

    def phases(self, task):
        return [Phase(self.meta_step, task.epochs, group=2, halve=True)]

    def meta_step(self, task, work, batch, down, info):
        w = work["w"]
        g, _ = task.grad(w, batch.part(0))
        g, _ = task.grad(w._replace(params=axpy(-task.lr, g, w.params)), batch.part(1))
        return {"w": task.step(w, g)}

    def adapt(self, task):
        return [Phase(self.step, steps=1)]


@dataclass(frozen=True)
class Turns(Plain):
    """pFedHN: weights generated for each client, a server step after each of them in turn by a VJP."""

    turns = True

    def init_server(self, task, key):
        w = task.init(key)
        size = sum(p.numel() for p in w.values())
        draw = torch.tensor(fold(key, 1), device=task.data.device)
        matrix = 0.3 * normal(draw, (size, 3), task.dtype)
        embedding = normal(draw + 1, (task.clients, 3), task.dtype)
        return {"matrix": matrix, "embedding": embedding}

    def generate(self, task, matrix, v):
        flat, start, params = matrix @ v, 0, {}
        for name, p in task.init(0).items():
            params[name] = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        return params

    def download(self, task, server, ids, t, key):
        return {}, {"w": vmap(lambda v: self.generate(task, server["matrix"], v))(server["embedding"][ids])}

    def finish(self, task, work, down, state, info):
        return state, {"delta": sub(down["w"], work["w"].params)}

    def aggregate(self, task, server, up, info, t, key):
        (i,) = info.id
        _, pull = torch.func.vjp(lambda m, v: self.generate(task, m, v), server["matrix"], server["embedding"][i])
        g_matrix, g_v = pull(take(up["delta"], 0))
        embedding = server["embedding"].clone()
        embedding[i] -= 0.1 * g_v
        return {"matrix": server["matrix"] - 0.1 * g_matrix, "embedding": embedding}

    def global_model(self, task, server):
        return None


@dataclass(frozen=True)
class Agents(Plain):
    """PAGE: the number of epochs and the learning rate are decided inside the round from a pass over the data and a
    keyed draw; the server weighs the uploads by their accuracy on its own data."""

    needs_server_data = True

    def begin(self, task, down, state, info):
        zero = torch.zeros((), dtype=task.dtype, device=info.n.device)
        return {"w": task.slot(down["w"]), "right": zero, "eta": zero, "alpha": torch.zeros_like(info.n)}

    def phases(self, task):
        return [
            Phase(self.look, train=False),
            Phase(self.tuned_step, lambda task, work, info: work["alpha"], enter=self.act),
        ]

    def look(self, task, work, batch, down, info):
        score = task.score(task.predict(work["w"], batch.x).logits, batch.y, batch.mask)
        return {**work, "right": work["right"] + score[:, 0].sum()}

    def act(self, task, work, down, info):
        accuracy = work["right"] / info.n
        noise = normal(info.key, (2,), task.dtype)
        eta = 0.01 + 0.1 * torch.sigmoid(noise[0])
        alpha = torch.floor(1 + 3 * torch.sigmoid(noise[1] - accuracy) + 0.5)
        return {**work, "eta": eta, "alpha": alpha.long()}

    def tuned_step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        return {**work, "w": task.step(w, g, lr=work["eta"])}

    def aggregate(self, task, server, up, info, t, key):
        x, y = task.data.x[task.data.server], task.data.y[task.data.server]

        def accuracy(w):
            logits = task.predict(task.slot(w), x).logits
            return (logits.argmax(-1) == y).to(task.dtype).mean()

        return {"w": mean(up["w"], vmap(accuracy)(up["w"]) + 0.1)}


@dataclass(frozen=True)
class Validators(Plain):
    """FedFomo: models of others sent to each client, weighed on a fixed part of its samples; own initial state per
    client; a constant drawn from the seed on both sides."""

    def init_server(self, task, key):
        w = task.init(key)
        return {"all": tree_map(lambda p: p.expand(task.clients, *p.shape).clone(), w)}

    def init_client(self, task, key, key_i):
        w = task.init(key)
        return {"theta": tree_map(lambda p: p + 0.01 * normal(key_i, tuple(p.shape), p.dtype), w)}

    def constants(self, task, key):
        return {"bonus": torch.full((2,), 0.5, dtype=task.dtype, device=task.data.device)}

    def download(self, task, server, ids, t, key):
        others = torch.stack([(ids + 1) % task.clients, (ids + 2) % task.clients], 1)
        return {}, {"models": take(server["all"], others)}

    def begin(self, task, down, state, info):
        return {"w": task.slot(state["theta"]), "mine": down["bonus"][0] * 0, "theirs": down["bonus"] * 0}

    def phases(self, task):
        first = lambda n, draw: draw.rng("fomo", draw.i).permutation(n)[: max(1, int(0.8 * n))]  # noqa: E731
        rest = lambda n, draw: draw.rng("fomo", draw.i).permutation(n)[max(1, int(0.8 * n)) :]  # noqa: E731
        return [
            Phase(self.judge, select=rest, train=False, shuffle=False),
            Phase(self.step, select=first, enter=self.mix),
        ]

    def judge(self, task, work, batch, down, info):
        def loss(params):
            return (task.losses(task.predict(task.slot(params), batch.x).logits, batch.y) * batch.mask).sum()

        mine = work["mine"] + loss(work["w"].params)
        return {**work, "mine": mine, "theirs": work["theirs"] + vmap(loss)(down["models"])}

    def mix(self, task, work, down, info):
        gain = torch.clamp(work["mine"] - work["theirs"], min=0) * down["bonus"]
        share = gain / gain.sum().clamp(min=1e-9)
        w = work["w"].params
        moved = tree_map(lambda a, b: a + torch.einsum("k,k...->...", share, b - a), w, down["models"])
        return {**work, "w": task.slot(moved)}

    def finish(self, task, work, down, state, info):
        return {"theta": work["w"].params}, {"theta": work["w"].params}

    def aggregate(self, task, server, up, info, t, key):
        return {"all": tree_map(lambda mine, new: mine.index_copy(0, info.id, new), server["all"], up["theta"])}

    def model(self, task, work, down, info):
        return where(info.first, task.slot(scale(work["w"].params, 0.5)), work["w"])

    def global_model(self, task, server):
        return None


SKETCHES = [Cluster, Candidates, Stopping, Prototypes, Pairs, Turns, Agents, Validators]


def device_of(plan):
    return "cuda" if plan.replay == "captured" else "cpu"


@pytest.mark.parametrize("plan", PLANS, ids=plan_id)
@pytest.mark.parametrize("sketch", SKETCHES)
def test_sketches_give_the_same_stacked_as_client_by_client(sketch, plan):
    sizes = [max(n, 2) for n in RAGGED] if sketch is Pairs else RAGGED
    participation = 1.0 if sketch is Agents else 0.7
    task = make_task(sizes, participation=participation, epochs=2, data={"server": 30}, device=device_of(plan))
    assert_same(sketch(), task, plan, 1e-9)


@pytest.mark.parametrize("plan", [Plan("per-client"), *PLANS], ids=plan_id)
def test_a_condition_stops_clients_at_different_epochs(plan):
    """The first round allows up to 6 epochs; some clients converge before, some do not, and no client exceeds them."""
    task = make_task(RAGGED, device=device_of(plan))
    counts = []

    @dataclass(frozen=True)
    class Watched(Stopping):
        def finish(self, task, work, down, state, info):
            return state, {"w": work["w"].params, "epochs": work["epochs"]}

        def aggregate(self, task, server, up, info, t, key):
            counts.append(up["epochs"].cpu())
            return {"w": mean(up["w"], info.n)}

    run_and_evaluate(Watched(), task, plan, rounds=2)
    assert len(set(counts[0].tolist())) > 1
    assert int(counts[0].min()) >= 1
    assert int(counts[0].max()) <= 6
    assert set(counts[1].tolist()) == {1}


@pytest.mark.parametrize("plan", [Plan("per-client"), *PLANS], ids=plan_id)
def test_a_step_sees_each_sample_once_per_epoch_with_the_right_indices(plan):
    """Samples, epochs, last batches and step numbers, summed up by a method that only counts."""
    sizes = (1, 23, 10, 7)

    @dataclass(frozen=True)
    class Counting(Plain):
        def begin(self, task, down, state, info):
            zero = torch.zeros((), dtype=task.dtype, device=info.n.device)
            names = ("samples", "inputs", "epochs", "ends", "k")
            return {"w": task.slot(down["w"]), **dict.fromkeys(names, zero)}

        def step(self, task, work, batch, down, info):
            return {
                "w": work["w"],
                "samples": work["samples"] + batch.mask.sum(),
                "inputs": work["inputs"] + (batch.x.sum(-1) * batch.mask).sum(),
                "epochs": work["epochs"] + batch.epoch,
                "ends": work["ends"] + batch.last,
                "k": work["k"] + batch.k,
            }

        def finish(self, task, work, down, state, info):
            return state, {name: value for name, value in work.items() if not isinstance(value, Slot)}

        def aggregate(self, task, server, up, info, t, key):
            return {**server, "seen": up}

        def download(self, task, server, ids, t, key):
            return {"w": server["w"]}, {}

    task = make_task(sizes, epochs=3, device=device_of(plan))
    run, _ = run_and_evaluate(Counting(), task, plan, rounds=1)
    seen = {name: v.cpu() for name, v in run.server["seen"].items()}
    per_epoch = [1, 3, 1, 1]
    inputs = [float(task.data.x[task.data.splits["train"][i]].sum()) for i in range(4)]
    assert seen["samples"].tolist() == [3 * n for n in sizes]
    torch.testing.assert_close(seen["inputs"], 3 * torch.tensor(inputs, dtype=torch.float64))
    assert seen["epochs"].tolist() == [(0 + 1 + 2) * b for b in per_epoch]
    assert seen["ends"].tolist() == [3, 3, 3, 3]
    assert seen["k"].tolist() == [sum(range(3 * b)) for b in per_epoch]
