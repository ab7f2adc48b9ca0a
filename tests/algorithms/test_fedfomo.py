"""FedFomo: weights of other clients' models, which models are sent, identities, and a second implementation."""

import math
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import EAGER, RAGGED, SingleRun, client_info, client_state, make_task, method, run_rounds, tensor
from oracles import (
    EVERY_SETTING,
    assert_equal,
    assert_near,
    assert_same_scores,
    assert_scores,
    first_part,
    flat,
    full_batch_run,
    measure,
)

from fedloom.algorithms.local import Local
from fedloom.algorithms.parts.picking import pick
from fedloom.core.algorithm import Phase
from fedloom.core.tree import size_bytes, take

SIZES = (3, 17, 8, 11)
INFO = client_info(first=False)


def mix(losses, base_loss, base, models, there=None, n=1, own=None, own_loss=math.inf):
    """Weights and mixture by the mean losses over n held-out samples, for models of one parameter vector. The client
    moves from `base`; its own trained model is at `own`, by default far away and useless."""
    own, models = tensor([50, 50]) if own is None else own, torch.stack(models)
    there = torch.ones(len(models), dtype=torch.bool) if there is None else torch.tensor(there)
    each = torch.stack([tensor([0, n * loss, n]) for loss in (*losses, own_loss)])
    alg, task = method("fedfomo"), make_task(SIZES)
    work = {"theta": task.slot({"p": own}), "before": {"p": base}, "base": tensor([0, n * base_loss, n]), "each": each}
    done = alg.mix(task, {**work, "w": each[:-1, 0]}, {"models": {"p": models}, "there": there}, INFO)
    assert torch.equal(done["before"]["p"], done["theta"].params["p"])  # from where it trains now
    return done["w"], done["theta"].params["p"]


def test_fedfomos_weights():
    """Loss 1 before the last training, others 0.5 and 1.2 at distance 2: (0.5, -0.2) / (2 + 1e-5); only the first is
    positive, so the client moves to it entirely. Sums over 7 samples give the same as means."""
    for n in (1, 7):
        w, theta = mix((0.5, 1.2), 1.0, tensor([0, 0]), [tensor([2, 0]), tensor([0, 2])], n=n)
        assert w.tolist() == pytest.approx([0.25, -0.1], abs=1e-5)
        assert w.tolist() == pytest.approx([0.5 / 2.00001, -0.2 / 2.00001], rel=1e-12)
        assert theta.tolist() == pytest.approx([2, 0])


def test_fedfomo_mixes_by_positive_weights():
    """Distances 2 and 4, gains 0.6 and 0.4: weights 0.3 and 0.1 (up to 1e-5), shares 3/4 and 1/4:
    (1, 1) + 3/4 (2, 0) + 1/4 (0, -4) = (2.5, 0). The third is worse and has none."""
    others = [tensor([3, 1]), tensor([1, -3]), tensor([100, 100])]
    w, theta = mix((0.4, 0.6, 1.5), 1.0, tensor([1, 1]), others)
    assert w[:2].tolist() == pytest.approx([0.3, 0.1], rel=1e-5)
    assert theta.tolist() == pytest.approx([2.5, 0], abs=1e-4)


def test_the_clients_own_trained_model_is_a_candidate():
    """The same with the own model in the place of the second; what is uploaded are the weights of others."""
    w, theta = mix((0.4, 1.5), 1.0, tensor([1, 1]), [tensor([3, 1]), tensor([9, 9])], own=tensor([1, -3]), own_loss=0.6)
    assert w.tolist() == pytest.approx([0.3, -0.5 / math.sqrt(128)], rel=1e-5)
    assert theta.tolist() == pytest.approx([2.5, 0], abs=1e-4)


def test_fedfomo_keeps_its_trained_model_if_nothing_is_better_than_before():
    w, theta = mix((1.0, 2.0), 1.0, tensor([1, 1]), [tensor([3, 1]), tensor([1, -3])], own=tensor([7, 7]), own_loss=1.5)
    assert w[0] == 0
    assert theta.tolist() == [7, 7]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fedfomo_is_safe_from_models_that_diverged_empty_slots_and_copies(bad):
    """Also from a copy whose loss comes out a little smaller by rounding."""
    others = [tensor([bad, bad]), tensor([0, 0]), tensor([1, 1]), tensor([1, 3])]
    w, theta = mix((bad, 0.1, 1 - 1e-12, 0.5), 1.0, tensor([1, 1]), others, there=(True, False, True, True))
    assert w[:3].tolist() == [0, 0, 0]
    assert w[3] == pytest.approx(0.25, rel=1e-5)
    assert theta.tolist() == pytest.approx([1, 3])


def test_a_client_without_held_out_samples_trains_locally():
    """One sample is trained on; nothing says whether others are better."""
    task = make_task((1, 20, 20))
    run, _ = run_rounds(method("fedfomo"), task)
    local, _ = run_rounds(method("local"), task)
    assert_near(client_state(run, "theta", 0), client_state(local, "theta", 0))
    assert run.server["P"][0].tolist() == [1, 0, 0]


@dataclass(frozen=True)
class LocalOnPart(Local):
    """Local training on the 80 % of a client's samples that FedFomo does not hold out."""

    def phases(self, task):
        return [Phase(self.step, task.epochs, select=first_part("fomo"))]


@pytest.mark.parametrize("settings", [{}, EVERY_SETTING], ids=["defaults", "every setting"])
def test_fedfomo_without_other_models_is_local_training(settings):
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    run, records = run_rounds(method("fedfomo", M=0), task, evaluate=True)
    reference, expected = run_rounds(LocalOnPart(), task, evaluate=True)
    assert_near(client_state(run, "theta"), client_state(reference, "theta"))
    assert {done.bytes_down for done in records} == {0}
    assert_same_scores(records, expected, ["pre", "post"])


@pytest.mark.parametrize("baseline", ["before", "trained"])
def test_fedfomo_against_plain_pytorch(baseline):
    """Four clients, so all others are sent: no choice, all of the rest."""
    run, plain = full_batch_run(method("fedfomo", baseline=baseline))
    n = len(SIZES)
    thetas, starts, P, mixed = [plain.initial] * n, [plain.initial] * n, np.eye(n), 0
    train, held_out = [], []
    for i, (x, y) in enumerate(plain.train):
        order = np.random.default_rng([run.seed, zlib.crc32(b"fomo"), i]).permutation(len(y))
        first, rest = np.split(order, [int(0.8 * len(y) + 1e-9)])
        train.append((x[first], y[first]))
        held_out.append((x[rest], y[rest]))
    for t in range(4):
        new = []
        for i in plain.clients:
            theta = thetas[i]
            if t > 0:
                base = starts[i] if baseline == "before" else theta
                base_loss, w = measure(base, held_out[i])[1], {}
                for j in plain.clients:
                    if j != i or baseline == "before":
                        distance = float((flat(thetas[j]) - flat(base)).norm())
                        w[j] = (base_loss - measure(thetas[j], held_out[i])[1]) / (distance + 1e-5)
                        P[i, j] += w[j] if j != i else 0
                total = sum(max(v, 0) for v in w.values())
                if total > 0:
                    mixed += 1
                    step = {k: sum(max(w[j], 0) / total * (thetas[j][k] - base[k]) for j in w) for k in theta}
                    theta = {k: base[k] + step[k] for k in theta}
            starts[i] = theta
            new.append(plain.fit(theta, train[i]))
        thetas = new
        done = run.advance()
        for i in plain.clients:
            assert_near(client_state(run, "theta", i), thetas[i], 1e-8)
            assert_near(client_state(run, "before", i), starts[i], 1e-8)
            assert_near(take(run.server["models"], i), thetas[i], 1e-8)
        np.testing.assert_allclose(run.server["P"].numpy(), P, rtol=1e-6, atol=1e-9)
        for view in ("pre", "post"):
            assert_scores(done.scores[view]["test"], thetas, plain.test)
    assert mixed > 0
    assert baseline == "before" or mixed < 3 * n


def test_nothing_is_sent_down_in_the_first_round_and_m_models_from_then_on():
    """Parameters of the small net, in float64; up go the model and a weight for each of five slots."""
    model = (6 * 8 + 8 + 8 * 4 + 4) * 8
    _, records = run_rounds(method("fedfomo"), make_task(RAGGED))
    m = len(RAGGED)
    assert [done.bytes_down for done in records] == [0, m * 5 * model, m * 5 * model]
    assert [done.bytes_up for done in records] == [m * (model + 5 * 8)] * 3


def test_a_client_is_sent_the_last_models_of_those_that_have_uploaded():
    """Clients 1 and 3 have: a new client is sent two models, client 1 one, and both as they were uploaded last."""
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
                assert_equal(take(parts["models"], (row, slot)), client_state(run, "theta", int(who[row, slot])))
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
    run, records = run_rounds(method("fedfomo"), make_task((20,)), evaluate=True)
    reference, _ = run_rounds(LocalOnPart(), make_task((20,)))
    assert_near(client_state(run, "theta"), client_state(reference, "theta"))
    assert {done.bytes_down for done in records} == {0}


KNOWN = torch.tensor([True, True, True, False, True, True])


AFFINITY = tensor([9, 0.1, 0.5, 7.0, -0.2, 0.3]).expand(6, -1).clone()


def picked(ids, count, eps=0.0, key=3, affinity=AFFINITY, known=KNOWN):
    """Whose models are sent to these clients, slot by slot; None is an empty slot."""
    who, there = pick(affinity, known, torch.tensor(ids), count, eps, key)
    return [[int(j) if t else None for j, t in zip(*row, strict=True)] for row in zip(who, there, strict=True)]


def test_the_models_of_highest_affinity_are_sent_but_never_the_clients_own():
    """Client 3 has the highest affinity after 0 but has never uploaded."""
    assert picked([1, 0, 3], 2) == [[0, 2], [2, 5], [0, 2]]
    assert picked([0], 5) == [[2, 5, 1, 4, None]]
    assert picked([0, 2], 2, known=torch.zeros(6, dtype=torch.bool)) == [[None, None]] * 2


def test_of_equal_affinities_each_is_as_likely_to_be_sent():
    """Four equals, one slot: each about 500 times in 2000, with a standard deviation of 19."""
    equal = torch.zeros(6, 6, dtype=torch.float64)
    counts = np.bincount([picked([0], 1, key=k, affinity=equal)[0][0] for k in range(2000)], minlength=6)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert (abs(counts[[1, 2, 4, 5]] - 500) < 100).all()


def test_a_model_is_replaced_with_probability_eps_by_a_random_other_one():
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


def test_what_is_sent_to_a_client_does_not_depend_on_the_rest_of_the_cohort():
    single = [picked([i], 3, eps=0.5)[0] for i in range(6)]
    assert picked(list(range(6)), 3, eps=0.5) == single
    assert picked([4, 1], 3, eps=0.5) == [single[4], single[1]]


@pytest.mark.parametrize(("t", "eps"), [(0, 0.3), (3, 0.15), (6, 0.0), (50, 0.0)])
def test_the_probability_of_a_random_model_falls(t, eps, monkeypatch):
    """max(0, 0.3 - 0.05 t)"""
    seen = []
    monkeypatch.setattr("fedloom.algorithms.fedfomo.pick", lambda *args: seen.append(args))
    alg, task = method("fedfomo"), make_task(SIZES)
    alg.choose(task, alg.init_server(task, 0), torch.arange(4), t, 0)
    (_, _, _, count, found, _) = seen[0]
    assert (count, found) == (3, pytest.approx(eps))
