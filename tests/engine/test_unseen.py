"""Clients that are held out of training: nothing of theirs reaches it, and they are served as a method serves those who
come late."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import SingleRun, make_federation, make_task, method, methods
from sentences import user_error

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.tree import leaves, scale
from fedloom.engine.planning.plan import Plan

SIZES = (7, 12, 3, 21, 5, 9, 4, 15)  # of these clients the last three are held out
OUT = 3
EAGER = Plan("stacked", "eager", chunk=4)
SETTINGS = {  # some train long; and feddyn asks how many samples clients have
    "dap-fl": {"ep_max": 2},
    "page": {"ep_max": 2},
    "fedrecon": {"query_epochs": 2},
    "fedala": {"start_epochs": 3},
    "feddyn": {"adaptive": True},
}


def federation(least=1, held_out=OUT, garbage=False, **settings):
    data = make_federation([max(n, least) for n in SIZES], server=20, **settings)
    if garbage:
        for rows in data.splits.values():
            theirs = rows.flat[rows.starts[len(SIZES) - OUT] :]
            data.x[theirs] = torch.nan
            data.y[theirs] = 0
    return replace(data, held_out=held_out)


def task_of(alg, **settings):
    """With the fewest samples that the method can run with."""
    least = alg.min_samples(make_task((1,)))
    garbage = settings.pop("garbage", False)
    return make_task((), federation=federation(least, garbage=garbage), **settings)


def state(run):
    return [v.numpy().tobytes() for v in leaves((run.server, run.store.everyone()))]


def scores(done):
    return {(v, s): found.tobytes() for v, splits in done.scores.items() for s, found in splits.items()}


@pytest.mark.parametrize("name", methods())
def test_every_method_trains_as_if_they_did_not_exist_and_serves_them_alike_on_both_engines(name):
    """The stacked run with them is, to the bit, the run without them, whose pool has NaN where their samples were; one
    client at a time, they are served within 1e-9 of that."""
    alg = method(name, **SETTINGS.get(name, {}))
    task = task_of(alg, participation=0.6 if alg.partial else 1.0, batch_size=5)
    without = task_of(alg, participation=task.participation, batch_size=5, garbage=True)
    without = replace(without, data=without.data.participants())
    stacked = SingleRun(alg, task, 3, plan=EAGER, join_rounds=2)
    alone = SingleRun(alg, without, 3, plan=EAGER)
    reference = SingleRun(alg, task, 3, "reference", join_rounds=2)
    for last in (False, True):
        here, there, one_by_one = (run.advance(evaluate=last) for run in (stacked, alone, reference))
        assert here.cohort.max() < len(SIZES) - OUT
        assert scores(here) == scores(there)
        assert (here.bytes_down, here.bytes_up) == (there.bytes_down, there.bytes_up)
    assert state(stacked) == state(alone)
    assert len(stacked.store) == len(SIZES) - OUT
    assert here.unseen.tolist() == [5, 6, 7]
    assert there.unseen_scores == {}
    for view in ("new", "joined"):
        found, expected = here.unseen_scores[view], one_by_one.unseen_scores[view]
        assert np.isfinite(found).all()
        assert found[:, 2].tolist() == task.data.splits["test"].sizes[5:].tolist()
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert not np.array_equal(here.unseen_scores["new"], here.unseen_scores["joined"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "pfedhn", "fedfomo", "page", "gpfl"])
def test_they_are_served_from_captured_graphs_as_one_by_one(name):
    alg = method(name, **SETTINGS.get(name, {}))
    task = task_of(alg, batch_size=5, device="cuda")
    runs = [
        SingleRun(alg, task, 3, plan=plan, join_rounds=2)
        for plan in (Plan("stacked", "captured", chunk=4), Plan("per-client"))
    ]
    for _ in range(2):
        captured, plain = (run.advance() for run in runs)
    for view in ("new", "joined"):
        np.testing.assert_allclose(captured.unseen_scores[view], plain.unseen_scores[view], rtol=1e-9, atol=1e-9)


# -- by hand: one batch holds all samples of a client, so that there is no order of batches to know -----------------


def samples(task, i, split):
    rows = task.data.splits[split][i]
    return task.data.x[rows], task.data.y[rows]


def net(p, x, stats=None):
    """tests/helpers.py's SmallNet."""
    z = F.linear(x, p["first.weight"], p["first.bias"])
    if stats is not None:
        z = F.batch_norm(z, stats["norm.running_mean"], stats["norm.running_var"], p["norm.weight"], p["norm.bias"])
    return F.linear(torch.tanh(z), p["head.weight"], p["head.bias"])


def sgd(p, x, y, steps, lr=0.1):
    for _ in range(steps):
        p = {k: v.detach().requires_grad_() for k, v in p.items()}
        g = torch.autograd.grad(F.cross_entropy(net(p, x), y), list(p.values()))
        p = {k: (v - lr * d).detach() for (k, v), d in zip(p.items(), g, strict=True)}
    return p


def score(task, i, logits):
    y = samples(task, i, "test")[1]
    return [float((logits.argmax(1) == y).sum()), float(F.cross_entropy(logits, y, reduction="sum")), len(y)]


def served(name, join_rounds=1, rounds=2, norm=False, plan=EAGER, **settings):
    """A run of some rounds, and what it says of the clients that are held out."""
    task = make_task((), federation=federation(), batch_size=50, norm=norm)
    run = SingleRun(method(name, **settings), task, 5, plan=plan, join_rounds=join_rounds)
    done = [run.advance() for _ in range(rounds)][-1]
    return run, task, done.unseen_scores


def expect(task, found, model):
    """`model(i, x)` are the logits that client i should have."""
    for row, i in zip(found, (5, 6, 7), strict=True):
        np.testing.assert_allclose(row, score(task, i, model(i, samples(task, i, "test")[0])), rtol=1e-9)


@pytest.mark.parametrize("plan", [EAGER, Plan("per-client")], ids=lambda p: p.mode)
def test_fedavg_gives_them_the_global_model_and_they_train_it_on_their_samples(plan):
    run, task, found = served("fedavg", plan=plan)
    w = run.server["w"]
    expect(task, found["new"], lambda i, x: net(w, x))
    expect(task, found["joined"], lambda i, x: net(sgd(w, *samples(task, i, "train"), steps=1), x))


def test_fedper_gives_them_the_body_under_the_head_that_all_started_with():
    run, task, found = served("fedper")
    start = {**task.init(run.key), **run.server["phi"]}
    assert not torch.equal(start["first.weight"], task.init(run.key)["first.weight"])
    expect(task, found["new"], lambda i, x: net(start, x))
    expect(task, found["joined"], lambda i, x: net(sgd(start, *samples(task, i, "train"), steps=1), x))


def test_what_a_client_keeps_it_has_in_the_next_round_of_joining_and_what_is_sent_is_sent_again():
    """Local goes on where it was: three rounds are three steps. FedAvg starts from w again: three are as one."""
    run, task, found = served("local", join_rounds=3)
    start = task.init(run.key)
    expect(task, found["new"], lambda i, x: net(start, x))
    expect(task, found["joined"], lambda i, x: net(sgd(start, *samples(task, i, "train"), steps=3), x))
    run, task, found = served("fedavg", join_rounds=3)
    w = run.server["w"]
    expect(task, found["joined"], lambda i, x: net(sgd(w, *samples(task, i, "train"), steps=1), x))


def test_ditto_serves_them_by_the_global_model_until_they_have_one_of_their_own():
    run, task, found = served("ditto", join_rounds=2, lam=0.0)
    w, start = run.server["w"], task.init(run.key)
    expect(task, found["new"], lambda i, x: net(w, x))
    expect(task, found["joined"], lambda i, x: net(sgd(start, *samples(task, i, "train"), steps=2), x))


@dataclass(frozen=True)
class Dated(FedAvg):
    """Clients start from w times the number of the round, and twice that when they are new."""

    def begin(self, task, down, own, info):
        return {"w": task.slot(scale(down["w"], (1 + info.t) * (1 + info.first.long())))}


def test_they_come_in_the_next_round_and_are_not_new_in_the_one_after_it():
    """After rounds 0 and 1 they join in round 2, where they start from 3 * 2 times w, and in round 3: 4 times w."""
    task = make_task((), federation=federation(), batch_size=50)
    for count, factor in ((1, 6), (2, 4)):
        run = SingleRun(Dated(), task, 5, plan=EAGER, join_rounds=count)
        found = [run.advance() for _ in range(2)][-1].unseen_scores
        six, start = ({k: f * v for k, v in run.server["w"].items()} for f in (6, factor))
        expect(task, found["new"], lambda i, x, w=six: net(w, x))
        expect(task, found["joined"], lambda i, x, w=start: net(sgd(w, *samples(task, i, "train"), steps=1), x))


def test_a_newcomer_starts_from_the_mean_of_the_last_cohorts_running_statistics():
    run, task, found = served("fedavg", norm=True)
    kept = run.store.everyone()["stats"]["w"]
    n = torch.tensor(SIZES[:5], dtype=torch.float64)
    stats = {k: (v.T @ (n / n.sum())) for k, v in kept.items() if v.dim() == 2}
    expect(task, found["new"], lambda i, x: net(run.server["w"], x, stats))


def test_a_cohort_that_trains_in_turns_leaves_the_mean_of_all_too():
    run, _, _ = served("pfedhn", norm=True, rounds=1)
    kept = run.store.everyone()["stats"]["w"]["norm.running_mean"]
    n = torch.tensor(SIZES[:5], dtype=torch.float64)
    torch.testing.assert_close(run.stats["w"]["norm.running_mean"], kept.T @ (n / n.sum()), rtol=1e-9, atol=1e-12)


# -- servers that keep something per client ------------------------------------------------------------------------


def test_pfedhn_trains_the_newcomers_embedding_alone():
    """v <- v - alpha m with m = g + decay v, as momentum starts at 0; g = (dh/dv)^T delta, cut to norm 0.01."""
    run, task, _ = served("pfedhn", hidden=0, embedding=3, hn_lr=0.5, hn_decay=0.1, hn_clip=0.01)
    alg, ids = run.alg, torch.arange(5, 8)
    server = alg.admit(run.task, run.server, ids, run.key)
    assert torch.equal(server["v"][:5], run.server["v"])
    assert len(torch.unique(server["v"], dim=0)) == 8  # everybody has an embedding of its own
    delta = {k: torch.randn(3, *v.shape, dtype=v.dtype) for k, v in task.init(0).items()}
    info = run._newcomers(server, np.arange(5, 8)).info
    after = alg.welcome(run.task, server, {"delta": delta}, info, 2, run.key)
    phi = server["phi"]
    for row, i in enumerate((5, 6, 7)):
        v = server["v"][i].clone().requires_grad_()
        trunk = F.linear(v, phi["trunk.0.weight"], phi["trunk.0.bias"])
        made = [F.linear(trunk, phi[f"out.{j}.weight"], phi[f"out.{j}.bias"]) for j in range(len(delta))]
        g = torch.autograd.grad(made, [v], [d[row].flatten() for d in delta.values()])[0]
        assert g.norm() > 0.01
        g = g * 0.01 / (g.norm() + 1e-6)
        torch.testing.assert_close(after["v"][i], (v - 0.5 * (g + 0.1 * v)).detach(), rtol=1e-9, atol=1e-12)
    assert torch.equal(after["v"][:5], server["v"][:5])
    assert all(torch.equal(after["phi"][k], phi[k]) for k in phi)


def test_what_the_server_learnt_of_a_newcomer_is_in_what_it_sends_next():
    """With one batch, a round of joining differs from the one before in what is sent only."""
    one, two = (served("pfedhn", join_rounds=count, hidden=0, hn_lr=0.3)[2] for count in (1, 2))
    assert np.array_equal(one["new"], two["new"])
    assert not np.allclose(two["joined"][:, 1], one["joined"][:, 1], rtol=1e-3)


def test_fedfomo_sends_newcomers_the_models_of_participants_and_theirs_to_nobody():
    run, _, _ = served("fedfomo", M=2, eps=0.0)
    server = run.alg.admit(run.task, run.server, torch.arange(5, 8), run.key)
    cohort = run._newcomers(server, np.arange(5, 8))
    assert cohort.parts["there"].all()
    who, _ = run.alg.choose(run.task, server, torch.arange(5, 8), run.t, run.key)
    assert int(who.max()) < 5
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    after = run.alg.welcome(run.task, server, {"w": w}, cohort.info, run.t, run.key)
    for row, i in enumerate((5, 6, 7)):
        expected = torch.zeros(5, dtype=torch.float64)
        expected[who[row]] = w[row]
        assert torch.equal(after["P"][i], expected)
    assert torch.equal(after["P"][:5], run.server["P"])
    assert after["models"] is server["models"]
    assert after["known"] is server["known"]


@dataclass(frozen=True)
class Remembers(FedAvg):
    """Keeps something per client at the server, and does not say what a newcomer gets."""

    def init_server(self, task, key):
        return {**super().init_server(task, key), "seen": torch.zeros(task.clients, dtype=task.dtype)}

    def download(self, task, server, ids, t, key):
        return {"w": server["w"]}, {"seen": server["seen"][ids]}


def test_a_method_without_a_place_for_newcomers_is_refused_before_training():
    with user_error("fedavg keeps something per client", "'admit'", "holdout_clients=0"):
        SingleRun(Remembers(), make_task((), federation=federation()), 0, plan=EAGER)
    SingleRun(Remembers(), make_task((), federation=federation(held_out=0)), 0, plan=EAGER)


# -- memory --------------------------------------------------------------------------------------------------------


def test_many_of_them_are_served_in_pieces(monkeypatch):
    whole = served("fedper")[2]
    monkeypatch.setattr("fedloom.engine.driver.EVAL_CLIENTS", 2)
    pieces = served("fedper")[2]
    for view in ("new", "joined"):
        np.testing.assert_allclose(pieces[view], whole[view], rtol=1e-12)


def test_traces_serve_them_too():
    eager, traced = (served("ditto", plan=Plan("stacked", how, chunk=4))[2] for how in ("eager", "traced"))
    for view in ("new", "joined"):
        np.testing.assert_allclose(traced[view], eager[view], rtol=1e-12)
