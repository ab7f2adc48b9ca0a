"""Clients that are held out of training: nothing of theirs affects it, and they are evaluated when they join after
it."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import SingleRun, make_federation, make_task, method, methods, state_bytes
from sentences import user_error

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.tree import scale
from fedloom.engine.clients import ClientRequest
from fedloom.engine.plan import Plan
from fedloom.engine.planning.choose import make_executor

SIZES = (7, 12, 3, 21, 5, 9, 4, 15)  # of these clients the last three are held out
HELD_OUT = 3
EAGER = Plan("stacked", "eager", chunk=4)
SETTINGS = {  # to be fast; and feddyn uses the numbers of samples of clients
    "dap-fl": {"ep_max": 2},
    "page": {"ep_max": 2},
    "fedrecon": {"query_epochs": 2},
    "fedala": {"start_epochs": 3},
    "feddyn": {"adaptive": True},
}


def federation(least=1, held_out=HELD_OUT, garbage=False, **settings):
    data = make_federation([max(n, least) for n in SIZES], server=20, **settings)
    if garbage:
        for rows in data.splits.values():
            theirs = rows.flat[rows.starts[len(SIZES) - HELD_OUT] :]
            data.x[theirs] = torch.nan
            data.y[theirs] = 0
    return replace(data, held_out=held_out)


def task_of(alg, **settings):
    """With the fewest samples that the method can run with."""
    least = alg.min_samples(make_task((1,)))
    garbage = settings.pop("garbage", False)
    return make_task((), federation=federation(least, garbage=garbage), **settings)


def scores(done):
    return {(v, s): found.tobytes() for v, splits in done.scores.items() for s, found in splits.items()}


@pytest.mark.parametrize("name", methods())
def test_every_method_trains_as_without_held_out_clients_and_serves_them_stacked_as_client_by_client(name):
    """A stacked run with held-out clients equals, to the bit, the run without them, whose data have NaN in place of
    their samples. Client by client, they are served within 1e-9 of the stacked run."""
    alg = method(name, **SETTINGS.get(name, {}))
    task = task_of(alg, participation=0.6 if alg.partial else 1.0, batch_size=5)
    without = task_of(alg, participation=task.participation, batch_size=5, garbage=True)
    without = replace(without, data=without.data.participants())
    stacked = SingleRun(alg, task, 3, plan=EAGER, join_rounds=2)
    plain = SingleRun(alg, without, 3, plan=EAGER)
    reference = SingleRun(alg, task, 3, "reference", join_rounds=2)
    for last in (False, True):
        here, there, one_by_one = (run.advance(evaluate=last) for run in (stacked, plain, reference))
        assert here.cohort.max() < len(SIZES) - HELD_OUT
        assert scores(here) == scores(there)
        assert (here.bytes_down, here.bytes_up) == (there.bytes_down, there.bytes_up)
    assert state_bytes(stacked) == state_bytes(plain)
    assert len(stacked.store) == len(SIZES) - HELD_OUT
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
def test_held_out_clients_are_served_by_cuda_graphs_as_client_by_client(name):
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


# -- by hand: one batch contains all samples of a client, so the order of batches does not matter --------------------


def samples(task, i, split):
    rows = task.data.splits[split][i]
    return task.data.x[rows], task.data.y[rows]


def net(p, x, stats=None):
    """`SmallNet` of helpers.py."""
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
    """A run of some rounds, its task, and the scores of the held-out clients."""
    task = make_task((), federation=federation(), batch_size=50, norm=norm)
    run = SingleRun(method(name, **settings), task, 5, plan=plan, join_rounds=join_rounds)
    done = [run.advance() for _ in range(rounds)][-1]
    return run, task, done.unseen_scores


def joining_request(run, server) -> ClientRequest:
    """What the server asks of the held-out clients in their first round of training."""
    joining = {"splits": ("test",), "join_round": 0, "stats": run.stats}
    return run.driver._request("train", np.arange(5, 8), run.t, server, **joining)


def expect(task, found, model):
    """`model(i, x)` are the expected logits of client i."""
    for row, i in zip(found, (5, 6, 7), strict=True):
        np.testing.assert_allclose(row, score(task, i, model(i, samples(task, i, "test")[0])), rtol=1e-9)


@pytest.mark.parametrize("plan", [EAGER, Plan("per-client")], ids=lambda p: p.mode)
def test_fedavg_sends_newcomers_the_global_model_and_they_train_it_on_their_samples(plan):
    run, task, found = served("fedavg", plan=plan)
    w = run.server["w"]
    expect(task, found["new"], lambda i, x: net(w, x))
    expect(task, found["joined"], lambda i, x: net(sgd(w, *samples(task, i, "train"), steps=1), x))


def test_fedper_sends_newcomers_the_body_and_they_have_the_initial_head():
    run, task, found = served("fedper")
    start = {**task.init(run.key), **run.server["phi"]}
    assert not torch.equal(start["first.weight"], task.init(run.key)["first.weight"])
    expect(task, found["new"], lambda i, x: net(start, x))
    expect(task, found["joined"], lambda i, x: net(sgd(start, *samples(task, i, "train"), steps=1), x))


def test_newcomers_keep_private_state_between_rounds_of_joining_and_receive_the_same_download():
    """Local continues from its model: three rounds are three steps. FedAvg starts from w in each: three equal one."""
    run, task, found = served("local", join_rounds=3)
    start = task.init(run.key)
    expect(task, found["new"], lambda i, x: net(start, x))
    expect(task, found["joined"], lambda i, x: net(sgd(start, *samples(task, i, "train"), steps=3), x))
    run, task, found = served("fedavg", join_rounds=3)
    w = run.server["w"]
    expect(task, found["joined"], lambda i, x: net(sgd(w, *samples(task, i, "train"), steps=1), x))


def test_ditto_uses_the_global_model_for_newcomers_until_they_have_a_personal_one():
    run, task, found = served("ditto", join_rounds=2, lam=0.0)
    w, start = run.server["w"], task.init(run.key)
    expect(task, found["new"], lambda i, x: net(w, x))
    expect(task, found["joined"], lambda i, x: net(sgd(start, *samples(task, i, "train"), steps=2), x))


@dataclass(frozen=True)
class Dated(FedAvg):
    """Clients start from w times the number of the round, and from twice that in their first round."""

    def begin(self, task, down, state, info):
        return {"w": task.slot(scale(down["w"], (1 + info.t) * (1 + info.first.long())))}


def test_newcomers_join_in_the_next_round_and_are_new_in_that_round_only():
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


def test_the_mean_of_running_statistics_is_over_the_whole_cohort_where_clients_train_in_turns():
    run, _, _ = served("pfedhn", norm=True, rounds=1)
    kept = run.store.everyone()["stats"]["w"]["norm.running_mean"]
    n = torch.tensor(SIZES[:5], dtype=torch.float64)
    torch.testing.assert_close(run.stats["w"]["norm.running_mean"], kept.T @ (n / n.sum()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", [EAGER, Plan("per-client")], ids=lambda p: p.mode)
def test_executors_have_the_samples_of_the_whole_population(plan):
    """They train and score held-out clients on their samples, which the task of the algorithm does not have."""
    run, task, _ = served("fedavg", plan=plan)
    request = joining_request(run, run.server)
    assert len(run.task.data.splits["train"]) == 5
    cohort = run.clients.cohort(request)
    assert cohort.info.n.tolist() == list(SIZES[5:])
    assert torch.equal(cohort.info.counts, task.data.counts(request.ids))
    done = run.executor.train(cohort, ("test",))
    for row, i in enumerate(request.ids.tolist()):
        expected = sgd(run.server["w"], *samples(task, i, "train"), steps=1)
        for name, value in expected.items():
            torch.testing.assert_close(done.up["w"][name][row], value, rtol=1e-9, atol=1e-12)
    personal = run.executor.score_personal(cohort, ("test",)).scores
    shared = run.executor.score_global(run.server["w"], cohort, ("test",))
    for scores in (personal, shared):  # with FedAvg, both are of the global model
        expect(task, scores["test"].numpy(), lambda i, x: net(run.server["w"], x))
    with pytest.raises(IndexError):
        make_executor(run.alg, run.task, plan).train(cohort, ("test",))


# -- servers that keep something per client ------------------------------------------------------------------------


def test_pfedhn_trains_the_newcomers_embedding_alone():
    """v <- v - alpha m with m = g + decay v, as momentum starts at 0; g = (dh/dv)^T delta, cut to norm 0.01."""
    run, task, _ = served("pfedhn", hidden=0, embedding=3, hn_lr=0.5, hn_decay=0.1, hn_clip=0.01)
    alg, ids = run.alg, torch.arange(5, 8)
    server = alg.admit(run.task, run.server, ids, run.key)
    assert torch.equal(server["v"][:5], run.server["v"])
    assert len(torch.unique(server["v"], dim=0)) == 8  # every client has another embedding
    delta = {k: torch.randn(3, *v.shape, dtype=v.dtype) for k, v in task.init(0).items()}
    info = run.clients.cohort(joining_request(run, server)).info
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


def test_what_the_server_keeps_for_a_newcomer_changes_its_next_download():
    """With one batch, a round of joining differs from the one before in the download only."""
    one, two = (served("pfedhn", join_rounds=count, hidden=0, hn_lr=0.3)[2] for count in (1, 2))
    assert np.array_equal(one["new"], two["new"])
    assert not np.allclose(two["joined"][:, 1], one["joined"][:, 1], rtol=1e-3)


def test_fedfomo_sends_newcomers_the_models_of_participants_and_their_models_to_no_client():
    run, _, _ = served("fedfomo", M=2, eps=0.0)
    server = run.alg.admit(run.task, run.server, torch.arange(5, 8), run.key)
    cohort = run.clients.cohort(joining_request(run, server))
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
    """Keeps something per client at the server, and has no `admit`."""

    def init_server(self, task, key):
        return {**super().init_server(task, key), "seen": torch.zeros(task.clients, dtype=task.dtype)}

    def download(self, task, server, ids, t, key):
        return {"w": server["w"]}, {"seen": server["seen"][ids]}


def test_a_method_whose_server_state_cannot_be_extended_is_refused_before_training():
    with user_error("fedavg keeps something per client", "'admit'", "holdout_clients=0"):
        SingleRun(Remembers(), make_task((), federation=federation()), 0, plan=EAGER)
    SingleRun(Remembers(), make_task((), federation=federation(held_out=0)), 0, plan=EAGER)


# -- memory --------------------------------------------------------------------------------------------------------


def test_many_held_out_clients_join_in_blocks(monkeypatch):
    """Also over several rounds, between which each block has its private state."""
    whole = served("fedper", join_rounds=2)[2]
    monkeypatch.setattr("fedloom.engine.driver.MAX_EVAL_CLIENTS", 2)
    blocks = served("fedper", join_rounds=2)[2]
    for view in ("new", "joined"):
        np.testing.assert_allclose(blocks[view], whole[view], rtol=1e-12)


def test_traced_steps_serve_held_out_clients():
    eager, traced = (served("ditto", plan=Plan("stacked", how, chunk=4))[2] for how in ("eager", "traced"))
    for view in ("new", "joined"):
        np.testing.assert_allclose(traced[view], eager[view], rtol=1e-12)
